//! Passes that transform a graph without changing what it computes. [`simplify()`] and its passes shrink the graph.
//! The others serve engines that do not treat weights as constants.
//!
//! No pass reads or changes the values of a weight, so a simplified graph accepts the same weights as the original.
//! [`simplify()`] runs the passes that every consumer wants; [`optimize`] runs passes that a consumer requests by
//! name. Sizes may be open: a rule that needs a number (of channels, of heads) skips nodes where it is unknown.

mod absorb_scales;
mod bodies;
mod branches;
mod channels_last;
mod compact;
mod cse;
mod dead;
mod defer_biases;
mod expand_biases;
mod fold;
mod fold_batch_norms;
mod fuse_attention;
mod fuse_gelu;
mod fuse_group_norm;
mod fuse_linear;
mod fuse_norm;
mod fuse_rotary;
mod identity;
mod layout;
mod merge_projections;
mod neutral;
mod precision;
mod prepare_weights;
mod rewrite;
#[cfg(test)]
pub(crate) mod testing;
mod uses;
mod weights_as_inputs;

pub use absorb_scales::absorb_scales;
pub use branches::inline_branches;
pub use channels_last::channels_last;
pub use compact::compact;
pub use cse::merge_common_subexpressions;
pub use dead::eliminate_dead;
pub use defer_biases::defer_biases;
pub use expand_biases::expand_biases;
pub use fold::{FoldBudget, fold_constants};
pub use fold_batch_norms::fold_batch_norms;
pub use fuse_attention::{absorb_heads, fuse_attention};
pub use fuse_gelu::{fuse_gelu, fuse_swish};
pub use fuse_group_norm::fuse_group_norm;
pub use fuse_linear::{fuse_activation, fuse_bias, fuse_conv_bias, fuse_glu, fuse_residual};
pub use fuse_norm::{fuse_layer_norm, fuse_rms_norm};
pub use fuse_rotary::fuse_rotary;
pub use identity::eliminate_identity;
pub use layout::{cancel_transposes, collapse_gathers, collapse_reshapes, sink_scales, sink_transposes};
pub use merge_projections::merge_projections;
pub use neutral::eliminate_neutral;
pub use precision::{PrecisionReport, convert_precision};
pub use prepare_weights::{PreparationStep, Prepare, preparation_steps, prepare_weights};
pub use weights_as_inputs::weights_as_inputs;

use crate::{Graph, GraphError, Node, OpenDims, infer};
use bodies::simplify_bodies;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// What [`simplify`] did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SimplifyReport {
    /// Number of nodes before.
    pub nodes_before: usize,
    /// Number of nodes after.
    pub nodes_after: usize,
    /// How often all passes ran. The last run changed nothing.
    pub rounds: usize,
    /// The changes of each pass, in the order in which they run.
    pub passes: Vec<PassReport>,
}

/// The changes of one pass, summed over all its runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PassReport {
    /// Name of the pass.
    pub name: &'static str,
    /// How many rewrites it made.
    pub changes: usize,
    /// Change in the number of nodes, by operator. Unchanged operators are omitted.
    pub operators: BTreeMap<String, i64>,
    /// Change in the number of initializers.
    pub initializers: i64,
}

impl PassReport {
    fn new(name: &'static str) -> Self {
        PassReport { name, changes: 0, operators: BTreeMap::new(), initializers: 0 }
    }

    /// Runs a pass and updates `census`, which describes the graph before the pass.
    fn measure(
        &mut self,
        graph: &mut Graph,
        census: &mut Census,
        run: impl FnOnce(&mut Graph) -> Result<usize, GraphError>,
    ) -> Result<usize, GraphError> {
        let changes = run(graph)?;
        if changes > 0 {
            let before = std::mem::replace(census, Census::of(graph));
            self.changes += changes;
            self.initializers += census.initializers - before.initializers;
            for (operators, sign) in [(&before.operators, -1), (&census.operators, 1)] {
                for (name, count) in operators {
                    *self.operators.entry(name.clone()).or_default() += sign * count;
                }
            }
            self.operators.retain(|_, change| *change != 0);
        }
        Ok(changes)
    }

    /// Total change in the number of nodes.
    pub fn nodes(&self) -> i64 {
        self.operators.values().sum()
    }
}

