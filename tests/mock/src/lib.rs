//! A provider that computes something simple and misbehaves on request: the test double for everything that a host must survive.
//!
//! The engine computes, for every element `i` of output `k`:
//! `y[i] = scale * x[i % len(x)] + Σ weights + k`, where `x` is the first input. A graph is the JSON form of
//! `model::Description`, or an ONNX model, from which the mock takes inputs, outputs and external weights but ignores the nodes.
//! It supports only `f32` and static shapes.
//!
//! The init option `behaviour` chooses what goes wrong; see `behaviour::Behaviour`. The environment variable `SDRUN_MOCK_QUERY`
//! (`abort` or `hang`) makes loading go wrong. `examples/` has plugins that a host must refuse.

mod behaviour;
#[cfg(unix)]
mod escape;
mod model;
mod provider;
mod table;

pub use table::sdrun_plugin_query_v1;
