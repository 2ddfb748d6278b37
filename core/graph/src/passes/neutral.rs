use super::{
    eliminate_identity,
    rewrite::{node, rewrite},
    uses::Uses,
};
use crate::{Graph, Node, ValueId};

/// Removes arithmetic with no effect: times 1, divided by 1, plus or minus 0, to the power of 1. Returns the number
/// of removed nodes.
pub fn eliminate_neutral(graph: &mut Graph) -> usize {
    rewrite(graph, |uses, _, n| {
        let x = unchanged(uses, n)?;
        (uses.dtype(x).is_some() && uses.dtype(x) == uses.dtype(n.output(0)?)).then_some(())?;
        Some(vec![node(n, "Identity", &[x], n.output(0), [])])
    });
    eliminate_identity(graph)
}

/// The input that the node returns unchanged.
fn unchanged(uses: &Uses<'_>, n: &Node) -> Option<ValueId> {
    let (a, b) = (n.input(0)?, n.input(1)?);
    n.domain.is_empty().then_some(())?;
    let neutral = |x: ValueId, c: ValueId, value: f32| {
        let constant = uses.constant(c)?;
        // A single element of no higher rank cannot change the shape.
        let fits = constant.len() == 1 && constant.shape().len() <= uses.rank(x)?;
        let equal = match constant.to_few_i64s() {
            Some(ints) => ints == [value as i64],
            None => uses.scalar(c) == Some(value),
        };
        (fits && equal).then_some(x)
    };
    match &*n.op_type {
        "Mul" => neutral(a, b, 1.0).or_else(|| neutral(b, a, 1.0)),
        "Add" => neutral(a, b, 0.0).or_else(|| neutral(b, a, 0.0)),
        "Sub" => neutral(a, b, 0.0),
        "Div" | "Pow" => neutral(a, b, 1.0),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Tensor,
        infer::infer_shapes,
        testing::{model, ramp, run},
    };
    use sdrun_abi::DType;

    #[test]
    fn only_arithmetic_without_effect_is_removed() {
        let file = model(17)
            .input("x", DType::F32, "n 3")
            .initializer("one", &Tensor::scalar(1f32))
            .initializer("zero", &Tensor::scalar(0f32))
            .initializer("wide", &Tensor::from_elements(vec![1, 1, 1], &[1f32]).unwrap())
            .node("Div", &["x", "one"], &["a"])
            .node("Mul", &["one", "a"], &["b"])
            .node("Add", &["b", "zero"], &["c"])
            .node("Sub", &["c", "zero"], &["d"])
            .node("Pow", &["d", "one"], &["e"])
            .node("Sub", &["zero", "e"], &["negative"])
            .node("Div", &["one", "negative"], &["inverse"])
            .node("Mul", &["inverse", "wide"], &["ranked"])
            .node("Mul", &["x", "one"], &["y"])
            .output("ranked", "1 n 3")
            .output("y", "n 3");
        let mut graph = file.graph();
        infer_shapes(&mut graph).unwrap();
        let original = graph.clone();
        assert_eq!(eliminate_neutral(&mut graph), 5);
        let ops: Vec<_> = graph.nodes.iter().map(|n| n.op_type.as_str()).collect();
        assert_eq!(ops, ["Sub", "Div", "Mul", "Identity"]);
        let x = ramp(&[2, 3]);
        assert_eq!(run(&graph, &[("x", x.clone())]), run(&original, &[("x", x)]));
    }
}
