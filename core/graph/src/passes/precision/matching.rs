//! Finds the nodes that the keep-list selects.

use super::{is_float, keep::Pattern};
use crate::{Graph, Initializer, Node, ValueId, scope};
use std::collections::{HashMap, HashSet};

/// Reductions and roots of a norm that an exporter decomposed.
const STATISTICS: [&str; 8] =
    ["Pow", "Reciprocal", "ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare", "Sqrt", "ReduceL1"];
const ELEMENTWISE: [&str; 7] = ["Add", "Sub", "Mul", "Div", "Max", "Min", "Clip"];
/// Operators that move elements without computing.
const MOVES: [&str; 17] = [
    "Cast",
    "Concat",
    "DepthToSpace",
    "Expand",
    "Flatten",
    "Gather",
    "Identity",
    "Pad",
    "Reshape",
    "Resize",
    "Slice",
    "SpaceToDepth",
    "Split",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
    "Upsample",
];
/// Cheap operators, besides [`MOVES`] and [`ELEMENTWISE`], that stay in f32 between kept nodes.
const ACTIVATIONS: [&str; 12] = [
    "Abs",
    "Elu",
    "Erf",
    "Gelu",
    "HardSigmoid",
    "LeakyRelu",
    "Mish",
    "Neg",
    "Relu",
    "Sigmoid",
    "Softplus",
    "Tanh",
];
const NORMS: [&str; 7] = [
    "GroupNormalization",
    "InstanceNormalization",
    "LayerNormalization",
    "LpNormalization",
    "MeanVarianceNormalization",
    "RMSNormalization",
    "SimplifiedLayerNormalization",
];

/// A graph with the producers and users of its values.
pub(super) struct View<'g> {
    graph: &'g Graph,
    producer: HashMap<ValueId, usize>,
    users: HashMap<ValueId, Vec<usize>>,
    /// Weights, constants, and values computed from them alone.
    fixed: HashSet<ValueId>,
    /// Values that graph outputs or bodies use.
    needed: HashSet<ValueId>,
}

impl<'g> View<'g> {
    pub(super) fn new(graph: &'g Graph) -> Self {
        let mut view = View {
            graph,
            producer: HashMap::new(),
            users: HashMap::new(),
            fixed: graph.initializers.keys().copied().collect(),
            needed: graph.outputs.iter().copied().collect(),
        };
        view.needed.extend(graph.captures().into_values().flatten());
        for (index, node) in graph.nodes.iter().enumerate() {
            view.producer.extend(node.outputs.iter().flatten().map(|id| (*id, index)));
            for id in node.inputs.iter().flatten() {
                view.users.entry(*id).or_default().push(index);
            }
            if node.inputs.iter().flatten().all(|id| view.fixed.contains(id))
                && scope::bodies(node).next().is_none()
            {
                view.fixed.extend(node.outputs.iter().flatten());
            }
        }
        view
    }

    /// Whether each node matches.
    pub(super) fn matches(&self, pattern: &Pattern) -> Vec<bool> {
        match pattern {
            Pattern::Operators(names) => self.each(|_, node| names.contains(&op(node))),
            Pattern::Statistics => self.statistics(),
            Pattern::Angles => self.backward(|view, index, marks| {
                matches!(op(&view.graph.nodes[index]), "Sin" | "Cos")
                    || view.any_user(index, |user| marks[user])
            }),
            Pattern::Scores => self.scores(),
            Pattern::Quotients => self.quotients(),
            Pattern::Residuals => self.residuals(),
            Pattern::FeedForwardOutputs => self.feed_forward_outputs(),
            Pattern::Weights(names) => self.each(|view, node| {
                let weights = node
                    .inputs
                    .iter()
                    .flatten()
                    .filter(|id| matches!(view.graph.initializers.get(id), Some(Initializer::Weight(_))));
                weights
                    .map(|id| &view.graph.value(*id).name)
                    .any(|weight| names.iter().any(|name| holds(weight, name)))
            }),
        }
    }

