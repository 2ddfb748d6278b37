use super::{compact, eliminate_dead, is_random};
use crate::{Graph, Initializer, Node, ValueId, WeightData, WeightRef, eval, onnx_in::roles};
use std::collections::{BTreeMap, BTreeSet};

/// Moves the nodes that depend on weights and constants alone out of a graph. This is for engines in which weights are not
/// constants. A compiler would compute such nodes once, but these engines would compute them in every run.
///
/// Returns the *preparation*: a graph without inputs. Its initializers are weights and constants of `graph`. Its outputs
/// become weights of `graph`, under their names. Only operators that [`eval`] supports move, and never an output of
/// `graph`. A small file must not keep the host busy for hours, so nodes stay that exceed a budget of work, which grows with the size
/// of the weights. Both graphs may read a weight. Shapes must have been inferred; ids of `graph` are invalid afterwards.
pub fn prepare_weights(graph: &mut Graph, what: Prepare) -> Graph {
    let (moved, made) = movable(graph, what);
    let mut preparation = Graph {
        name: format!("{}: weights", graph.name),
        opsets: graph.opsets.clone(),
        ir_version: graph.ir_version,
        values: graph.values.clone(),
        initializers: graph.initializers.clone(),
        ..Graph::default()
    };
    let captures = graph.captures();
    let (mut stay, mut needed) = (Vec::new(), BTreeSet::new());
    for (index, (node, moved)) in std::mem::take(&mut graph.nodes).into_iter().zip(moved).enumerate() {
        if moved {
            preparation.nodes.push(node);
        } else {
            needed.extend(node.inputs.iter().flatten().copied());
            needed.extend(captures.get(&index).into_iter().flatten().copied());
            stay.push(node);
        }
    }
    graph.nodes = stay;
    for id in made.intersection(&needed) {
        // `is_movable` requires both.
        let value = graph.value(*id);
        let (Some(dtype), Some(shape)) = (value.dtype, value.known_shape()) else { continue };
        let data = WeightData::Absent { location: value.name.clone(), offset: 0 };
        graph.initializers.insert(*id, Initializer::Weight(WeightRef { dtype, shape, data }));
        preparation.outputs.push(*id);
    }
    for part in [graph, &mut preparation] {
        eliminate_dead(part);
        compact(part);
    }
    preparation
}

/// Weights, and values computed from weights and constants alone that can move out.
pub(super) fn made_of_weights(graph: &Graph) -> BTreeSet<ValueId> {
    let is_weight = |initializer: &Initializer| matches!(initializer, Initializer::Weight(_));
    let weights = graph.initializers.iter().filter(|(_, i)| is_weight(i)).map(|(id, _)| *id);
    movable(graph, Prepare::Everything).1.into_iter().chain(weights).collect()
}

/// Which nodes [`prepare_weights`] moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prepare {
    /// Every node it can.
    Everything,
    /// No node whose outputs have more elements than its weights, such as a bias expanded to a whole activation.
    NotGrowing,
    /// As `NotGrowing`, and only arithmetic with the nodes it needs. Other nodes that move elements stay (a Transpose
    /// before a product), for engines that read weights in any order.
    Arithmetic,
}

/// Operators that only move or convert elements.
const MOVES: [&str; 14] = [
    "Cast",
    "Concat",
    "DepthToSpace",
    "Expand",
    "Flatten",
    "Gather",
    "Identity",
    "Reshape",
    "Slice",
    "SpaceToDepth",
    "Split",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
];

/// Elementary steps for each element of the weights: many times what a model needs that computes its weights from quantised ones or
/// merges low-rank matrices into them.
const STEPS_PER_ELEMENT: u64 = 256;
/// Elementary steps that are always allowed, about a second.
const FREE_STEPS: u64 = 1 << 30;

