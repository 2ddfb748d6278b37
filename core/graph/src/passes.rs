//! Passes that change a graph without changing what it computes: [`simplify`] and what it is made of make it smaller, the
//! others are for engines in which weights are no constants.
//!
//! None of them looks at or changes the values of a weight, so a simplified graph takes any weights that the
//! original takes.

mod branches;
mod compact;
mod dead;
mod expand_biases;
mod fold;
mod identity;
mod merge_projections;
mod prepare_weights;
mod weights_as_inputs;

pub use branches::inline_branches;
pub use compact::compact;
pub use dead::eliminate_dead;
pub use expand_biases::expand_biases;
pub use fold::{FOLD_BUDGET, fold_constants};
pub use identity::eliminate_identity;
pub use merge_projections::merge_projections;
pub use prepare_weights::{PreparationStep, preparation_steps, prepare_weights};
pub use weights_as_inputs::weights_as_inputs;

use crate::{Graph, GraphError, Node, OpenDims, infer};
use serde::Serialize;
use std::collections::BTreeMap;

/// What [`simplify`] did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SimplifyReport {
    /// Nodes before.
    pub nodes_before: usize,
    /// Nodes after.
    pub nodes_after: usize,
    /// How often all passes ran; the last time they found nothing.
    pub rounds: usize,
    /// What each pass took away, in the order in which they run.
    pub passes: Vec<PassReport>,
}

/// What one pass took away over all rounds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PassReport {
    /// Name of the pass.
    pub name: &'static str,
    /// Nodes that are gone.
    pub nodes: usize,
    /// Initializers that are gone.
    pub initializers: usize,
}

/// Binds the inputs named in `shapes` (see [`Graph::bind`]), infers all shapes, and runs all passes until nothing
/// changes. Afterwards every value has the type and shape that could be inferred, and ids are renumbered.
///
/// # Errors
/// Those of [`Graph::bind`], [`infer::infer_shapes`] and [`inline_branches`]. The graph is then valid, but only partly
/// simplified.
pub fn simplify(
    graph: &mut Graph,
    shapes: &BTreeMap<String, Vec<usize>>,
    open: OpenDims,
) -> Result<SimplifyReport, GraphError> {
    graph.bind(shapes, open)?;
    let nodes_before = graph.nodes.len();
    let pass = |name| PassReport { name, nodes: 0, initializers: 0 };
    let names = ["fold_constants", "inline_branches", "eliminate_identity", "eliminate_dead"];
    let mut passes: Vec<PassReport> = names.into_iter().map(pass).collect();
    let (mut budget, mut rounds) = (FOLD_BUDGET, 0);
    loop {
        rounds += 1;
        infer::infer_shapes(graph)?;
        let removed = [
            (fold_constants(graph, &mut budget), 0),
            (inline_branches(graph)?, 0),
            (eliminate_identity(graph), 0),
            eliminate_dead(graph),
        ];
        for (pass, (nodes, initializers)) in passes.iter_mut().zip(removed) {
            pass.nodes += nodes;
            pass.initializers += initializers;
        }
        if removed == [(0, 0); 4] {
            break;
        }
    }
    compact(graph);
    let report = SimplifyReport { nodes_before, nodes_after: graph.nodes.len(), rounds, passes };
    tracing::debug!(?report, "simplified");
    Ok(report)
}

