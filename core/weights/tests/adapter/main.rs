//! Adapters: every kind, spelling and edge case against arithmetic in f64 that is written down once more here, and
//! files of other programs against what those programs make of them (`oracles`).

#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod edges;
mod fixtures;
mod formulas;
mod kinds;
mod oracles;
mod peft;
mod random;
mod speed;
mod spellings;