/// Which nodes can be moved out, and the values they compute.
fn movable(graph: &Graph, what: Prepare) -> (Vec<bool>, BTreeSet<ValueId>) {
    let mut fixed: BTreeSet<ValueId> = graph.initializers.keys().copied().collect();
    let mut made: BTreeSet<ValueId> = BTreeSet::new();
    let outputs: BTreeSet<ValueId> = graph.outputs.iter().copied().collect();
    let elements = graph
        .weights()
        .map(|(_, weight)| weight.shape.iter().fold(1, |n: u64, d| n.saturating_mul(*d as u64)));
    let mut left =
        elements.fold(0, u64::saturating_add).saturating_mul(STEPS_PER_ELEMENT).saturating_add(FREE_STEPS);
    let mut moved: Vec<bool> = (graph.nodes.iter())
        .map(|node| {
            let is_output = node.outputs.iter().flatten().any(|id| outputs.contains(id));
            if is_output || !is_movable(graph, node, &fixed, &made, what == Prepare::Everything) {
                return false;
            }
            let Some(rest) = left.checked_sub(work(graph, node)) else { return false };
            left = rest;
            fixed.extend(node.outputs.iter().flatten());
            made.extend(node.outputs.iter().flatten());
            true
        })
        .collect();
    if what == Prepare::Arithmetic {
        let mut needed: BTreeSet<ValueId> = BTreeSet::new();
        for (node, moved) in graph.nodes.iter().zip(&mut moved).rev().filter(|(_, moved)| **moved) {
            let makes = |ids: &BTreeSet<ValueId>| node.outputs.iter().flatten().any(|id| ids.contains(id));
            if MOVES.contains(&&*node.op_type) && !makes(&needed) {
                *moved = false;
                made.retain(|id| !node.outputs.contains(&Some(*id)));
            } else {
                needed.extend(node.inputs.iter().flatten());
            }
        }
    }
    (moved, made)
}

/// What a node costs, if the shapes of its inputs and outputs are known.
fn work(graph: &Graph, node: &Node) -> u64 {
    let shape = |id: ValueId| graph.value(id).known_shape().unwrap_or_default();
    let inputs: Vec<_> = node.inputs.iter().map(|id| id.map(shape)).collect();
    let outputs: Vec<_> = node.outputs.iter().flatten().map(|id| shape(*id)).collect();
    eval::work(node, inputs.iter().map(Option::as_deref), outputs.iter().map(Vec::as_slice))
}

fn is_movable(
    graph: &Graph,
    node: &Node,
    fixed: &BTreeSet<ValueId>,
    made: &BTreeSet<ValueId>,
    may_grow: bool,
) -> bool {
    let is_weight = |id: &ValueId| {
        made.contains(id) || matches!(graph.initializers.get(id), Some(Initializer::Weight(_)))
    };
    let elements = |ids: &mut dyn Iterator<Item = ValueId>| -> Option<usize> {
        ids.map(|id| graph.value(id).known_shape()?.iter().try_fold(1usize, |n, d| n.checked_mul(*d)))
            .try_fold(0usize, |sum, n| sum.checked_add(n?))
    };
    let inputs = || node.inputs.iter().flatten().copied();
    let outputs = || node.outputs.iter().flatten().copied();
    let typed = outputs().all(|id| graph.value(id).dtype.is_some_and(roles::is_data));
    typed
        && node.domain.is_empty()
        && !is_random(node)
        && crate::scope::bodies(node).next().is_none()
        && inputs().all(|id| fixed.contains(&id))
        && inputs().any(|id| is_weight(&id))
        && eval::supports(node, graph.opset())
        && match (elements(&mut outputs()), elements(&mut inputs().filter(|id| is_weight(id)))) {
            (Some(out), Some(weights)) => may_grow || out <= weights,
            _ => false,
        }
}

