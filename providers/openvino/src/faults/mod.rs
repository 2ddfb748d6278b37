//! Graphs of which OpenVINO 2026.4 computes something else than ONNX says are rewritten, or refused where there is nothing equal. Each
//! file describes a fault. `tests/random_graphs.rs`
//! and the tests of this crate find out whether a new version still has it.

mod abs;
mod masks;
mod refused;
mod slopes;
mod strides;

use sdrun_abi::Result;
use sdrun_graph::Graph;
use sdrun_provider_common::graph_error;

/// Replaces what OpenVINO would compute wrongly by something equal.
///
/// # Errors
/// `Unimplemented` for nodes that cannot be replaced.
pub(crate) fn avoid(graph: &mut Graph) -> Result<()> {
    refused::refuse(graph)?;
    abs::keep_absolute_values(graph);
    strides::pad_before_strides(graph).map_err(graph_error)?;
    slopes::align_slopes(graph).map_err(graph_error)?;
    masks::keep_masks_apart(graph).map_err(graph_error)
}
