//! The passes a graph goes through before it is translated.

use sdrun_graph::{
    Graph, GraphError,
    passes::{self, PassReport},
};

/// Everything: each operator that passes make has an entry in the operator table.
const PASSES: &[&str] = passes::ALL;

/// Merges what kernels compute as one. Types and shapes must be inferred; sizes may be open.
pub(crate) fn optimize(graph: &mut Graph) -> Result<Vec<PassReport>, GraphError> {
    passes::optimize(graph, PASSES)
}
