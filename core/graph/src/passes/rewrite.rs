//! Replaces nodes by others that compute the same result.

use super::{eliminate_dead, uses::Uses};
use crate::{Attribute, Dim, Graph, Initializer, Node, Tensor, Value, ValueId, fused};
use sdrun_abi::DType;
use std::collections::{BTreeMap, HashSet};

/// Prefix of the names of values that rules add.
const PREFIX: &str = "sdrun/";

/// Values and constants that a rule adds.
pub(crate) struct Fresh {
    first: u32,
    values: Vec<Value>,
    constants: Vec<(ValueId, Tensor)>,
    /// The number in the next name.
    number: usize,
}

impl Fresh {
    fn new(graph: &Graph) -> Self {
        let numbers = graph.values.iter().filter_map(|v| v.name.strip_prefix(PREFIX)?.parse::<usize>().ok());
        let number = numbers.max().map_or(0, |n| n + 1);
        Fresh { first: graph.values.len() as u32, values: Vec::new(), constants: Vec::new(), number }
    }
    /// A new value for a new node to compute.
    pub(crate) fn value(&mut self, dtype: Option<DType>, shape: Option<Vec<Dim>>) -> ValueId {
        self.number += 1;
        self.values.push(Value { name: format!("{PREFIX}{}", self.number - 1), dtype, shape });
        ValueId(self.first + self.values.len() as u32 - 1)
    }
    pub(crate) fn constant(&mut self, tensor: Tensor) -> ValueId {
        let id = self.value(Some(tensor.dtype()), Some(crate::infer::dims::known(tensor.shape())));
        self.constants.push((id, tensor));
        id
    }
    /// A shape constant for a Reshape.
    pub(crate) fn shape(&mut self, dims: &[i64]) -> ValueId {
        self.constant(Tensor::from_i64s(dims))
    }
    /// Restores an earlier `length` and `constants` when a rule gives up halfway.
    fn truncate(&mut self, (values, constants): (usize, usize)) {
        self.number -= self.values.len() - values;
        self.values.truncate(values);
        self.constants.truncate(constants);
    }
    fn mark(&self) -> (usize, usize) {
        (self.values.len(), self.constants.len())
    }
}

/// The names of a graph's values, for a pass that adds some.
pub(crate) struct Names(HashSet<String>);

impl Names {
    pub(crate) fn of(graph: &Graph) -> Self {
        Names(graph.values.iter().map(|value| value.name.clone()).collect())
    }

    /// Adds a value under its name, or under a similar one if it is taken.
    pub(crate) fn add_value(&mut self, graph: &mut Graph, mut value: Value) -> ValueId {
        while !self.0.insert(value.name.clone()) {
            value.name.push('_');
        }
        graph.add_value(value)
    }

    /// Adds a constant under `name`, or under a similar one if it is taken.
    pub(crate) fn add_constant(&mut self, graph: &mut Graph, name: String, tensor: Tensor) -> ValueId {
        let shape = Some(tensor.shape().iter().map(|d| Dim::Known(*d)).collect());
        let id = self.add_value(graph, Value { name, dtype: Some(tensor.dtype()), shape });
        graph.initializers.insert(id, Initializer::Constant(tensor));
        id
    }
}

/// A node of the default domain without attributes, named after its output.
pub(crate) fn computing(graph: &Graph, op: &str, inputs: &[ValueId], output: ValueId) -> Node {
    Node {
        name: graph.value(output).name.clone(),
        domain: String::new(),
        op_type: op.to_owned(),
        inputs: inputs.iter().copied().map(Some).collect(),
        outputs: vec![Some(output)],
        attributes: BTreeMap::new(),
        metadata: BTreeMap::new(),
    }
}

/// A node of the default domain with one output.
pub(crate) fn node<const N: usize>(
    like: &Node,
    op: &str,
    inputs: &[ValueId],
    output: Option<ValueId>,
    attributes: [(&str, Attribute); N],
) -> Node {
    let attributes: BTreeMap<String, Attribute> =
        attributes.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Node {
        name: like.name.clone(),
        domain: String::new(),
        op_type: op.to_owned(),
        inputs: inputs.iter().copied().map(Some).collect(),
        outputs: vec![output],
        attributes,
        metadata: like.metadata.clone(),
    }
}

/// A node of [`fused::DOMAIN`] that computes the output of `like`.
pub(crate) fn fused_node<const N: usize>(
    like: &Node,
    op: &str,
    inputs: &[ValueId],
    attributes: [(&str, Attribute); N],
) -> Node {
    let fused = node(like, op, inputs, like.output(0), attributes);
    Node { domain: fused::DOMAIN.to_owned(), ..fused }
}

/// Offers every node to `rule`, which may return replacement nodes. Replacements must define the node's outputs from
/// values computed before it. Dead values are removed afterwards. Returns the number of replaced nodes.
///
/// A rule sees the graph as it was before the pass, and values keep their meaning, so replacements cannot disturb
/// each other.
pub(crate) fn rewrite(
    graph: &mut Graph,
    mut rule: impl FnMut(&Uses<'_>, &mut Fresh, &Node) -> Option<Vec<Node>>,
) -> usize {
    let mut fresh = Fresh::new(graph);
    let mut replacements: Vec<(usize, Vec<Node>)> = Vec::new();
    let uses = Uses::new(graph);
    for (index, node) in graph.nodes.iter().enumerate() {
        let mark = fresh.mark();
        match rule(&uses, &mut fresh, node) {
            Some(nodes) => replacements.push((index, nodes)),
            None => fresh.truncate(mark),
        }
    }
    let count = replacements.len();
    if count == 0 {
        return 0;
    }
    if replacements.iter().flat_map(|(_, nodes)| nodes).any(|node| node.domain == fused::DOMAIN) {
        graph.opsets.insert(fused::DOMAIN.to_owned(), fused::VERSION);
    }
    graph.values.append(&mut fresh.values);
    for (id, tensor) in fresh.constants {
        graph.initializers.insert(id, Initializer::Constant(tensor));
    }
    let old = std::mem::take(&mut graph.nodes);
    let mut replacements = replacements.into_iter().peekable();
    for (index, node) in old.into_iter().enumerate() {
        match replacements.next_if(|(at, _)| *at == index) {
            Some((_, nodes)) => graph.nodes.extend(nodes),
            None => graph.nodes.push(node),
        }
    }
    eliminate_dead(graph);
    count
}
