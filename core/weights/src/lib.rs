//! Where weights come from.
//!
//! * [`OnnxWeights`]: the initializers of an ONNX model, inline or in external data files.
//! * [`SafetensorsWeights`]: one or several safetensors files.
//! * [`SyntheticWeights`]: values made by arithmetic on the tensors' names ([`synthetic`]); everybody can
//!   recreate them, so a graph without weights can be run, compared and measured.
//! * [`Checkpoint`]: a model file or folder of any layout, read as the state dicts of diffusers ([`StateDict`]).
//! * [`MapSource`]: tensors a host already holds.
//! * [`adapter`]: LoRA and its relatives, merged into weights; [`embedding`]: textual inversion.
//! * [`Cast`] converts the element types of a source; [`check_complete`] checks that a source has every weight of a
//!   graph.
//!
//! Every one is an [`sdrun_abi::WeightSource`]: tensors by name, one at a time, files mapped and never read
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
mod identity;
pub mod keys;
mod layout;
mod map_source;
mod memory;
mod onnx;
mod safetensors;
mod simd;
mod stack;
mod state;
pub mod synthetic;
mod weight_map;
mod words;

pub use adapter::Adapter;
pub use binding::{Binding, BoundTensor, ImportReport};
pub use cast::Cast;
pub use check::check_complete;
pub use checkpoint::Checkpoint;
pub use map_source::MapSource;
pub use onnx::OnnxWeights;
pub use safetensors::SafetensorsWeights;
pub use stack::{AdapterUse, LayerReport, WeightStack};
pub use state::{Component, StateDict};
pub use weight_map::{MappedTensor, SyntheticWeights, Transform, WeightMap};
pub use words::EmbeddingReport;
