//! Helpers that several tests of this crate share.
#![allow(dead_code, clippy::unwrap_used)]

pub(crate) mod gguf;
pub(crate) mod make;
pub(crate) mod sparse;
pub(crate) mod tables;
