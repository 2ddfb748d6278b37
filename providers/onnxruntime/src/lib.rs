//! The ONNX Runtime provider: the CPU of any machine, in the graph's own arithmetic. The reference for
//! accuracy.
//!
//! ONNX Runtime takes the values of weights when a session is created and keeps them in forms of its own.
//! So an engine is the ONNX graph itself, and giving it weights means creating a session.
//!
//! * `ffi`: safe layer over the C API, loaded with the crate `ort`; all unsafe code.
//! * `weights`: where a session takes its weights from.
//! * `log`: what ONNX Runtime says, handed to the host at the end of a call.
//! * `engine`, `session`: the traits of sdrun-abi.

mod engine;
mod ffi;
mod log;
mod provider;
mod session;
mod watch;
mod weights;

pub use provider::OnnxRuntime;

/// The static part of this plugin's manifest (`manifest.json`); packaging fills in what depends on the build.
pub const MANIFEST: &str = include_str!("../manifest.json");

sdrun_abi::export_provider! {
    id: "onnxruntime", vendor: "sdrun", version: env!("CARGO_PKG_VERSION"),
    build_id: env!("SDRUN_BUILD_ID"), provider: OnnxRuntime
}
