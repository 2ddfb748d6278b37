//! Tests of sdrun as a whole, and the conformance runner for provider plugins.
//!
//! * [`nodes`]: the ONNX backend node tests against any plugin, with a snapshot of what passes.
//! * [`spec`]: the rules of `docs/provider-spec.md` against any plugin.
//! * [`lab`]: what tests of models work with.
//! * [`kernels`]: how many kernels a run on a GPU that is not there launches.
//! * [`npy`]: NumPy's files.
//! * [`pipelines`]: small pipelines with what PyTorch computes on them.
//! * [`place`]: where the things under test are.
//!
//! The binary `sdrun-conformance` runs the first two; `golden.rs` and the other files beside this folder are
//! tests of the providers in this repository.

pub mod kernels;
pub mod lab;
pub mod nodes;
pub mod npy;
pub mod pipelines;
pub mod place;
pub mod spec;
