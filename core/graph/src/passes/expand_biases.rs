use super::{
    prepare_weights::made_of_weights,
    rewrite::{Names, computing},
};
use crate::{Dim, Graph, Node, Tensor, Value, ValueId};
use std::collections::{BTreeSet, HashSet};

/// Broadcasts each bias that is added to a matrix product to the full shape of the product, with an `Expand` that
/// [`Prepare::Everything`](super::Prepare) moves out. Compilers whose products add a full matrix at no cost then need no
/// bias kernel. They do this themselves if biases are constants. Shapes must be inferred. Returns the number of expanded
/// biases.
pub fn expand_biases(graph: &mut Graph) -> usize {
    let is_product = |node: &&Node| node.op_type == "MatMul" && node.domain.is_empty();
    let products: HashSet<_> =
        graph.nodes.iter().filter(is_product).filter_map(|node| node.output(0)).collect();
    let made = made_of_weights(graph);
    let (mut expanded, mut names) = (0, Names::of(graph));
    for mut node in std::mem::take(&mut graph.nodes) {
        let Some((slot, bias, shape)) = bias_of(graph, &node, &made, &products) else {
            graph.nodes.push(node);
            continue;
        };
        let Value { name, dtype, .. } = graph.value(bias).clone();
        let dims: Vec<i64> = shape.iter().map(|d| *d as i64).collect();
        let target = names.add_constant(graph, format!("{name}_target"), Tensor::from_i64s(&dims));
        let shape = Some(shape.into_iter().map(Dim::Known).collect());
        let spread = names.add_value(graph, Value { name: format!("{name}_expanded"), dtype, shape });
        node.inputs[slot] = Some(spread);
        let expand = computing(graph, "Expand", &[bias, target], spread);
        graph.nodes.extend([expand, node]);
        expanded += 1;
    }
    expanded
}

/// The input of an addition that is the bias of a product, the bias, and the shape of the product.
fn bias_of(
    graph: &Graph,
    node: &Node,
    made: &BTreeSet<ValueId>,
    products: &HashSet<ValueId>,
) -> Option<(usize, ValueId, Vec<usize>)> {
    if node.op_type != "Add" || !node.domain.is_empty() {
        return None;
    }
    let is_bias = |slot: usize| {
        let (id, other) = (node.input(slot)?, node.input(1 - slot)?);
        (made.contains(&id) && products.contains(&other)).then_some((slot, id, other))
    };
    let (slot, bias, product) = is_bias(0).or_else(|| is_bias(1))?;
    let (shape, own) = (graph.value(product).known_shape()?, graph.value(bias).known_shape()?);
    (own.len() == 1 && shape.len() >= 2 && shape.last() == own.last()).then_some((slot, bias, shape))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        OpenDims,
        passes::{Prepare, merge_projections, prepare_weights},
        simplify,
        testing::{model, ramp, run},
    };
    use sdrun_abi::DType;
    use std::collections::BTreeMap;

    #[test]
    fn biases_of_products_are_expanded_and_others_stay() {
        let mut graph = model(17)
            .input("x", DType::F32, "2 3")
            .initializer("w1", &ramp(&[3, 4]))
            .initializer("w2", &ramp(&[3, 4]))
            .initializer("b1", &ramp(&[4]))
            .initializer("b2", &ramp(&[4]))
            .node("MatMul", &["x", "w1"], &["p1"])
            .node("Add", &["b1", "p1"], &["s1"])
            .node("MatMul", &["x", "w2"], &["p2"])
            .node("Add", &["p2", "b2"], &["s2"])
            .node("Add", &["s1", "s2"], &["s3"])
            .node("Add", &["s3", "b1"], &["y"])
            .output("y", "2 4")
            .graph();
        simplify(&mut graph, &BTreeMap::new(), OpenDims::Refuse).unwrap();
        let x = ramp(&[2, 3]);
        let expected = run(&graph, &[("x", x.clone())]);
        let mut merged = graph.clone();
        assert_eq!(expand_biases(&mut graph), 2);
        assert_eq!(run(&graph, &[("x", x.clone())]), expected);
        let preparation = prepare_weights(&mut graph, Prepare::Everything);
        assert!(preparation.nodes.len() == 2 && graph.nodes.iter().all(|n| n.op_type != "Expand"));

        merge_projections(&mut merged);
        assert_eq!(expand_biases(&mut merged), 1);
        assert_eq!(run(&merged, &[("x", x)]), expected);
        let preparation = prepare_weights(&mut merged, Prepare::Everything);
        let ops: Vec<_> = preparation.nodes.iter().map(|n| n.op_type.as_str()).collect();
        assert_eq!(ops, ["Concat", "Concat", "Expand"]);
    }
}