    fn each(&self, matches: impl Fn(&Self, &Node) -> bool) -> Vec<bool> {
        self.graph.nodes.iter().map(|node| matches(self, node)).collect()
    }
    /// Whether a node produces floating-point numbers. Shape arithmetic is never marked.
    fn is_float(&self, index: usize) -> bool {
        self.graph.nodes[index].outputs.iter().flatten().any(|id| is_float(self.graph.value(*id).dtype))
    }
    /// Marks nodes in order; `mark` sees the marks of earlier nodes.
    fn forward(&self, mark: impl Fn(&Self, usize, &[bool]) -> bool) -> Vec<bool> {
        let mut marks = vec![false; self.graph.nodes.len()];
        (0..marks.len()).for_each(|index| marks[index] = self.is_float(index) && mark(self, index, &marks));
        marks
    }
    /// Marks nodes in reverse order; `mark` sees the marks of later nodes.
    fn backward(&self, mark: impl Fn(&Self, usize, &[bool]) -> bool) -> Vec<bool> {
        let mut marks = vec![false; self.graph.nodes.len()];
        (0..marks.len())
            .rev()
            .for_each(|index| marks[index] = self.is_float(index) && mark(self, index, &marks));
        marks
    }
    fn producers(&self, index: usize) -> impl Iterator<Item = usize> {
        self.graph.nodes[index].inputs.iter().flatten().filter_map(|id| self.producer.get(id).copied())
    }
    fn any_user(&self, index: usize, accept: impl Fn(usize) -> bool) -> bool {
        let outputs = self.graph.nodes[index].outputs.iter().flatten();
        outputs.filter_map(|id| self.users.get(id)).flatten().any(|user| accept(*user))
    }
    /// Floating-point inputs that depend on the graph's inputs.
    fn activations(&self, node: &'g Node) -> impl Iterator<Item = ValueId> {
        let inputs = node.inputs.iter().flatten().copied();
        inputs.filter(|id| is_float(self.graph.value(*id).dtype) && !self.fixed.contains(id))
    }

    fn statistics(&self) -> Vec<bool> {
        let results = self.forward(|view, index, marks| {
            let op = op(&view.graph.nodes[index]);
            let (mut before, elementwise) = (view.producers(index).peekable(), ELEMENTWISE.contains(&op));
            STATISTICS.contains(&op) || (elementwise && before.peek().is_some() && before.all(|i| marks[i]))
        });
        self.forward(|view, index, _| {
            ELEMENTWISE.contains(&op(&view.graph.nodes[index])) && view.producers(index).any(|i| results[i])
        })
    }

    fn scores(&self) -> Vec<bool> {
        let passes = |_: &Self, node: &Node| {
            let op = op(node);
            MOVES.contains(&op) || ELEMENTWISE.contains(&op) || matches!(op, "Where" | "Tanh")
        };
        let is_end = |_: &Self, node: &Node| matches!(op(node), "Softmax" | "LogSoftmax" | "Exp");
        self.products_to(is_end, passes)
    }

    fn quotients(&self) -> Vec<bool> {
        let passes = |view: &Self, node: &Node| {
            MOVES.contains(&op(node)) || op(node) == "Add" || view.is_product(node)
        };
        let is_end = |view: &Self, node: &Node| op(node) == "Div" && view.activations(node).count() >= 2;
        self.products_to(is_end, passes)
    }

    /// Products of two activations that lead to a node that satisfies `is_end`, and the nodes between, which satisfy `passes`.
    fn products_to(
        &self,
        is_end: impl Fn(&Self, &Node) -> bool,
        passes: impl Fn(&Self, &Node) -> bool,
    ) -> Vec<bool> {
        let leads = self.backward(|view, index, marks| {
            view.any_user(index, |user| {
                let node = &view.graph.nodes[user];
                is_end(view, node) || (marks[user] && passes(view, node))
            })
        });
        self.forward(|view, index, marks| {
            let node = &view.graph.nodes[index];
            let follows = || passes(view, node) && view.producers(index).any(|i| marks[i]);
            leads[index] && (view.is_product(node) || follows())
        })
    }

    /// Whether it multiplies two matrices of activations.
    fn is_product(&self, node: &Node) -> bool {
        matches!(op(node), "MatMul" | "Einsum" | "Gemm") && self.activations(node).count() >= 2
    }

    fn residuals(&self) -> Vec<bool> {
        let feeds_norm = self.feeding(|view, id| view.is_normalized(id));
        let is_sum = |index: usize| self.is_residual_sum(index) && feeds_norm[index];
        let is_factor = |node: &Node| matches!(op(node), "Mul" | "Div");
        // Values that end up in a residual sum, through factors and moves.
        let summand = self.backward(|view, index, marks| {
            view.any_user(index, |user| {
                let node = &view.graph.nodes[user];
                is_sum(user) || (marks[user] && (is_factor(node) || MOVES.contains(&op(node))))
            })
        });
        self.forward(|view, index, marks| {
            let node = &view.graph.nodes[index];
            let moves = MOVES.contains(&op(node)) || is_factor(node) || op(node) == "Clip";
            is_sum(index)
                || (summand[index] && is_factor(node))
                || ((summand[index] || feeds_norm[index]) && moves && view.producers(index).any(|i| marks[i]))
        })
    }

