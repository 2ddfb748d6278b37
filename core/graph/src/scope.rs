//! Names that cross the boundary of a body (the graph attribute of If, Loop and Scan).

use crate::{Attribute, Graph, Node, ValueId, proto::GraphProto};
use std::collections::{BTreeSet, HashMap};

/// The bodies of a node.
pub(crate) fn bodies(node: &Node) -> impl Iterator<Item = &GraphProto> {
    node.attributes.values().flat_map(|attribute| match attribute {
        Attribute::Graph(body) => std::slice::from_ref(&**body),
        Attribute::Other(other) => &other.graphs,
        _ => &[],
    })
}

/// Names that a body uses but does not define: they belong to the enclosing graph. The decoder's nesting limit bounds
/// the recursion.
pub(crate) fn captured(body: &GraphProto) -> BTreeSet<&str> {
    let mut used: BTreeSet<&str> = BTreeSet::new();
    for node in &body.node {
        used.extend(node.input.iter().map(String::as_str));
        for attribute in &node.attribute {
            used.extend(attribute.g.iter().flat_map(|inner| captured(inner)));
            used.extend(attribute.graphs.iter().flat_map(captured));
        }
    }
    used.extend(body.output.iter().map(|output| output.name()));
    used.remove("");
    for name in defined(body) {
        used.remove(name);
    }
    used
}

/// Names that the body itself defines.
pub(crate) fn defined(body: &GraphProto) -> impl Iterator<Item = &str> {
    let inputs = body.input.iter().map(|input| input.name());
    let stored = body.initializer.iter().map(|tensor| tensor.name());
    let sparse = body.sparse_initializer.iter().filter_map(|sparse| Some(sparse.values.as_ref()?.name()));
    let made = body.node.iter().flat_map(|node| &node.output).map(String::as_str);
    inputs.chain(stored).chain(sparse).chain(made)
}

/// Renames values that a body defines or captures, in it and in nested bodies.
pub(crate) fn rename(body: &mut GraphProto, names: &HashMap<String, String>) {
    if names.is_empty() {
        return;
    }
    let change = |name: &mut String| {
        if let Some(new) = names.get(name) {
            name.clone_from(new);
        }
    };
    body.input.iter_mut().chain(&mut body.output).filter_map(|value| value.name.as_mut()).for_each(change);
    body.initializer.iter_mut().filter_map(|tensor| tensor.name.as_mut()).for_each(change);
    for node in &mut body.node {
        node.input.iter_mut().chain(&mut node.output).for_each(change);
        for attribute in &mut node.attribute {
            for inner in attribute.g.iter_mut().map(|g| &mut **g).chain(&mut attribute.graphs) {
                let own: BTreeSet<String> = defined(inner).map(str::to_owned).collect();
                let outer = names.iter().filter(|(old, _)| !own.contains(*old));
                rename(inner, &outer.map(|(old, new)| (old.clone(), new.clone())).collect());
            }
        }
    }
}

/// Whether an operator rounds a tensor to a few bits when it runs. The integer operators alone are exact.
fn quantizes(op: &str) -> bool {
    op.starts_with("QLinear")
        || ["QuantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"]
            .contains(&op)
}

fn body_quantizes(body: &GraphProto) -> bool {
    body.node.iter().any(|node| {
        let inner = node.attribute.iter().flat_map(|a| a.g.iter().map(|g| &**g).chain(&a.graphs));
        quantizes(node.op_type()) || inner.into_iter().any(body_quantizes)
    })
}

impl Graph {
    /// Whether the graph, or a body in it, quantizes what flows through it: QuantizeLinear, DynamicQuantizeLinear, the QLinear
    /// operators, and those that quantize their own inputs. Runtimes that differ in the last bit of a value then round some
    /// values to different steps.
    pub fn quantizes(&self) -> bool {
        let mut nodes = self.nodes.iter();
        nodes.any(|node| quantizes(&node.op_type) || bodies(node).any(body_quantizes))
    }

    /// Values that bodies capture, keyed by the index of the node that owns the body.
    pub(crate) fn captures(&self) -> HashMap<usize, Vec<ValueId>> {
        let mut found = HashMap::new();
        let mut ids = None;
        for (index, node) in self.nodes.iter().enumerate() {
            // Fast path for nearly all nodes: every pass calls this.
            if !node.attributes.values().any(|a| matches!(a, Attribute::Graph(_) | Attribute::Other(_))) {
                continue;
            }
            let names: BTreeSet<&str> = bodies(node).flat_map(captured).collect();
            if !names.is_empty() {
                let ids = ids.get_or_insert_with(|| self.ids_by_name());
                found.insert(index, names.into_iter().filter_map(|name| ids.get(name).copied()).collect());
            }
        }
        found
    }

    /// Values that the bodies of a node of this graph capture.
    pub fn captured_by(&self, node: &Node) -> Vec<ValueId> {
        let names: BTreeSet<&str> = bodies(node).flat_map(captured).collect();
        if names.is_empty() {
            return Vec::new();
        }
        let ids = self.ids_by_name();
        names.into_iter().filter_map(|name| ids.get(name).copied()).collect()
    }

    /// All values by name.
    pub fn ids_by_name(&self) -> HashMap<&str, ValueId> {
        self.values.iter().enumerate().map(|(i, value)| (value.name.as_str(), ValueId(i as u32))).collect()
    }

    /// The value with this name. For many look-ups use [`Graph::ids_by_name`].
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.values.iter().position(|value| value.name == name).map(|i| ValueId(i as u32))
    }
}
