use super::{
    rewrite::{Names, computing},
    uses::{Uses, is_op},
};
use crate::{Graph, Initializer, Node, Tensor, Value, ValueId};
use std::collections::BTreeSet;

/// Moves a scalar factor from the result of a matrix product to the product's weights and bias: exporters scale Q and
/// K before they multiply them. Reshapes and transposes may lie between.
///
/// Compilers do this themselves if the weights are constants. Here the graph multiplies the weights, so they remain
/// weights under their names, and [`prepare_weights`](super::prepare_weights) moves that work out. Shapes must be
/// inferred. Returns the number of removed multiplications.
pub fn absorb_scales(graph: &mut Graph) -> usize {
    let found: Vec<Absorbed> = {
        let uses = Uses::new(graph);
        (0..graph.nodes.len()).filter_map(|index| Absorbed::at(&uses, index)).collect()
    };
    let (mut scaled, mut names) = (Vec::new(), Names::of(graph));
    for Absorbed { scale, factor, source, weights } in &found {
        let scale = graph.nodes[*scale].clone();
        let factor = names.add_constant(graph, format!("{}_factor", scale.name), factor.clone());
        for (index, slot, weight) in weights {
            let like = graph.value(*weight);
            let value = Value { name: format!("{}_scaled", like.name), ..like.clone() };
            let output = names.add_value(graph, value);
            graph.nodes[*index].inputs[*slot] = Some(output);
            scaled.push(computing(graph, &scale.op_type, &[*weight, factor], output));
        }
        graph.nodes[*source].outputs = scale.outputs;
    }
    // At the front, before everything that may use them.
    let gone: BTreeSet<usize> = found.iter().map(|absorbed| absorbed.scale).collect();
    let old = std::mem::replace(&mut graph.nodes, scaled);
    graph.nodes.extend(old.into_iter().enumerate().filter(|(i, _)| !gone.contains(i)).map(|(_, node)| node));
    gone.len()
}

/// A multiplication that can move to weights.
struct Absorbed {
    /// The node that multiplies.
    scale: usize,
    factor: Tensor,
    /// The node that produces the multiplied value.
    source: usize,
    /// What to multiply instead: node inputs.
    weights: Vec<(usize, usize, ValueId)>,
}

impl Absorbed {
    fn at(uses: &Uses<'_>, scale: usize) -> Option<Self> {
        let node = &uses.graph.nodes[scale];
        let (mut value, _) = uses.scaled(node)?;
        let source = uses.place(value)?;
        let factor = node.inputs.iter().flatten().find(|id| **id != value)?;
        // A factor without dimensions fits weights of any rank.
        let factor = uses.constant(*factor)?.reshaped(Vec::new()).ok()?;
        let weight_of = |node: &Node, slot: usize| {
            let id = node.input(slot)?;
            matches!(uses.graph.initializers.get(&id), Some(Initializer::Weight(_))).then_some((slot, id))
        };
        let mut weights = Vec::new();
        loop {
            let node = uses.producer(value).filter(|_| uses.is_used_once(value))?;
            let index = uses.place(value)?;
            if is_op(node, "Reshape") || is_op(node, "Transpose") {
                value = node.input(0)?;
            } else if is_op(node, "Add") {
                let (slot, bias) = weight_of(node, 0).or_else(|| weight_of(node, 1))?;
                weights.push((index, slot, bias));
                value = node.input(1 - slot)?;
            } else if is_op(node, "MatMul") {
                let (slot, weight) = weight_of(node, 1)?;
                weights.push((index, slot, weight));
                return Some(Absorbed { scale, factor, source, weights });
            } else {
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Attribute,
        passes::{
            Prepare, merge_projections, prepare_weights,
            testing::{check, noise, ops},
        },
        testing::model,
    };
    use sdrun_abi::DType;

    #[test]
    fn factors_of_projections_move_to_their_weights() {
        let perm = |p: &[i64]| [("perm", Attribute::Ints(p.to_vec()))];
        let file = model(17)
            .input("x", DType::F32, "2 5 6")
            .initializer("wq", &noise(&[6, 8], 1))
            .initializer("wk", &noise(&[6, 8], 2))
            .initializer("bq", &noise(&[8], 3))
            .initializer("bk", &noise(&[8], 4))
            .initializer("heads", &Tensor::from_i64s(&[2, 5, 2, 4]))
            .initializer("scale", &Tensor::scalar(0.3f32))
            .initializer("root", &Tensor::from_elements(vec![1, 1], &[1.7f32]).unwrap())
            .node("MatMul", &["x", "wq"], &["xq"])
            .node("Add", &["bq", "xq"], &["q"])
            .node("Reshape", &["q", "heads"], &["q4"])
            .node_with("Transpose", &["q4"], &["qt"], perm(&[0, 2, 1, 3]))
            .node("Mul", &["qt", "scale"], &["qs"])
            .node("MatMul", &["x", "wk"], &["xk"])
            .node("Add", &["xk", "bk"], &["k"])
            .node("Reshape", &["k", "heads"], &["k4"])
            .node_with("Transpose", &["k4"], &["kt"], perm(&[0, 2, 3, 1]))
            .node("Div", &["kt", "root"], &["ks"])
            .node("MatMul", &["qs", "ks"], &["y"])
            .output("y", "2 2 5 5");
        let graph = check(&file, absorb_scales, 2);
        let kinds: Vec<_> = ops(&graph).into_iter().filter(|op| ["Mul", "Div"].contains(op)).collect();
        assert_eq!(kinds, ["Mul", "Mul", "Div", "Div"], "on the weights");
        let all = |graph: &mut Graph| {
            absorb_scales(graph);
            merge_projections(graph)
        };
        let mut merged = check(&file, all, 1);
        let preparation = prepare_weights(&mut merged, Prepare::NotGrowing);
        assert_eq!(ops(&preparation), ["Mul", "Mul", "Div", "Div", "Concat", "Concat"]);
        let rest = ["MatMul", "Add", "Split", "Reshape", "Transpose", "Reshape", "Transpose", "MatMul"];
        assert_eq!(ops(&merged), rest);
    }

    #[test]
    fn results_that_others_use_unscaled_stay() {
        let file = model(17)
            .input("x", DType::F32, "2 3")
            .initializer("w", &noise(&[3, 4], 1))
            .initializer("scale", &Tensor::scalar(0.3f32))
            .node("MatMul", &["x", "w"], &["p"])
            .node("Mul", &["p", "scale"], &["s"])
            .node("Sigmoid", &["s"], &["g"])
            .node("Mul", &["p", "g"], &["y"])
            .output("y", "2 4");
        check(&file, absorb_scales, 0);
    }
}
