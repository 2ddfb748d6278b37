//! The OpenVINO provider: Intel CPUs, GPUs and NPUs, and any x86-64 or Arm CPU.
//!
//! OpenVINO cannot change the weights of a compiled model, and its own weightless export gives wrong results with
//! other weights (README.md). So a stripped engine is the ONNX graph itself. To give it weights, the provider reads
//! and compiles the graph again, which is always correct and takes a fraction of a second for a VAE and a few seconds
//! for a UNet. With the option `weights=inputs`, weights are inputs of a model that is compiled once. An engine with
//! baked weights is OpenVINO's own blob.
//!
//! * `ffi`: safe layer over the C API; contains all unsafe code.
//! * `runtime`: the OpenVINO that this process has loaded, and compilation.
//! * `devices`: the available devices. `cache`: stores compiled models.
//! * `staging`: passes weights to OpenVINO's ONNX reader without copying them.
//! * `engine`, `as_inputs`, `refit`, `session`: implement the traits of sdrun-abi.

mod as_inputs;
mod cache;
mod devices;
mod engine;
mod ffi;
mod provider;
mod refit;
mod runtime;
mod session;
mod staging;

pub use provider::OpenVino;

/// The static part of this plugin's manifest (`manifest.json`); packaging adds the parts that depend on the build.
pub const MANIFEST: &str = include_str!("../manifest.json");

sdrun_abi::export_provider! {
    id: "openvino", vendor: "sdrun", version: env!("CARGO_PKG_VERSION"),
    build_id: env!("SDRUN_BUILD_ID"), provider: OpenVino
}
