//! Safe access to files that users or downloads name: models, checkpoints, tables beside them, engines, outputs.
//!
//! A path may lead to a pipe without a writer, to `/dev/zero`, to a sparse file of 20 GB, or through a link to a file
//! that must not change. So every crate opens such files with [`open_regular`] or [`read_small`], maps them with
//! [`Map`], and writes them with [`write()`].

mod map;
mod read;
mod write;

pub use map::{Map, Part};
pub use read::{
    Links, forget_input, inputs, open_lock, open_regular, read_small, remember_input, remember_inputs,
};
pub use write::{Existing, Output, check_target, write};
