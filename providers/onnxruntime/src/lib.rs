//! The ONNX Runtime provider: the CPU of any machine, in the graph's own element types. It is the reference for
//! accuracy. Extensions add devices: execution providers in libraries of their own. So do execution providers that are part of a
//! user's own copy of ONNX Runtime.
//!
//! ONNX Runtime takes the values of weights when it creates a session and repacks them. So an engine is the ONNX
//! graph itself, and giving it weights means creating a session.
//!
//! * `ffi`: safe layer over the C API, which the crate `ort` loads; contains all unsafe code.
//! * `weights`: the sources of a session's weights.
//! * `log`: passes ONNX Runtime's log records to the host at the end of a call.
//! * `fallback`: tells what a device leaves to the CPU.
//! * `ep`: what differs between execution providers, and how to avoid their faults.
//! * `engine`, `baked`, `session`: implement the traits of sdrun-abi.

mod baked;
mod engine;
mod ep;
mod fallback;
mod ffi;
mod log;
mod provider;
mod session;
mod watch;
mod weights;

pub use provider::OnnxRuntime;

/// The static part of this plugin's manifest (`manifest.json`); packaging adds the parts that depend on the build.
pub const MANIFEST: &str = include_str!("../manifest.json");

sdrun_abi::export_provider! {
    id: "onnxruntime", vendor: "sdrun", version: env!("CARGO_PKG_VERSION"),
    build_id: env!("SDRUN_BUILD_ID"), provider: OnnxRuntime
}
