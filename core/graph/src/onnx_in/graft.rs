//! Moves nodes of a body into the enclosing graph.

use super::{Import, malformed, order, tensors::Fault};
use crate::{
    ExternalBase, Graph, GraphError, Node,
    external::ExternalFiles,
    proto::GraphProto,
    scope::{self, defined},
};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Returns the graph with each node whose index is in `taken` replaced by the nodes of one of its bodies, which has
/// no inputs. Body names that already exist in the graph are changed.
///
/// # Errors
/// [`GraphError::Invalid`] if a body does not fit its node or violates the format.
pub(crate) fn graft(graph: &Graph, taken: &BTreeMap<usize, GraphProto>) -> Result<Graph, GraphError> {
    let mut import = Import::resume(graph.clone());
    for (index, node) in std::mem::take(&mut import.graph.nodes).into_iter().enumerate() {
        match taken.get(&index) {
            None => import.graph.nodes.push(node),
            Some(body) => import.graft(&node, body.clone()).map_err(|fault| invalid(&node, fault))?,
        }
    }
    import.check_uses().and_then(|()| order::sort(&mut import.graph).map_err(Fault::Malformed)).map_err(
        |fault| {
            let (Fault::Malformed(reason) | Fault::Unsupported(reason)) = fault;
            GraphError::Invalid(format!("a body does not fit its enclosing graph: {reason}"))
        },
    )?;
    // Bodies have no external data: the reader refuses it.
    import.place_tensors(&mut ExternalFiles::new(ExternalBase::Stripped))
}

pub(super) fn invalid(node: &Node, fault: Fault) -> GraphError {
    let (Fault::Malformed(reason) | Fault::Unsupported(reason)) = fault;
    GraphError::Invalid(format!("a body of node {:?} ({}): {reason}", node.name, node.op_type))
}

impl Import {
    /// Continues with a finished graph.
    pub(super) fn resume(graph: Graph) -> Self {
        let ids: HashMap<String, _> =
            graph.ids_by_name().into_iter().map(|(name, id)| (name.to_owned(), id)).collect();
        Import {
            defined: ids.values().copied().collect(),
            listed: HashSet::new(),
            graph,
            ids,
            stored: BTreeMap::new(),
        }
    }

    fn graft(&mut self, node: &Node, mut body: GraphProto) -> Result<(), Fault> {
        if !body.input.is_empty()
            || !body.sparse_initializer.is_empty()
            || body.output.len() < node.outputs.len()
        {
            return malformed("it has inputs, sparse initializers, or too few outputs".into());
        }
        let mut renamed = HashMap::new();
        for name in defined(&body).filter(|name| self.ids.contains_key(*name)) {
            let fresh = |n: &usize| !self.ids.contains_key(&format!("{name}_{n}"));
            let number = (1..).find(fresh).unwrap_or_default();
            renamed.insert(name.to_owned(), format!("{name}_{number}"));
        }
        scope::rename(&mut body, &renamed);
        for tensor in &body.initializer {
            self.add_initializer(tensor)?;
        }
        for inner in body.node {
            self.add_node(inner)?;
        }
        for (output, of_body) in node.outputs.iter().zip(&body.output) {
            let Some(output) = *output else { continue };
            let from = self.id(of_body.name());
            self.graph.nodes.push(Node {
                name: node.name.clone(),
                domain: String::new(),
                op_type: "Identity".into(),
                inputs: vec![Some(from)],
                outputs: vec![Some(output)],
                attributes: BTreeMap::new(),
                metadata: BTreeMap::new(),
            });
        }
        Ok(())
    }
}
