//! A graph of nodes and the links between them.

use serde_json::{Map, Value};

/// A graph: `id: {class_type, inputs}`. An input is a value, or a link to an output of another node, `[id, output]`.
#[derive(Clone, Copy)]
pub(super) struct Graph<'a>(&'a Map<String, Value>);

/// A node.
#[derive(Clone, Copy)]
pub(super) struct Node<'a> {
    pub(super) id: &'a str,
    pub(super) class: &'a str,
    inputs: &'a Value,
}

/// The most links to follow. Longer chains are loops.
pub(super) const MOST_LINKS: usize = 1000;

/// Inputs of nodes that hold one value for other nodes.
const VALUES: [&str; 6] = ["value", "text", "string", "seed", "int", "float"];

impl<'a> Graph<'a> {
    /// `None` if it is no graph.
    pub(super) fn new(json: &'a Value) -> Option<Self> {
        let nodes = json.as_object()?;
        let is_node = |node: &Value| node.get("class_type").is_some_and(Value::is_string);
        (!nodes.is_empty() && nodes.values().all(is_node)).then_some(Graph(nodes))
    }

    /// The nodes with this property.
    pub(super) fn all(self, is: impl Fn(&Node<'a>) -> bool) -> Vec<Node<'a>> {
        self.0.keys().filter_map(|id| self.node(id)).filter(|node| is(node)).collect()
    }

    fn node(self, id: &str) -> Option<Node<'a>> {
        let (id, node) = self.0.get_key_value(id)?;
        Some(Node { id, class: node.get("class_type")?.as_str()?, inputs: node.get("inputs")? })
    }

    fn target(self, input: &Value) -> Option<(Node<'a>, u64)> {
        match &**input.as_array()? {
            [id, output] => Some((self.node(id.as_str()?)?, output.as_u64()?)),
            _ => None,
        }
    }

    /// The node that the first linked one of these inputs leads to, and which of its outputs.
    pub(super) fn link(self, node: Node<'a>, inputs: &[&str]) -> Option<(Node<'a>, u64)> {
        inputs.iter().find_map(|input| self.target(node.inputs.get(input)?))
    }

    /// The value of an input, also if another node holds it.
    fn value(self, node: Node<'a>, input: &str) -> Option<&'a Value> {
        let mut value = node.inputs.get(input)?;
        for _ in 0..MOST_LINKS {
            if !value.is_array() {
                return Some(value);
            }
            let (holder, _) = self.target(value)?;
            value = VALUES.iter().find_map(|name| holder.inputs.get(name))?;
        }
        None
    }

    /// The text of an input.
    pub(super) fn text(self, node: Node<'a>, input: &str) -> Option<&'a str> {
        self.value(node, input)?.as_str()
    }

    /// The number of an input.
    pub(super) fn real(self, node: Node<'a>, input: &str) -> Option<f64> {
        self.value(node, input)?.as_f64()
    }

    /// The whole number of an input.
    pub(super) fn whole(self, node: Node<'a>, input: &str) -> Option<u64> {
        self.value(node, input)?.as_u64()
    }
}
