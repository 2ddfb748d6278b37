//! What several tests of this crate share.
#![allow(dead_code)]

pub(crate) mod make;
pub(crate) mod tables;
