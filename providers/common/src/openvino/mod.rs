//! Works around what OpenVINO 2026.4 computes differently from ONNX: rewrites such graphs, or refuses them if no rewrite helps. Each file
//! describes a fault. `tests/random_graphs.rs` and the tests of the openvino
//! provider show whether a new version still has it.

mod abs;
mod extremes;
mod masks;
mod refused;
mod rotary;
mod slopes;
mod strides;

use crate::graph_error;
use sdrun_abi::Result;
use sdrun_graph::Graph;

/// Rewrites what OpenVINO would compute wrongly.
///
/// # Errors
/// `Unimplemented` for nodes that no rewrite helps.
pub fn avoid_faults(graph: &mut Graph) -> Result<()> {
    refused::refuse(graph)?;
    abs::keep_absolute_values(graph);
    extremes::start_from_infinity(graph);
    strides::pad_before_strides(graph);
    slopes::align_slopes(graph);
    masks::keep_masks_apart(graph).map_err(graph_error)?;
    rotary::join_halves_apart(graph).map_err(graph_error)
}
