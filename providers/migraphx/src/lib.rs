//! The MIGraphX provider: AMD GPUs through AMD's graph compiler.
//!
//! MIGraphX cannot change the weights of a compiled program. So a stripped engine is a program whose weights are
//! parameters. A session binds their buffers once, and a refit copies only the weights that changed. A compiler
//! normally precomputes what depends only on constant weights (concatenations, transpositions, casts). These
//! computations leave the graph, and the host does them when it gets the weights. An engine with baked weights is an
//! ordinary program.
//!
//! * `ffi`: safe layer over MIGraphX's C API and HIP; contains all unsafe code.
//! * `runtime`: the MIGraphX library that this process has loaded.
//! * `devices`: the available devices.
//! * `options`: the user's build options.
//! * `compile`: compiles a graph into a program. `half`: converts graphs to half precision. `upsample`: rewrites
//!   upsampling, which would otherwise need a large table.
//! * `payload`: format of programs in engine files.
//! * `engine`, `session`: implement the traits of sdrun-abi.

mod compile;
mod devices;
mod engine;
mod faults;
mod ffi;
mod half;
mod options;
mod payload;
mod provider;
mod runtime;
mod session;
mod upsample;

pub use provider::MiGraphX;

/// The static part of this plugin's manifest (`manifest.json`); packaging adds the parts that depend on the build.
pub const MANIFEST: &str = include_str!("../manifest.json");

sdrun_abi::export_provider! {
    id: "migraphx", vendor: "sdrun", version: env!("CARGO_PKG_VERSION"),
    build_id: env!("SDRUN_BUILD_ID"), provider: MiGraphX
}
