//! Stops OpenVINO from starting a maximum at the lowest number instead of minus infinity, and a minimum at the highest.

use crate::nodes::Rewrite;
use sdrun_abi::DType;
use sdrun_graph::{Graph, Tensor, Value};

/// Replaces the maximum of `x` over dimensions by minus infinity where all elements are that, or where there are none. The same for the
/// minimum.
///
/// OpenVINO 2026.4 computes -3.4e38 there, so attention that looks for rows with everything masked does not find them.
pub(super) fn start_from_infinity(graph: &mut Graph) {
    for mut node in std::mem::take(&mut graph.nodes) {
        let infinity = match node.op_type.as_str() {
            "ReduceMax" if node.domain.is_empty() => Some(f32::NEG_INFINITY),
            "ReduceMin" if node.domain.is_empty() => Some(f32::INFINITY),
            _ => None,
        };
        let (Some(infinity), Some(x), Some(y)) = (infinity, node.input(0), node.output(0)) else {
            graph.nodes.push(node);
            continue;
        };
        let Value { name, shape, .. } = graph.value(y).clone();
        let Value { dtype, shape: of_x, .. } = graph.value(x).clone();
        let number = |value: f32| Some((dtype?, Tensor::scalar(value).to_float_type(dtype?)?));
        let (Some((float, infinity)), Some((_, zero))) = (number(infinity), number(0.0)) else {
            graph.nodes.push(node);
            continue;
        };
        let of = node.clone();
        let mut rewrite = Rewrite::new(graph, &of, format!("{name}/extreme"));
        let (infinity, zero) = (rewrite.constant(infinity), rewrite.constant(zero));
        let extreme = rewrite.value(dtype, shape.clone());
        node.outputs[0] = Some(extreme);
        rewrite.graph.nodes.push(node);
        // 1 where an element is not infinite, and its maximum over the same dimensions. Where there is none, it stays below 0.
        let infinite = rewrite.node("Equal", &[x, infinity], Some(DType::Bool), of_x.clone());
        let other = rewrite.node("Not", &[infinite], Some(DType::Bool), of_x.clone());
        let ones = rewrite.node("Cast", &[other], dtype, of_x);
        rewrite.set("to", i64::from(float as i32));
        let any = rewrite.value(dtype, shape.clone());
        let mut count = of.clone();
        count.op_type = "ReduceMax".into();
        (count.inputs[0], count.outputs[0]) = (Some(ones), Some(any));
        rewrite.graph.nodes.push(count);
        let some = rewrite.node("Greater", &[any, zero], Some(DType::Bool), shape);
        rewrite.node_into("Where", &[some, extreme, infinity], y);
    }
}
