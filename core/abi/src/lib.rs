//! The contract between sdrun and a provider plugin.
//!
//! * [`Provider`], [`Engine`], [`Session`]: the Rust traits that a provider in this tree implements. The host uses
//!   the same traits, whether the provider is linked in, loaded from a plugin file ([`ffi::Plugin`]) or in a worker
//!   process.
//! * [`export_provider!`]: creates the C side of the ABI from a `Provider`.
//! * [`ffi`]: the C structs, with their sizes and offsets asserted at compile time, and both sides of the ABI. It is
//!   the only module with unsafe code.
//! * [`Manifest`]: the JSON file beside a plugin library, readable without loading any code.
//!
//! Two kinds of data cross the ABI. Calls and tensors are `#[repr(C)]` structs (see `docs/provider-spec.md`).
//! Descriptions (devices, capabilities, engine information, reports) are UTF-8 JSON documents of serde types, which
//! can gain fields without a change of the ABI.

mod cores;
mod device;
mod error;
pub mod ffi;
mod hint;
mod manifest;
mod precision;
mod provider;
mod tensor;
pub mod types;
mod weight;

pub use cores::default_threads;
pub use device::{CancelSupport, Capabilities, Device, DeviceKind, WeightUpdate};
pub use error::{Error, ErrorCode, Result};
pub use ffi::AlignedBuffer;
pub use hint::Hint;
pub use manifest::{Library, Manifest, PipPackage, Provide, RuntimeSpec, SandboxSpec, Wheel};
pub use precision::{DType, Precision};
pub use provider::{Engine, Flow, Host, LogLevel, NoHost, Provider, Session, TimingPlan};
pub use tensor::{DeviceTensor, Input, OutputSink, OutputSpec, TensorView, VecSink};
pub use types::*;
pub use weight::{EncodedWeight, NoWeights, TRANSPOSED, TakeRows, Weight, WeightSource};

/// Major version of the ABI. Any change except appending a field needs a new major version and a new symbol name.
pub const ABI_MAJOR: u16 = 1;
/// Minor version of the ABI; increases when fields are appended.
pub const ABI_MINOR: u16 = 0;
/// Name of the only symbol that a plugin exports.
pub const QUERY_SYMBOL: &str = "sdrun_plugin_query_v1";
