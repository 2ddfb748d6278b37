//! New parts of a graph that a provider rewrites.

use sdrun_abi::DType;
use sdrun_graph::{Attribute, Dim, Graph, Initializer, Node, Tensor, Value, ValueId};
use std::collections::BTreeMap;

/// Adds nodes around a node or in its place.
#[derive(Debug)]
pub struct Rewrite<'a> {
    /// The graph that grows.
    pub graph: &'a mut Graph,
    of: &'a Node,
    /// Starts the names of what it adds.
    name: String,
    count: usize,
}

impl<'a> Rewrite<'a> {
    /// `name` must be that of a value followed by `/` and a word of the rewrite's own.
    pub fn new(graph: &'a mut Graph, of: &'a Node, name: String) -> Self {
        Rewrite { graph, of, name, count: 0 }
    }

    /// Adds a node, and a value for its output.
    pub fn node(
        &mut self,
        op: &str,
        inputs: &[ValueId],
        dtype: Option<DType>,
        shape: Option<Vec<Dim>>,
    ) -> ValueId {
        let output = self.value(dtype, shape);
        self.node_into(op, inputs, output);
        output
    }

    /// Adds a node whose output exists.
    pub fn node_into(&mut self, op: &str, inputs: &[ValueId], output: ValueId) {
        self.graph.nodes.push(Node {
            name: self.graph.value(output).name.clone(),
            domain: String::new(),
            op_type: op.into(),
            inputs: inputs.iter().map(|id| Some(*id)).collect(),
            outputs: vec![Some(output)],
            attributes: BTreeMap::new(),
            metadata: self.of.metadata.clone(),
        });
    }

    /// Sets an attribute of the last node.
    pub fn set(&mut self, name: &str, value: i64) {
        if let Some(node) = self.graph.nodes.last_mut() {
            node.attributes.insert(name.into(), Attribute::Int(value));
        }
    }

    /// Adds a value that nothing computes yet.
    pub fn value(&mut self, dtype: Option<DType>, shape: Option<Vec<Dim>>) -> ValueId {
        self.count += 1;
        let name = format!("{}{}", self.name, self.count);
        self.graph.add_value(Value { name, dtype, shape })
    }

    /// Adds a constant.
    pub fn constant(&mut self, tensor: Tensor) -> ValueId {
        let shape = tensor.shape().iter().map(|size| Dim::Known(*size)).collect();
        let id = self.value(Some(tensor.dtype()), Some(shape));
        self.graph.initializers.insert(id, Initializer::Constant(tensor));
        id
    }

    /// Adds a list of integers.
    pub fn ints(&mut self, values: &[i64]) -> ValueId {
        self.constant(Tensor::from_i64s(values))
    }
}