    fn feed_forward_outputs(&self) -> Vec<bool> {
        let feeds_norm = self.feeding(|view, id| view.is_normalized(id) && !view.is_centred(id));
        self.each(|view, node| {
            let [Some(x), Some(weight)] = [node.input(0), node.input(1)] else { return false };
            let from_activation = view.producer.get(&x).is_some_and(|index| {
                let before = &view.graph.nodes[*index];
                let gated = op(before) == "Mul" && view.activations(before).count() == 2;
                gated || ACTIVATIONS.contains(&op(before))
            });
            let index = node.output(0).and_then(|id| view.producer.get(&id));
            let is_product = op(node) == "MatMul" || (op(node) == "Gemm" && node.input(2).is_none());
            is_product
                && from_activation
                && view.fixed.contains(&weight)
                && index.is_some_and(|index| {
                    view.any_user(*index, |user| view.is_residual_sum(user) && feeds_norm[user])
                })
        })
    }

    /// Nodes whose outputs reach a value that satisfies `is_end`, through sums, factors and moves.
    fn feeding(&self, is_end: impl Fn(&Self, ValueId) -> bool) -> Vec<bool> {
        self.backward(|view, index, marks| {
            let passes = |user: usize| {
                let node = &view.graph.nodes[user];
                // A factor that is itself an activation is a modulation by another layer.
                let scaled = matches!(op(node), "Mul" | "Div") && view.activations(node).count() < 2;
                scaled || view.is_residual_sum(user) || MOVES.contains(&op(node)) || op(node) == "Clip"
            };
            view.graph.nodes[index].outputs.iter().flatten().any(|id| is_end(view, *id))
                || view.any_user(index, |user| marks[user] && passes(user))
        })
    }

    fn is_residual_sum(&self, index: usize) -> bool {
        let node = &self.graph.nodes[index];
        matches!(op(node), "Add" | "Sum") && self.activations(node).count() >= 2
    }

    /// Whether a value enters a norm, fused or decomposed: reduced, or squared and then reduced.
    fn is_normalized(&self, id: ValueId) -> bool {
        let reduces =
            |node: &Node| matches!(op(node), "ReduceMean" | "ReduceSum" | "ReduceSumSquare" | "ReduceL2");
        let squares = |node: &Node| match op(node) {
            "Pow" => node.input(0) == Some(id),
            "Mul" => node.input(0) == node.input(1),
            _ => false,
        };
        self.users.get(&id).into_iter().flatten().any(|index| {
            let node = &self.graph.nodes[*index];
            (NORMS.contains(&op(node)) && node.input(0) == Some(id))
                || reduces(node)
                || (squares(node) && self.any_user(*index, |user| reduces(&self.graph.nodes[user])))
        })
    }

    /// Whether the norms of a value subtract its mean.
    fn is_centred(&self, id: ValueId) -> bool {
        self.users.get(&id).into_iter().flatten().any(|index| {
            let node = &self.graph.nodes[*index];
            matches!(
                op(node),
                "ReduceMean" | "GroupNormalization" | "InstanceNormalization" | "LayerNormalization"
            )
        })
    }

    /// Also keeps cheap nodes with a kept node before them and only kept nodes after: rounding between the two would
    /// save nothing.
    pub(super) fn fill(&self, kept: &mut [bool]) {
        let cheap = self.each(|_, node| {
            let op = op(node);
            MOVES.contains(&op) || ELEMENTWISE.contains(&op) || ACTIVATIONS.contains(&op) || op == "Where"
        });
        let after = self.forward(|view, index, marks| {
            let mut inputs = view.activations(&view.graph.nodes[index]);
            let is_wide = |i: &usize| kept[*i] || marks[*i];
            cheap[index] && inputs.any(|id| view.producer.get(&id).is_some_and(is_wide))
        });
        let before = self.backward(|view, index, marks| {
            let mut outputs = view.graph.nodes[index].outputs.iter().flatten();
            after[index]
                && outputs.all(|id| {
                    let users = view.users.get(id).map_or(&[][..], Vec::as_slice);
                    !view.needed.contains(id) && users.iter().all(|user| kept[*user] || marks[*user])
                })
        });
        kept.iter_mut().zip(before).for_each(|(kept, fills)| *kept |= fills);
    }
}

/// The operator of an ai.onnx node; empty for other domains.
fn op(node: &Node) -> &str {
    if matches!(&*node.domain, "" | "ai.onnx") { &node.op_type } else { "" }
}

/// Whether a dotted name contains `part` at the start of a word.
fn holds(name: &str, part: &str) -> bool {
    name.match_indices(part).any(|(at, _)| at == 0 || name.as_bytes()[at - 1] == b'.')
}
