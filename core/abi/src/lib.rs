//! The contract between sdrun and a provider plugin.
//!
//! * [`Provider`], [`Engine`], [`Session`]: the Rust traits an author in this tree implements. The host
//!   uses the same traits, whether the provider is linked in, loaded from a plugin file ([`ffi::Plugin`])
//!   or living in a worker process.
//! * [`export_provider!`]: makes the C side of the ABI out of a `Provider`.
//! * [`ffi`]: the C structs, with their sizes and offsets asserted at compile time, and both sides of
//!   the border. It is the only module with unsafe code.
//! * [`Manifest`]: the JSON file beside a plugin library, readable without loading any code.
//!
//! Two kinds of data cross the border. Calls and tensors are `#[repr(C)]` structs (see `docs/provider-spec.md`);
//! descriptions (devices, capabilities, engine information, reports) are UTF-8 JSON documents of the serde
//! types in [`types`], so that they can gain fields without a change of the ABI.

mod error;
pub mod ffi;
mod hint;
mod manifest;
mod provider;
pub mod types;

pub use error::{Error, ErrorCode, Result};
pub use ffi::AlignedBuffer;
pub use hint::Hint;
pub use manifest::{Library, Manifest, ManifestError, PipPackage, Provide, RuntimeSpec, Wheel};
pub use provider::{
    DeviceTensor, Engine, Flow, Host, Input, LogLevel, NoHost, OutputSink, OutputSpec, Provider, Session,
    TensorView, TimingPlan, VecSink, Weight, WeightSource,
};
pub use types::*;

/// Major version of the ABI. A change that is not an appended field makes a new major version and a new
/// symbol name.
pub const ABI_MAJOR: u16 = 1;
/// Minor version of the ABI: counts appended fields.
pub const ABI_MINOR: u16 = 0;
/// Name of the one symbol a plugin exports.
pub const QUERY_SYMBOL: &str = "sdrun_plugin_query_v1";