/// For each output of a preparation: the nodes it needs and the names of the weights they read. This tells which
/// outputs to recompute when weights change. Across preparations of graphs with the same weights, outputs with the
/// same digest are the same tensor.
pub fn preparation_steps(preparation: &Graph) -> Vec<PreparationStep> {
    let maker: BTreeMap<ValueId, usize> = (preparation.nodes.iter().enumerate())
        .flat_map(|(index, node)| node.outputs.iter().flatten().map(move |id| (*id, index)))
        .collect();
    let digests = preparation.value_digests();
    let step = |output: &ValueId| {
        let (mut nodes, mut weights) = (BTreeSet::new(), BTreeSet::new());
        let mut open = vec![*output];
        while let Some(id) = open.pop() {
            match (maker.get(&id), preparation.initializers.get(&id)) {
                (Some(index), _) if nodes.insert(*index) => {
                    open.extend(preparation.nodes[*index].inputs.iter().flatten());
                }
                (None, Some(Initializer::Weight(_))) => {
                    weights.insert(preparation.value(id).name.clone());
                }
                _ => {}
            }
        }
        let digest = digests.of(*output);
        PreparationStep { output: *output, digest, nodes: nodes.into_iter().collect(), weights }
    };
    preparation.outputs.iter().map(step).collect()
}