/// Whether an operator gives other outputs for the same inputs.
pub(crate) fn is_random(node: &Node) -> bool {
    const RANDOM: [&str; 6] = [
        "Bernoulli",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    ];
    // Dropout with a third input may be in training mode.
    node.domain.is_empty()
        && (RANDOM.contains(&&*node.op_type) || (node.op_type == "Dropout" && node.input(2).is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Attribute, ExternalBase, Placement, Tensor,
        proto::{GraphProto, NodeProto},
        testing::{Model, model, node, ramp, run, value},
    };
    use proptest::prelude::*;
    use sdrun_abi::DType;

    fn shapes(name: &str, shape: &[usize]) -> BTreeMap<String, Vec<usize>> {
        [(name.to_owned(), shape.to_vec())].into()
    }

    /// What exporters make of `x.view(batch, -1, 2) @ w`, with a squeeze that depends on the shape.
    fn exported() -> Model {
        let attribute = |name, value| (name, value);
        let branch = |op: &str| {
            let inputs: &[&str] = if op == "Squeeze" { &["xw", "zero"] } else { &["xw"] };
            let name = format!("{op}_out");
            Attribute::Graph(Box::new(GraphProto {
                node: vec![NodeProto { name: Some(format!("/{op}")), ..node(op, inputs, &[&name]) }],
                output: vec![value(&name, DType::F32, "? ? 3")],
                ..Default::default()
            }))
        };
        model(17)
            .input("x", DType::F32, "batch n 4")
            .initializer("w", &ramp(&[2, 3]))
            .initializer("unused", &ramp(&[7]))
            .initializer("zero", &Tensor::from_i64s(&[0]))
            .initializer("one", &Tensor::scalar(1i64))
            .initializer("rest", &Tensor::from_i64s(&[-1, 2]))
            .node("Identity", &["x"], &["i"])
            .node("Shape", &["i"], &["s"])
            .node("Gather", &["s", "zero"], &["b"])
            .node_with("Concat", &["b", "rest"], &["target"], [attribute("axis", Attribute::Int(0))])
            .node("Reshape", &["i", "target"], &["r"])
            .node_with("Cast", &["r"], &["same"], [attribute("to", Attribute::Int(1))])
            .node("MatMul", &["same", "w"], &["xw"])
            .node("Equal", &["b", "one"], &["is_one"])
            .node_with(
                "If",
                &["is_one"],
                &["y"],
                [("then_branch", branch("Squeeze")), ("else_branch", branch("Neg"))],
            )
            .output("y", "? ? 3")
    }

    #[test]
    fn exported_shape_arithmetic_disappears() {
        let mut graph = exported().graph();
        let report = simplify(&mut graph, &shapes("x", &[2, 5, 4]), OpenDims::Refuse).unwrap();
        let ops: Vec<_> = graph.nodes.iter().map(|n| n.op_type.as_str()).collect();
        assert_eq!(ops, ["Reshape", "MatMul", "Neg"]);
        let y = graph.value(graph.outputs[0]);
        assert_eq!((y.name.as_str(), y.known_shape()), ("y", Some(vec![2, 10, 3])));
        assert_eq!(graph.weights().map(|(name, _)| name).collect::<Vec<_>>(), ["w"]);
        assert_eq!((report.nodes_before, report.nodes_after), (9, 3));
        let counts: Vec<_> = report.passes.iter().map(|p| (p.name, p.nodes)).collect();
        assert_eq!(
            counts,
            [("fold_constants", 4), ("inline_branches", 1), ("eliminate_identity", 3), ("eliminate_dead", 0)]
        );
        // "unused", and the constants that went into the folded ones.
        assert_eq!(report.passes[3].initializers, 7);
        let x = ramp(&[2, 5, 4]);
        assert_eq!(run(&graph, &[("x", x)])[0].shape(), [2, 10, 3]);

        let mut graph = exported().graph();
        simplify(&mut graph, &shapes("x", &[1, 5, 4]), OpenDims::Refuse).unwrap();
        let ops: Vec<_> = graph.nodes.iter().map(|n| n.op_type.as_str()).collect();
        assert_eq!(ops, ["Reshape", "MatMul", "Squeeze"]);
    }

    #[test]
    fn a_second_time_changes_nothing() {
        let mut graph = exported().graph();
        simplify(&mut graph, &shapes("x", &[2, 5, 4]), OpenDims::Refuse).unwrap();
        let once = graph.clone();
        let report = simplify(&mut graph, &BTreeMap::new(), OpenDims::Refuse).unwrap();
        assert_eq!(report.rounds, 1);
        assert_eq!(graph, once);
    }

    #[test]
    fn open_dimensions_stay_open() {
        let mut graph = exported().graph();
        assert!(simplify(&mut graph, &BTreeMap::new(), OpenDims::Refuse).is_err());
        simplify(&mut graph, &BTreeMap::new(), OpenDims::Allow).unwrap();
        assert!(graph.nodes.iter().any(|n| n.op_type == "If"));
        assert!(graph.nodes.iter().all(|n| n.op_type != "Identity" && n.op_type != "Cast"));
    }

    proptest! {
        /// Random graphs over values of one shape: weights, literals, and nodes of which many change nothing.
        #[test]
        fn results_stay_the_same(
            nodes in prop::collection::vec((0..9usize, any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..20),
            outputs in prop::collection::vec(any::<prop::sample::Index>(), 1..4),
        ) {
            let mut file = model(17)
                .input("v0", DType::F32, "n 3")
                .initializer("v1", &ramp(&[2, 3]))
                .initializer("shape", &Tensor::from_i64s(&[2, 3]))
                .node_with("Constant", &[], &["v2"], [("value", Attribute::Tensor(ramp(&[2, 3])))]);
            for (i, (op, a, b)) in nodes.iter().enumerate() {
                let (a, b) = (format!("v{}", a.index(i + 3)), format!("v{}", b.index(i + 3)));
                let output = format!("v{}", i + 3);
                let (inputs, out): (Vec<&str>, [&str; 1]) = match op {
                    0..=2 => (vec![&a, &b], [&output]),
                    3..=5 => (vec![&a], [&output]),
                    6 | 7 => (vec![&a, "shape"], [&output]),
                    _ => (vec![&a], [&output]),
                };
                let name = ["Add", "Sub", "Max", "Neg", "Identity", "Dropout", "Reshape", "Expand", "Transpose"][*op];
                file = match name {
                    "Transpose" => file.node_with(name, &inputs, &out, [("perm", Attribute::Ints(vec![0, 1]))]),
                    _ => file.node(name, &inputs, &out),
                };
            }
            let mut named: Vec<String> = outputs.iter().map(|i| format!("v{}", 3 + i.index(nodes.len()))).collect();
            named.sort();
            named.dedup();
            for name in &named {
                file = file.output(name, "? 3");
            }
            let original = file.graph();
            let mut simplified = original.clone();
            simplify(&mut simplified, &shapes("v0", &[2, 3]), OpenDims::Refuse).unwrap();
            // Only an input or a weight that is an output at the same time needs a node between.
            let outputs = &simplified.outputs;
            let idle = |n: &&Node| ["Reshape", "Dropout", "Expand", "Transpose"].contains(&&*n.op_type);
            prop_assert!(simplified.nodes.iter().filter(idle).all(|n| outputs.contains(&n.output(0).unwrap())));
            let written = simplified.to_onnx(|name, weight| Ok(Placement::Inline(weight.read(name)?))).unwrap();
            let reread = Graph::from_bytes(written.into(), "m", ExternalBase::Stripped).unwrap();
            let x = Tensor::from_elements(vec![2, 3], &[5.0f32, -1.0, 0.5, 2.0, -3.0, 7.0]).unwrap();
            let expected = run(&original, &[("v0", x.clone())]);
            prop_assert_eq!(run(&reread, &[("v0", x)]), expected);
            let names: Vec<_> = reread.outputs.iter().map(|id| reread.value(*id).name.clone()).collect();
            prop_assert_eq!(names, named);
        }
    }
}
