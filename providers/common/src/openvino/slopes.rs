//! Stops OpenVINO from applying the slopes of PRelu along another dimension.

use crate::nodes::Rewrite;
use sdrun_graph::{Dim, Graph, Value};

/// Gives the slopes of PRelu as many dimensions as its input.
///
/// A list of slopes belongs to the last dimension, as always in ONNX. OpenVINO 2026.4 applies it along the second one if that is as long.
pub(super) fn align_slopes(graph: &mut Graph) {
    for mut node in std::mem::take(&mut graph.nodes) {
        let ranks = (node.op_type == "PRelu" && node.domain.is_empty()).then(|| {
            let rank = |at| graph.value(node.input(at)?).shape.as_ref().map(Vec::len);
            (rank(0), rank(1))
        });
        if let (Some((Some(rank), Some(1))), Some(slopes), Some(y)) = (ranks, node.input(1), node.output(0))
            && rank > 2
        {
            let Value { dtype, shape, .. } = graph.value(slopes).clone();
            let aligned = [vec![Dim::Known(1); rank - 1], shape.unwrap_or_default()].concat();
            let mut sizes = vec![1i64; rank];
            sizes[rank - 1] = -1;
            let name = format!("{}/slopes", graph.value(y).name);
            let mut rewrite = Rewrite::new(graph, &node, name);
            let sizes = rewrite.ints(&sizes);
            let aligned = rewrite.node("Reshape", &[slopes, sizes], dtype, Some(aligned));
            node.inputs[1] = Some(aligned);
        }
        graph.nodes.push(node);
    }
}
