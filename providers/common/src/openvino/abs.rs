//! Stops OpenVINO from dropping absolute values.

use crate::nodes::Rewrite;
use sdrun_graph::{Attribute, Graph, Value};
use std::collections::HashSet;

/// Replaces `Abs(x)` by `Max(x, -x)` where `x` depends on no input of the graph.
///
/// OpenVINO 2026.4 removes such a node unless `x` is a weight itself: `Abs(Neg(w))` computes `-w`. Weights that PyTorch normalises or
/// clamps by their absolute value come out with the wrong sign.
pub(super) fn keep_absolute_values(graph: &mut Graph) {
    let mut fed: HashSet<_> = graph.inputs.iter().copied().collect();
    for node in std::mem::take(&mut graph.nodes) {
        // Bodies may use any value from outside.
        let has_body = node.attributes.values().any(|value| matches!(value, Attribute::Graph(_)));
        if has_body || node.inputs.iter().flatten().any(|id| fed.contains(id)) {
            fed.extend(node.outputs.iter().flatten());
        } else if node.op_type == "Abs"
            && node.domain.is_empty()
            && let (Some(x), Some(y)) = (node.input(0), node.output(0))
        {
            let Value { name, dtype, shape } = graph.value(y).clone();
            let mut rewrite = Rewrite::new(graph, &node, format!("{name}/abs"));
            let negative = rewrite.node("Neg", &[x], dtype, shape);
            rewrite.node_into("Max", &[x, negative], y);
            continue;
        }
        graph.nodes.push(node);
    }
}
