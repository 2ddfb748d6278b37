//! A provider that computes something small and, when told to, misbehaves: the test double for everything a
//! host has to survive.
//!
//! The engine computes, for every element `i` of output `k`:
//! `y[i] = scale * x[i % len(x)] + Σ weights + k`, where `x` is the first input. A graph is either an ONNX model
//! (inputs, outputs and external weights are taken from it, its nodes are not looked at) or the JSON form of
//! `model::Description`. Only `f32` and static shapes.
//!
//! The init option `behaviour` chooses what goes wrong; see `behaviour::Behaviour`. The environment variable
//! `SDRUN_MOCK_QUERY` (`abort` or `hang`) makes loading itself go wrong. `examples/` has the plugins that a
//! host must refuse.

mod behaviour;
mod model;
mod provider;
mod table;

pub use table::sdrun_plugin_query_v1;
