//! Adapters: every kind, spelling and edge case against an independent implementation in f64, and files of other
//! programs against the results of those programs (`oracles`).

#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod edges;
mod fixtures;
mod formulas;
mod keys;
mod kinds;
mod oracles;
mod peft;
mod random;
mod speed;
mod spellings;