/// A pass that can be chosen by name.
pub struct Pass {
    /// Its name.
    pub name: &'static str,
    /// What it removes or fuses, for people.
    pub summary: &'static str,
    run: Run,
}

enum Run {
    Always(fn(&mut Graph) -> usize),
    MayFail(fn(&mut Graph) -> Result<usize, GraphError>),
}

const fn pass(name: &'static str, summary: &'static str, run: fn(&mut Graph) -> usize) -> Pass {
    Pass { name, summary, run: Run::Always(run) }
}

/// All passes: first those that only remove nodes, then those that fuse nodes into operators of
/// [`fused`](crate::fused).
pub const PASSES: &[Pass] = &[
    pass("fold_constants", "nodes with constant inputs", |g| fold_constants(g, &mut FoldBudget::default())),
    Pass {
        name: "inline_branches",
        summary: "branches whose condition is known",
        run: Run::MayFail(inline_branches),
    },
    pass("eliminate_identity", "nodes that return their input unchanged", eliminate_identity),
    pass("eliminate_dead", "nodes and initializers that no output depends on", |g| {
        let (nodes, initializers) = eliminate_dead(g);
        nodes + initializers
    }),
    pass("eliminate_neutral", "arithmetic with no effect, such as multiplication by 1", eliminate_neutral),
    pass("merge_common_subexpressions", "repeated computations", merge_common_subexpressions),
    pass("collapse_gathers", "gathers of all elements in order", collapse_gathers),
    pass("collapse_reshapes", "chains of reshapes", collapse_reshapes),
    pass("cancel_transposes", "chains of transposes", cancel_transposes),
    pass("sink_scales", "scalar factors before reshapes and transposes", sink_scales),
    pass("sink_transposes", "transposes before operators that do not need them", sink_transposes),
    pass("fuse_swish", "SiLU and other Swish activations", fuse_swish),
    pass("fuse_gelu", "GELU, both its erf and tanh forms", fuse_gelu),
    pass("fuse_group_norm", "group normalisation from its parts", fuse_group_norm),
    pass("fuse_layer_norm", "layer normalisation from its parts", fuse_layer_norm),
    pass("fuse_rms_norm", "root-mean-square normalisation from its parts", fuse_rms_norm),
    pass("fuse_rotary", "rotary position embeddings of neighbours", fuse_rotary),
    pass("fuse_attention", "attention from matrix products and softmax", fuse_attention),
    pass("absorb_heads", "the split into heads around attention", absorb_heads),
    pass("fuse_conv_bias", "biases added to convolutions", fuse_conv_bias),
    pass("fuse_bias", "biases added to matrix products", fuse_bias),
    pass("fuse_glu", "gated linear units", fuse_glu),
    pass("fuse_residual", "residuals added to convolutions and matrix products", fuse_residual),
    pass(
        "fuse_activation",
        "activations after convolutions, matrix products and group normalisations",
        fuse_activation,
    ),
    pass("channels_last", "transposes inside chains of depthwise and pointwise convolutions", channels_last),
];

/// Names of [`PASSES`], some repeated, ordered so that each pass benefits from those before it. A consumer with
/// kernels for all of [`fused`](crate::fused) runs this list; others omit the passes they do not want.
pub const ALL: &[&str] = &[
    "eliminate_neutral",
    "merge_common_subexpressions",
    "fuse_group_norm",
    "collapse_gathers",
    "collapse_reshapes",
    "cancel_transposes",
    "sink_scales",
    "fuse_swish",
    "fuse_gelu",
    "fuse_layer_norm",
    "fuse_rms_norm",
    "fuse_rotary",
    "sink_transposes",
    "cancel_transposes",
    "fuse_attention",
    "cancel_transposes",
    "absorb_heads",
    "cancel_transposes",
    "collapse_reshapes",
    "fuse_conv_bias",
    "fuse_bias",
    "fuse_glu",
    "fuse_residual",
    "fuse_activation",
    "channels_last",
    "cancel_transposes",
];

