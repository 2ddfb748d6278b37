//! Works around what OpenVINO 2026.4 computes differently from ONNX: rewrites such graphs, or refuses them if no rewrite helps. Each file
//! describes a fault. `tests/random_graphs.rs` and the tests of this crate show whether a new version still has it.

mod abs;
mod masks;
mod refused;
mod slopes;
mod strides;

use sdrun_abi::Result;
use sdrun_graph::{Dim, Graph, Initializer, Node, Tensor, Value, ValueId};
use sdrun_provider_common::graph_error;
use std::collections::BTreeMap;

/// Rewrites what OpenVINO would compute wrongly.
///
/// # Errors
/// `Unimplemented` for nodes that no rewrite helps.
pub(crate) fn avoid(graph: &mut Graph) -> Result<()> {
    refused::refuse(graph)?;
    abs::keep_absolute_values(graph);
    strides::pad_before_strides(graph).map_err(graph_error)?;
    slopes::align_slopes(graph).map_err(graph_error)?;
    masks::keep_masks_apart(graph).map_err(graph_error)
}

/// A node without attributes that belongs to a rewrite of `of`.
pub(crate) fn new_node(of: &Node, name: String, op: &str, inputs: &[ValueId], output: ValueId) -> Node {
    Node {
        name,
        domain: String::new(),
        op_type: op.into(),
        inputs: inputs.iter().map(|id| Some(*id)).collect(),
        outputs: vec![Some(output)],
        attributes: BTreeMap::new(),
        metadata: of.metadata.clone(),
    }
}

/// A new constant.
pub(crate) fn new_constant(graph: &mut Graph, name: String, tensor: Tensor) -> ValueId {
    let shape = tensor.shape().iter().map(|size| Dim::Known(*size)).collect();
    let id = graph.add_value(Value { name, dtype: Some(tensor.dtype()), shape: Some(shape) });
    graph.initializers.insert(id, Initializer::Constant(tensor));
    id
}
