//! Sources of weights.
//!
//! * [`OnnxWeights`]: the initializers of an ONNX model, inline or in external data files.
//! * [`SafetensorsWeights`]: one or several safetensors files.
//! * [`SyntheticWeights`]: values computed from the tensors' names ([`synthetic`]). Anyone can recreate them, so a graph
//!   without weights can be run, compared and measured.
//! * [`Checkpoint`]: a model file or folder of any layout, read as the state dicts of diffusers ([`StateDict`]).
//! * [`InMemoryWeights`]: tensors a host already holds.
//! * [`adapter`]: LoRA and its relatives, merged into weights; [`embedding`]: textual inversion.
//! * [`Cast`] converts the element types of a source; [`check_complete`] checks that a source has every weight of a
//!   graph.
//!
//! Each is an [`sdrun_abi::WeightSource`]: it delivers tensors by name, one at a time, and maps files instead of reading them
//! whole. [`Binding`] says which tensor of a checkpoint each weight of a graph is, and [`WeightStack`] puts a
//! checkpoint and adapters together for it. [`builtin`] holds the models that come with the library.

pub mod adapter;
pub mod binding;
pub mod builtin;
mod cast;
mod check;
pub mod checkpoint;
mod convert;
pub mod embedding;
mod fit;
mod in_memory;
pub mod keys;
mod layout;
mod memory;
mod onnx;
mod safetensors;
mod simd;
mod stack;
mod state;
pub mod synthetic;
mod token_rows;
mod unique;
mod weight_map;

pub use adapter::Adapter;
pub use binding::{Binding, BoundTensor, ImportReport};
pub use cast::Cast;
pub use check::check_complete;
pub use checkpoint::Checkpoint;
pub use in_memory::InMemoryWeights;
pub use onnx::OnnxWeights;
pub use safetensors::SafetensorsWeights;
pub use stack::{AdapterUse, LayerReport, WeightStack};
pub use state::{Component, StateDict};
pub use token_rows::EmbeddingReport;
pub use weight_map::{MappedTensor, SyntheticWeights, Transform, WeightMap};
