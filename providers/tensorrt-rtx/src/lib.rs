//! The TensorRT-RTX provider: NVIDIA GPUs.
//!
//! An engine is built without its weights and without a GPU: zeros stand in for the weights, which the plan leaves out,
//! and a table says how each weight of the plan is made of weights of the graph. On the machine with the GPU the plan
//! is loaded and given weights through that table, as often as they change. What was and was not run is in README.md.
//!
//! * `ffi`: safe layer over the C++ shim (shim/) and the CUDA driver; all unsafe code.
//! * `runtime`: what is loaded in this process. `devices`, `target`: what engines are built for and run on.
//! * `compile`, `lower`, `options`: from a graph to a plan. `table`: what its weights are made of. `payload`: both as bytes.
//! * `engine`, `refit`, `session`, `kernels`: from a plan to results.

mod compile;
mod devices;
mod engine;
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

pub use provider::TensorRtRtx;

/// The static part of this plugin's manifest (`manifest.json`); packaging fills in what depends on the build.
pub const MANIFEST: &str = include_str!("../manifest.json");

sdrun_abi::export_provider! {
    id: "tensorrt-rtx", vendor: "sdrun", version: env!("CARGO_PKG_VERSION"),
    build_id: env!("SDRUN_BUILD_ID"), provider: TensorRtRtx
}
