//! The TensorRT-RTX provider: NVIDIA GPUs.
//!
//! Engines are built without weights and without a GPU. Zeros stand in for the weights, and the plan omits them. A
//! table says how to compute each weight of the plan from weights of the graph. On the machine with the GPU, the plan
//! is loaded and receives weights through that table whenever they change. README.md lists what has been run.
//!
//! * `ffi`: safe layer over the C++ shim (shim/) and the CUDA driver; all unsafe code.
//! * `runtime`: the libraries loaded in this process. `devices`, `target`: what engines are built for and run on.
//! * `compile`, `lower`, `options`: from a graph to a plan. `table`: how to compute its weights. `payload`: both as
//!   bytes.
//! * `engine`, `refit`, `session`, `kernels`: from a plan to results.

mod compile;
mod devices;
mod engine;
mod faults;
mod ffi;
mod kernels;
mod lower;
mod options;
mod payload;
mod provider;
mod refit;
mod runtime;
mod session;
mod table;
mod target;
#[cfg(test)]
mod tests;

#[doc(hidden)]
pub use payload::read_anything;
pub use provider::TensorRtRtx;

/// The static part of this plugin's manifest (`manifest.json`); packaging adds the build-dependent part.
pub const MANIFEST: &str = include_str!("../manifest.json");

sdrun_abi::export_provider! {
    id: "tensorrt-rtx", vendor: "sdrun", version: env!("CARGO_PKG_VERSION"),
    build_id: env!("SDRUN_BUILD_ID"), provider: TensorRtRtx
}