/// Runs passes by name, in order. Types and shapes must be inferred first; open dimensions stay open. Values and
/// names of weights do not change. Returns the changes of each pass, summed if it ran several times.
///
/// # Errors
/// [`GraphError::Invalid`] if a name is not in [`PASSES`], and the errors of [`inline_branches`].
pub fn optimize(graph: &mut Graph, names: &[&str]) -> Result<Vec<PassReport>, GraphError> {
    let (mut reports, mut census): (Vec<PassReport>, _) = (Vec::new(), Census::of(graph));
    for name in names {
        let Some(pass) = PASSES.iter().find(|pass| pass.name == *name) else {
            return Err(GraphError::Invalid(format!("unknown pass {name:?}")));
        };
        let at = reports.iter().position(|report| report.name == pass.name).unwrap_or_else(|| {
            reports.push(PassReport::new(pass.name));
            reports.len() - 1
        });
        reports[at].measure(graph, &mut census, |graph| match pass.run {
            Run::Always(run) => Ok(run(graph)),
            Run::MayFail(run) => run(graph),
        })?;
    }
    tracing::debug!(?reports, "optimized");
    Ok(reports)
}

/// Binds the inputs named in `shapes` (see [`Graph::bind`]), infers all shapes, and repeats the passes that every
/// consumer wants until nothing changes: constant folding, branches, identities, dead code, and the same in the bodies of
/// If, Loop and Scan. Afterwards every value has the type and shape that could be inferred, and ids are renumbered.
///
/// # Errors
/// Those of [`Graph::bind`], [`infer::infer_shapes`] and [`inline_branches`]; [`GraphError::Invalid`] for an If without a
/// branch that can be computed. The graph is still valid then, but only partly simplified.
pub fn simplify(
    graph: &mut Graph,
    shapes: &BTreeMap<String, Vec<usize>>,
    open: OpenDims,
) -> Result<SimplifyReport, GraphError> {
    graph.bind(shapes, open)?;
    simplify_bound(graph, &mut FoldBudget::default())
}

/// How often bodies are simplified at most: each time, types of their outputs may become known that the next ones capture.
const MAX_BODY_ROUNDS: usize = 4;

fn simplify_bound(graph: &mut Graph, budget: &mut FoldBudget) -> Result<SimplifyReport, GraphError> {
    let nodes_before = graph.nodes.len();
    let names =
        ["fold_constants", "inline_branches", "eliminate_identity", "eliminate_dead", "simplify_bodies"];
    let mut passes = names.map(PassReport::new);
    let (mut rounds, mut body_rounds, mut census) = (0, 0, Census::of(graph));
    loop {
        rounds += 1;
        infer::infer_shapes(graph)?;
        let [fold, branches, identity, dead, bodies] = &mut passes;
        let mut changes = fold.measure(graph, &mut census, |graph| Ok(fold_constants(graph, budget)))?
            + branches.measure(graph, &mut census, inline_branches)?
            + identity.measure(graph, &mut census, |graph| Ok(eliminate_identity(graph)))?
            + dead.measure(graph, &mut census, |graph| {
                let (nodes, initializers) = eliminate_dead(graph);
                Ok(nodes + initializers)
            })?;
        if changes == 0 && body_rounds < MAX_BODY_ROUNDS {
            body_rounds += 1;
            changes = bodies.measure(graph, &mut census, |graph| simplify_bodies(graph, budget))?;
        }
        if changes == 0 {
            break;
        }
    }
    compact(graph);
    let passes = passes.to_vec();
    let report = SimplifyReport { nodes_before, nodes_after: graph.nodes.len(), rounds, passes };
    tracing::debug!(?report, "simplified");
    Ok(report)
}

/// Counts the contents of a graph.
struct Census {
    /// Number of nodes by operator.
    operators: BTreeMap<String, i64>,
    initializers: i64,
}

impl Census {
    fn of(graph: &Graph) -> Self {
        let mut counts: HashMap<(&str, &str), i64> = HashMap::new();
        for node in &graph.nodes {
            *counts.entry((&node.op_type, &node.domain)).or_default() += 1;
        }
        let name = |(op, domain): (&str, &str)| match domain {
            "" => op.to_owned(),
            _ => format!("{domain}.{op}"),
        };
        let operators = counts.into_iter().map(|(key, count)| (name(key), count)).collect();
        Census { operators, initializers: graph.initializers.len() as i64 }
    }
}

impl Graph {
    /// Whether a node may return different outputs for the same inputs.
    pub fn is_random(&self) -> bool {
        self.nodes.iter().any(is_random)
    }
}

