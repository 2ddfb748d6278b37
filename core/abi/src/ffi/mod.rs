//! The C ABI: structs ([`raw`]), the plugin's side ([`export_provider!`]) and the host's side ([`Plugin`]). All
//! unsafe code of this crate is in this module.
//!
//! [`export_provider!`]: crate::export_provider
#![allow(unsafe_code)]

mod buffer;
pub mod callbacks;
pub mod export;
mod import;
pub mod prefix;
pub mod raw;

pub use buffer::AlignedBuffer;
pub use import::{Plugin, PluginIdentity};
