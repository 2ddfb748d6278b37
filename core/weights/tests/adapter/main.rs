//! Adapters: every kind, spelling and edge case against arithmetic in f64 that is written down once more here, and
//! files of other programs against what those programs make of them (`oracles`; they lie in `SDRUN_TINY_DIR`).

#![allow(clippy::unwrap_used)]

mod edges;
mod fixtures;
mod formulas;
mod kinds;
mod oracles;
mod random;
mod speed;
mod spellings;
