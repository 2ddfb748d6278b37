//! Files that somebody else names: models, checkpoints, tables beside them, engines, outputs.
//!
//! A path may lead to a pipe that nobody writes to, to `/dev/zero`, to 20 GB without content, or through a link to a file
//! that must not change. Every crate therefore opens such files with [`open_regular`] or [`read_small`], maps them with
//! [`Map`], and writes them with [`write()`].

mod map;
mod read;
mod write;

pub use map::{Map, Part};
pub use read::{Links, open_lock, open_regular, read_small, remember_input, remember_inputs};
pub use write::{Existing, Output, check_target, write};
