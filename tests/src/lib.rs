//! Whole-system tests of sdrun, and the conformance runner for provider plugins.
//!
//! * [`nodes`]: the ONNX backend node tests against any plugin, with a snapshot of the results.
//! * [`spec`]: the rules of `docs/provider-spec.md` against any plugin.
//! * [`checkpoints`]: checkpoints of full size, for measuring.
//! * [`lab`]: the environment for tests of models.
//! * [`kernels`]: the number of kernels that a run launches on a simulated GPU.
//! * [`machine`]: a user's machine with sdrun on it.
//! * [`memory`]: the memory of this process.
//! * [`npy`]: NumPy's files.
//! * [`onnx`]: ONNX models made by hand.
//! * [`pipelines`]: small pipelines with PyTorch's results.
//! * [`random`]: random numbers that a seed repeats.
//! * [`place`]: where the programs and data under test are.
//!
//! The binary `sdrun-conformance` runs the first two. `golden.rs` and the other files beside this folder test the providers in
//! this repository.

pub mod checkpoints;
pub mod evaluator;
pub mod kernels;
pub mod lab;
pub mod machine;
pub mod memory;
pub mod nodes;
pub mod npy;
pub mod onnx;
pub mod pipelines;
pub mod place;
pub mod random;
pub mod spec;
