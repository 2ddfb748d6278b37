//! Stops OpenVINO from applying the slopes of PRelu along another dimension.

use sdrun_abi::DType;
use sdrun_graph::{Dim, Graph, GraphError, Initializer, Node, Tensor, Value};
use std::collections::BTreeMap;

/// Gives the slopes of PRelu as many dimensions as its input.
///
/// A list of slopes belongs to the last dimension, as always in ONNX. OpenVINO 2026.4 applies it along the second one if that is as long.
pub(super) fn align_slopes(graph: &mut Graph) -> Result<(), GraphError> {
    for mut node in std::mem::take(&mut graph.nodes) {
        let ranks = (node.op_type == "PRelu" && node.domain.is_empty()).then(|| {
            let rank = |at| graph.value(node.input(at)?).shape.as_ref().map(Vec::len);
            (rank(0), rank(1))
        });
        if let (Some((Some(rank), Some(1))), Some(slopes), Some(y)) = (ranks, node.input(1), node.output(0))
            && rank > 2
        {
            let Value { dtype, shape, .. } = graph.value(slopes).clone();
            let name = format!("{}/slopes", graph.value(y).name);
            let mut add = |name: String, dtype, shape| graph.add_value(Value { name, dtype, shape });
            let sizes = add(format!("{name}/shape"), Some(DType::I64), Some(vec![Dim::Known(rank)]));
            let aligned = [vec![Dim::Known(1); rank - 1], shape.unwrap_or_default()].concat();
            let aligned = add(name.clone(), dtype, Some(aligned));
            let mut wanted = vec![1i64; rank];
            wanted[rank - 1] = -1;
            let wanted = Tensor::from_elements(vec![rank], &wanted)?;
            graph.initializers.insert(sizes, Initializer::Constant(wanted));
            graph.nodes.push(Node {
                name,
                domain: String::new(),
                op_type: "Reshape".into(),
                inputs: vec![Some(slopes), Some(sizes)],
                outputs: vec![Some(aligned)],
                attributes: BTreeMap::new(),
                metadata: node.metadata.clone(),
            });
            node.inputs[1] = Some(aligned);
        }
        graph.nodes.push(node);
    }
    Ok(())
}
