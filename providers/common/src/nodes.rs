//! New parts of a graph that a provider rewrites.

use sdrun_graph::{Dim, Graph, Initializer, Node, Tensor, Value, ValueId};
use std::collections::BTreeMap;

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
