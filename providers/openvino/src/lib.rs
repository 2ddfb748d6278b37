//! The OpenVINO provider: Intel CPUs, GPUs and NPUs, and any x86-64 or Arm CPU.
//!
//! OpenVINO cannot change the weights of a compiled model, and its own weightless export is wrong for other
//! weights (README.md). So a stripped engine is the ONNX graph itself; giving it weights means reading and
//! compiling it again, which takes a fraction of a second for a VAE and a few seconds for a UNet, and is
//! always right. With the option `weights=inputs` they are inputs of a model compiled once. An engine with
//! baked weights is OpenVINO's own blob.
//!
//! * `ffi`: safe layer over the C API; all unsafe code.
//! * `runtime`: the one loaded OpenVINO of the process, and compiling on it.
//! * `devices`: what it can use. `cache`: where it keeps compiled models.
//! * `staging`: getting weights past OpenVINO's ONNX reader without copying them.
//! * `engine`, `as_inputs`, `refit`, `session`: the traits of sdrun-abi.

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

/// The static part of this plugin's manifest (`manifest.json`); packaging fills in what depends on the build.
pub const MANIFEST: &str = include_str!("../manifest.json");

sdrun_abi::export_provider! {
    id: "openvino", vendor: "sdrun", version: env!("CARGO_PKG_VERSION"),
    build_id: env!("SDRUN_BUILD_ID"), provider: OpenVino
}