/// Whether an operator may return different outputs for the same inputs.
pub(crate) fn is_random(node: &Node) -> bool {
    const RANDOM: [&str; 6] = [
        "Bernoulli",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    ];
    // A third input may switch Dropout to training mode.
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

    /// Exporters produce this from `x.view(batch, -1, 2) @ w` with a squeeze that depends on the shape.
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
        let counts: Vec<_> = report.passes.iter().map(|p| (p.name, p.nodes())).collect();
        // The branch adds a node and an Identity.
        assert_eq!(
            counts,
            [
                ("fold_constants", -4),
                ("inline_branches", 1),
                ("eliminate_identity", -3),
                ("eliminate_dead", 0),
                ("simplify_bodies", 0)
            ]
        );
        // "unused", and the constants that were folded.
        assert_eq!(report.passes[3].initializers, -7);
        let x = ramp(&[2, 5, 4]);
        assert_eq!(run(&graph, &[("x", x)])[0].shape(), [2, 10, 3]);

        let mut graph = exported().graph();
        simplify(&mut graph, &shapes("x", &[1, 5, 4]), OpenDims::Refuse).unwrap();
        let ops: Vec<_> = graph.nodes.iter().map(|n| n.op_type.as_str()).collect();
        assert_eq!(ops, ["Reshape", "MatMul", "Squeeze"]);
    }

    #[test]
    fn a_second_run_changes_nothing() {
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
        /// Random graphs whose values share one shape. Many of their nodes have no effect on the outputs.
        #[test]
        fn results_stay_the_same(
            nodes in prop::collection::vec((0..13usize, any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..20),
            outputs in prop::collection::vec(any::<prop::sample::Index>(), 1..4),
        ) {
            let mut file = model(17)
                .input("v0", DType::F32, "n 3")
                .initializer("v1", &ramp(&[2, 3]))
                .initializer("shape", &Tensor::from_i64s(&[2, 3]))
                .initializer("one", &Tensor::scalar(1f32))
                .node_with("Constant", &[], &["v2"], [("value", Attribute::Tensor(ramp(&[2, 3])))]);
            for (i, (op, a, b)) in nodes.iter().enumerate() {
                let (a, b) = (format!("v{}", a.index(i + 3)), format!("v{}", b.index(i + 3)));
                let output = format!("v{}", i + 3);
                let (inputs, out): (Vec<&str>, [&str; 1]) = match op {
                    0..=2 | 9 => (vec![&a, &b], [&output]),
                    10 | 11 => (vec![&a, "one"], [&output]),
                    3..=5 => (vec![&a], [&output]),
                    6 | 7 => (vec![&a, "shape"], [&output]),
                    _ => (vec![&a], [&output]),
                };
                let name = [
                    "Add", "Sub", "Max", "Neg", "Identity", "Dropout", "Reshape", "Expand", "Transpose", "Mul", "Mul",
                    "Div", "Relu",
                ][*op];
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
            // Only an input or weight that is also an output needs a node in between.
            let outputs = &simplified.outputs;
            let idle = |n: &&Node| ["Reshape", "Dropout", "Expand", "Transpose"].contains(&&*n.op_type);
            prop_assert!(simplified.nodes.iter().filter(idle).all(|n| outputs.contains(&n.output(0).unwrap())));
            let written = simplified.to_onnx(|name, weight| Ok(Placement::Inline(weight.read(name)?))).unwrap();
            let reread = Graph::from_bytes(written.into(), "m", ExternalBase::Stripped).unwrap();
            let x = Tensor::from_elements(vec![2, 3], &[5.0f32, -1.0, 0.5, 2.0, -3.0, 7.0]).unwrap();
            let expected = run(&original, &[("v0", x.clone())]);
            prop_assert_eq!(&run(&reread, &[("v0", x.clone())]), &expected);
            let names: Vec<_> = reread.outputs.iter().map(|id| reread.value(*id).name.clone()).collect();
            prop_assert_eq!(&names, &named);

            // No fusion in these graphs changes the rounding.
            optimize(&mut simplified, ALL).unwrap();
            prop_assert!(simplified.nodes.len() <= reread.nodes.len());
            let names: Vec<_> = simplified.outputs.iter().map(|id| simplified.value(*id).name.clone()).collect();
            prop_assert_eq!(&names, &named);
            prop_assert_eq!(run(&simplified, &[("v0", x)]), expected);
        }
    }
}
