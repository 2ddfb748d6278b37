//! Stops OpenVINO from folding an attention mask into the bias that is added to it.

use crate::nodes::Rewrite;
use sdrun_abi::DType;
use sdrun_graph::{Graph, GraphError, Node, Tensor, Value, ValueId};

/// From here on a factor is the "minus infinity" of a mask: -10000, or the lowest number of a type.
const LARGE: f32 = 1e4;

/// Replaces `x * c` for a large constant `c` with `x == 0 ? 0 : x * c`, which has the same values.
///
/// OpenVINO 2026.4 merges sequences of additions and multiplications by constants, regardless of rounding. In T5, with a mask `m` of
/// ones and zeros, it turns `(1 - m) * c + bias` into `m * -c + (c + bias)`, and the bias of attention is lost in `c + bias`.
pub(super) fn keep_masks_apart(graph: &mut Graph) -> Result<(), GraphError> {
    for node in std::mem::take(&mut graph.nodes) {
        match mask(graph, &node) {
            Some((x, dtype, y)) => separate(graph, node, x, dtype, y)?,
            None => graph.nodes.push(node),
        }
    }
    Ok(())
}

/// The input, the type and the output of a multiplication by a large constant.
fn mask(graph: &Graph, node: &Node) -> Option<(ValueId, DType, ValueId)> {
    if node.op_type != "Mul" || !node.domain.is_empty() {
        return None;
    }
    let (a, b, y) = (node.input(0)?, node.input(1)?, node.output(0)?);
    let large = |id: ValueId| {
        let constant = graph.constant(id)?;
        let values = constant.to_f32s()?;
        (values.len() == 1 && values[0].abs() >= LARGE).then_some(constant.dtype())
    };
    match (large(a), large(b)) {
        (None, Some(dtype)) => Some((a, dtype, y)),
        (Some(dtype), None) => Some((b, dtype, y)),
        _ => None,
    }
}

fn separate(
    graph: &mut Graph,
    mut mul: Node,
    x: ValueId,
    dtype: DType,
    y: ValueId,
) -> Result<(), GraphError> {
    let Value { name, shape, .. } = graph.value(y).clone();
    let of_x = graph.value(x).shape.clone();
    let (of, zero) = (mul.clone(), Tensor::new(dtype, Vec::new(), vec![0; dtype.size()])?);
    let mut rewrite = Rewrite::new(graph, &of, format!("{name}/mask"));
    let zero = rewrite.constant(zero);
    let product = rewrite.value(Some(dtype), shape);
    mul.outputs = vec![Some(product)];
    rewrite.graph.nodes.push(mul);
    let is_zero = rewrite.node("Equal", &[x, zero], Some(DType::Bool), of_x);
    rewrite.node_into("Where", &[is_zero, zero, product], y);
    Ok(())
}