/// One output of a preparation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparationStep {
    /// Its value.
    pub output: ValueId,
    /// SHA-256 of what it is computed from and how: operators, attributes, constants, names of weights.
    pub digest: [u8; 32],
    /// Indices of the nodes it needs, in order.
    pub nodes: Vec<usize>,
    /// Names of the weights it depends on.
    pub weights: BTreeSet<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Attribute, OpenDims, Tensor, simplify,
        testing::{model, ramp, run},
    };
    use sdrun_abi::DType;

    #[test]
    fn computations_on_weights_alone_move_out() {
        let perm = [("perm", Attribute::Ints(vec![1, 0]))];
        let mut graph = model(17)
            .input("x", DType::F32, "2 3")
            .initializer("w", &ramp(&[4, 3]))
            .initializer("both", &ramp(&[4]))
            .initializer("two", &Tensor::scalar(2.0f32))
            .initializer("grown_shape", &Tensor::from_i64s(&[5, 2, 4]))
            .node_with("Transpose", &["w"], &["wt"], perm)
            .node("Mul", &["wt", "two"], &["scaled"])
            .node("MatMul", &["x", "scaled"], &["xw"])
            .node("Neg", &["both"], &["negated"])
            .node("Add", &["xw", "negated"], &["a"])
            .node("Expand", &["both", "grown_shape"], &["grown"])
            .node("Add", &["a", "grown"], &["y"])
            .output("y", "5 2 4")
            .graph();
        simplify(&mut graph, &BTreeMap::new(), OpenDims::Refuse).unwrap();
        let x = ramp(&[2, 3]);
        let expected = run(&graph, &[("x", x.clone())]);
        let mut arithmetic = graph.clone();
        let preparation = prepare_weights(&mut graph, Prepare::NotGrowing);
        let ops = |graph: &Graph| -> Vec<String> { graph.nodes.iter().map(|n| n.op_type.clone()).collect() };
        assert_eq!(ops(&preparation), ["Transpose", "Mul", "Neg"]);
        assert_eq!(ops(&graph), ["MatMul", "Add", "Expand", "Add"]);
        assert_eq!(ops(&prepare_weights(&mut arithmetic, Prepare::Arithmetic)), ops(&preparation));
        let names = |graph: &Graph| -> Vec<String> { graph.weights().map(|(name, _)| name.into()).collect() };
        assert_eq!(names(&graph), ["both", "negated", "scaled"]);
        assert_eq!(names(&preparation), ["both", "w"]);
        let steps = preparation_steps(&preparation);
        let steps: Vec<_> = steps
            .iter()
            .map(|s| (preparation.value(s.output).name.clone(), s.nodes.clone(), s.weights.clone()))
            .collect();
        let weights = |name: &str| BTreeSet::from([name.to_string()]);
        assert_eq!(
            steps,
            [("scaled".into(), vec![0, 1], weights("w")), ("negated".into(), vec![2], weights("both"))]
        );

        // The remaining graph computes the same result from the prepared weights.
        for (id, tensor) in preparation.outputs.iter().zip(run(&preparation, &[])) {
            let id = graph.find(&preparation.value(*id).name).unwrap();
            graph.initializers.insert(id, Initializer::Constant(tensor));
        }
        assert_eq!(run(&graph, &[("x", x)]), expected);
    }

    #[test]
    fn arithmetic_takes_along_what_it_needs_and_leaves_other_moves() {
        let perm = || [("perm", Attribute::Ints(vec![1, 0]))];
        let bytes = Tensor::from_elements(vec![3, 4], &(0..12).collect::<Vec<i8>>()).unwrap();
        let mut graph = model(17)
            .input("x", DType::F32, "2 3")
            .initializer("plain", &ramp(&[4, 3]))
            .initializer("w", &bytes)
            .initializer("scale", &Tensor::scalar(0.5f32))
            .node_with("Transpose", &["plain"], &["plain_t"], perm())
            .node("MatMul", &["x", "plain_t"], &["a"])
            .node_with("Transpose", &["w"], &["w_t"], perm())
            .node("DequantizeLinear", &["w_t", "scale"], &["f_t"])
            .node_with("Transpose", &["f_t"], &["f"], perm())
            .node("MatMul", &["x", "f"], &["b"])
            .node("Add", &["a", "b"], &["y"])
            .output("y", "2 4")
            .graph();
        simplify(&mut graph, &BTreeMap::new(), OpenDims::Refuse).unwrap();
        let preparation = prepare_weights(&mut graph, Prepare::Arithmetic);
        let ops = |graph: &Graph| -> Vec<String> { graph.nodes.iter().map(|n| n.op_type.clone()).collect() };
        assert_eq!(ops(&preparation), ["Transpose", "DequantizeLinear"]);
        assert_eq!(ops(&graph), ["Transpose", "MatMul", "Transpose", "MatMul", "Add"]);
        let names: Vec<&str> = graph.weights().map(|(name, _)| name).collect();
        assert_eq!(names, ["f_t", "plain"]);
    }

    /// Each product of 600 by 600 takes 216 million steps: the budget is enough for five of them.
    #[test]
    fn work_is_limited() {
        let mut file = model(17).input("x", DType::F32, "600").initializer("w0", &ramp(&[600, 600]));
        for k in 1..=8 {
            file = file.node("MatMul", &[&format!("w{}", k - 1), "w0"], &[&format!("w{k}")]);
        }
        let mut graph = file.node("MatMul", &["x", "w8"], &["y"]).output("y", "600").graph();
        simplify(&mut graph, &BTreeMap::new(), OpenDims::Refuse).unwrap();
        let preparation = prepare_weights(&mut graph, Prepare::NotGrowing);
        assert_eq!((preparation.nodes.len(), graph.nodes.len()), (5, 4));
    }

    #[test]
    fn outputs_and_graphs_without_such_nodes_stay() {
        let mut graph = model(17)
            .input("x", DType::F32, "4")
            .initializer("w", &ramp(&[4]))
            .node("Neg", &["w"], &["n"])
            .node("Add", &["x", "w"], &["y"])
            .output("n", "4")
            .output("y", "4")
            .graph();
        simplify(&mut graph, &BTreeMap::new(), OpenDims::Refuse).unwrap();
        let before = graph.topology_hash();
        let preparation = prepare_weights(&mut graph, Prepare::NotGrowing);
        assert!(
            preparation.nodes.is_empty()
                && preparation.outputs.is_empty()
                && preparation.initializers.is_empty()
        );
        assert_eq!(graph.topology_hash(), before);
    }
}
