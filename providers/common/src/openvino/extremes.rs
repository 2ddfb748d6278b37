//! Stops OpenVINO from starting a maximum at the lowest number instead of minus infinity, and a minimum at the highest.

use crate::nodes::Rewrite;
use sdrun_abi::DType;
use sdrun_graph::{Graph, Node, Tensor, Value, ValueId};

/// Makes the maximum over dimensions minus infinity where all elements are minus infinity, or where there are none; and likewise the minimum.
///
/// OpenVINO 2026.4 returns -3.4e38 there, so graphs that look for fully masked rows of attention do not find them.
pub(super) fn start_from_infinity(graph: &mut Graph) {
    for mut node in std::mem::take(&mut graph.nodes) {
        let Some((x, y, infinity, zero)) = extreme(graph, &node) else {
            graph.nodes.push(node);
            continue;
        };
        let Value { name, shape, .. } = graph.value(y).clone();
        let of_x = graph.value(x).shape.clone();
        let (of, float) = (node.clone(), infinity.dtype());
        let mut rewrite = Rewrite::new(graph, &of, format!("{name}/extreme"));
        let (infinity, zero) = (rewrite.constant(infinity), rewrite.constant(zero));
        let extreme = rewrite.value(Some(float), shape.clone());
        node.outputs[0] = Some(extreme);
        rewrite.graph.nodes.push(node);
        // 1 where an element is not infinite, and its maximum over the same dimensions. Where there is none, it stays below 0.
        let infinite = rewrite.node("Equal", &[x, infinity], Some(DType::Bool), of_x.clone());
        let other = rewrite.node("Not", &[infinite], Some(DType::Bool), of_x.clone());
        let ones = rewrite.node("Cast", &[other], Some(float), of_x);
        rewrite.set("to", i64::from(float as i32));
        let any = rewrite.value(Some(float), shape.clone());
        let mut count = of.clone();
        count.op_type = "ReduceMax".into();
        (count.inputs[0], count.outputs[0]) = (Some(ones), Some(any));
        rewrite.graph.nodes.push(count);
        let some = rewrite.node("Greater", &[any, zero], Some(DType::Bool), shape);
        rewrite.node_into("Where", &[some, extreme, infinity], y);
    }
}

/// The input and the output of a maximum or minimum of floats, the number to start from, and zero.
fn extreme(graph: &Graph, node: &Node) -> Option<(ValueId, ValueId, Tensor, Tensor)> {
    let infinity = match node.op_type.as_str() {
        "ReduceMax" if node.domain.is_empty() => f32::NEG_INFINITY,
        "ReduceMin" if node.domain.is_empty() => f32::INFINITY,
        _ => return None,
    };
    let (x, y) = (node.input(0)?, node.output(0)?);
    let dtype = graph.value(x).dtype?;
    let number = |value: f32| Tensor::scalar(value).to_float_type(dtype);
    Some((x, y, number(infinity)?, number(0.0)?))
}
