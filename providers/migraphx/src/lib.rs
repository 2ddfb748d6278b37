//! The MIGraphX provider: AMD GPUs through AMD's graph compiler.
//!
//! MIGraphX cannot change the weights of a compiled program. So a stripped engine is a program whose weights are
//! parameters, bound in buffers once for a session; a refit copies those that changed. What a compiler would compute once out of constant
//! weights (concatenations, transpositions, casts) is taken out of the graph and computed by the host when weights are
//! given. An engine with baked weights is an ordinary program.
//!
//! * `ffi`: safe layer over MIGraphX's C API and HIP; all unsafe code.
//! * `runtime`: the one loaded MIGraphX of the process.
//! * `devices`: what it can use.
//! * `options`: what a user can choose.
//! * `compile`: from a graph to a program. `half`: graphs in half precision.
//!   `upsample`: a way around a large table.
//! * `payload`: programs in engine files.
//! * `engine`, `session`: the traits of sdrun-abi.

mod compile;
mod devices;
mod engine;
mod ffi;
mod half;
mod options;
mod payload;
mod provider;
mod runtime;
mod session;
mod upsample;

pub use provider::MiGraphX;

/// The static part of this plugin's manifest (`manifest.json`); packaging fills in what depends on the build.
pub const MANIFEST: &str = include_str!("../manifest.json");

sdrun_abi::export_provider! {
    id: "migraphx", vendor: "sdrun", version: env!("CARGO_PKG_VERSION"),
    build_id: env!("SDRUN_BUILD_ID"), provider: MiGraphX
}
