//! Where weights come from.
//!
//! * [`OnnxWeights`]: the initializers of an ONNX model, inline or in external data files.
//! * [`SafetensorsWeights`]: one or several safetensors files.
//! * [`SyntheticWeights`]: values made by arithmetic on the tensors' names ([`synthetic`]); everybody can
//!   recreate them, so a graph without weights can be run, compared and measured.
//! * [`MapSource`]: tensors a host already holds.
//! * [`adapter`]: LoRA and its relatives, merged into weights; [`embedding`]: textual inversion.
//! * [`Layered`] and [`Cast`] put sources together; [`check_complete`] tells whether a source has all a graph
//!   needs.
//!
//! Every one is an [`sdrun_abi::WeightSource`]: tensors by name, one at a time, files mapped and never read
//! whole. [`builtin`] holds the models that come with the library.

pub mod adapter;
pub mod builtin;
mod cast;
mod check;
mod convert;
pub mod embedding;
pub mod keys;
mod layered;
mod map;
mod onnx;
mod safetensors;
mod state;
pub mod synthetic;
mod weight_map;

pub use cast::Cast;
pub use check::check_complete;
pub use layered::{Layered, MapSource};
pub use onnx::OnnxWeights;
pub use safetensors::SafetensorsWeights;
pub use state::{Component, StateDict};
pub use weight_map::{MappedTensor, SyntheticWeights, Transform, WeightMap};
