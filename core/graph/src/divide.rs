//! A graph in two parts, by how often its inputs change.

use crate::{Graph, Initializer, Node, ValueId, eval, passes::is_random};
use std::collections::BTreeSet;

/// How to divide a graph of which a part depends only on inputs that seldom change.
#[derive(Clone, Debug)]
pub struct Division {
    early: BTreeSet<usize>,
    late: BTreeSet<usize>,
    /// What the early part computes for the late one.
    pub between: Vec<ValueId>,
    /// What only the early part has.
    pub moved: Load,
    /// What the undivided graph has.
    pub whole: Load,
}

/// What a graph has to keep and to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Elements of the weights.
    pub weights: u64,
    /// Elementary steps of about the time of a multiplication. Nodes with inputs or outputs of unknown size are not counted.
    pub work: u64,
}

/// What a node costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Elements of the inputs that depend on no input of the graph, for example of its weights.
    pub weights: u64,
    /// As [`Load::work`].
    pub work: u64,
    /// Elements of its outputs.
    pub outputs: u64,
}

/// What a value depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum DependsOn {
    Nothing,
    SlowInputs,
    OtherInputs,
}

impl Graph {
    /// How to divide the graph. The early part gets the nodes that depend on the inputs `slow` alone, if it `pays` to keep their outputs, and
    /// all that these nodes need. Cheap nodes that both parts need are in both. `None` if no node pays.
    ///
    /// The shapes must be inferred. A node with inputs or outputs of unknown size never pays.
    #[must_use]
    pub fn divide(&self, slow: &BTreeSet<ValueId>, pays: impl Fn(Cost) -> bool) -> Option<Division> {
        let captures = self.captures();
        let reads = |index: usize| {
            let captured = captures.get(&index).into_iter().flatten();
            self.nodes[index].inputs.iter().flatten().chain(captured).copied()
        };
        let outputs = |index: usize| self.nodes[index].outputs.iter().flatten().copied();
        let mut depends = vec![DependsOn::Nothing; self.values.len()];
        for id in &self.inputs {
            let is_slow = slow.contains(id);
            depends[id.0 as usize] = if is_slow { DependsOn::SlowInputs } else { DependsOn::OtherInputs };
        }
        // Nodes that pay, and values that depend on them.
        let (mut paying, mut dear) = (Vec::new(), BTreeSet::new());
        let mut work = Vec::with_capacity(self.nodes.len());
        for (index, node) in self.nodes.iter().enumerate() {
            let most = reads(index).map(|id| depends[id.0 as usize]).max().unwrap_or(DependsOn::Nothing);
            let most = if is_random(node) { DependsOn::OtherInputs } else { most };
            let cost = self.cost(node, &depends);
            work.push(cost.map_or(0, |cost| cost.work));
            outputs(index).for_each(|id| depends[id.0 as usize] = most);
            if most != DependsOn::SlowInputs {
                continue;
            }
            let pays = cost.is_some_and(&pays);
            if pays {
                paying.extend(outputs(index));
            }
            if pays || reads(index).any(|id| dear.contains(&id)) {
                dear.extend(outputs(index));
            }
        }
        let early = self.behind(paying, |_| true);
        let is_kept = |index: usize| early.contains(&index) && outputs(index).any(|id| dear.contains(&id));
        let late = self.behind(self.outputs.iter().copied(), |index| !is_kept(index));
        let made: BTreeSet<ValueId> = early.difference(&late).flat_map(|index| outputs(*index)).collect();
        let read: BTreeSet<ValueId> = late.iter().flat_map(|index| reads(*index)).collect();
        let between: Vec<ValueId> = made.intersection(&read).copied().collect();
        if between.is_empty() || self.outputs.iter().any(|id| made.contains(id)) {
            return None;
        }
        let sum = |numbers: &mut dyn Iterator<Item = u64>| numbers.fold(0, u64::saturating_add);
        let elements = |id: &ValueId| match self.initializers.get(id) {
            Some(Initializer::Weight(weight)) => eval::count(&weight.shape),
            _ => 0,
        };
        let leave: BTreeSet<ValueId> =
            early.iter().flat_map(|index| reads(*index)).filter(|id| !read.contains(id)).collect();
        let moved = Load {
            weights: sum(&mut leave.iter().map(elements)),
            work: sum(&mut early.difference(&late).map(|index| work[*index])),
        };
        let whole = Load {
            weights: sum(&mut self.initializers.keys().map(elements)),
            work: sum(&mut work.iter().copied()),
        };
        Some(Division { early, late, between, moved, whole })
    }

    /// What a node costs; `None` if a size is unknown.
    fn cost(&self, node: &Node, depends: &[DependsOn]) -> Option<Cost> {
        let shape = |id: ValueId| match self.initializers.get(&id) {
            Some(initializer) => Some(initializer.shape().to_vec()),
            None => self.value(id).known_shape(),
        };
        let (mut inputs, mut weights) = (Vec::with_capacity(node.inputs.len()), 0u64);
        for id in &node.inputs {
            let Some(id) = *id else {
                inputs.push(None);
                continue;
            };
            let shape = shape(id)?;
            if depends[id.0 as usize] == DependsOn::Nothing {
                weights = weights.saturating_add(eval::count(&shape));
            }
            inputs.push(Some(shape));
        }
        let outputs = node.outputs.iter().flatten().map(|id| shape(*id)).collect::<Option<Vec<_>>>()?;
        let given = inputs.iter().map(Option::as_deref);
        let work = eval::work(node, given, outputs.iter().map(Vec::as_slice));
        let outputs = outputs.iter().map(|shape| eval::count(shape)).fold(0, u64::saturating_add);
        Some(Cost { weights, work, outputs })
    }
}

impl Division {
    /// The two parts of `graph`, which is the one that was divided. The first computes [`between`](Division::between) from the slow inputs
    /// alone, and runs when one of them has changed. The second takes these values as inputs, under their names, and computes the outputs.
    #[must_use]
    pub fn parts(&self, graph: &Graph) -> (Graph, Graph) {
        (graph.part(&self.early, &self.between), graph.part(&self.late, &graph.outputs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Attribute, Tensor,
        infer::infer_shapes,
        testing::{Model, model, ramp, run},
    };
    use sdrun_abi::DType;

    /// A layer whose output is scaled and shifted by what a time says, after a look at a prompt.
    fn layer() -> Model {
        model(17)
            .input("x", DType::F32, "2 4")
            .input("time", DType::F32, "1 4")
            .initializer("w", &ramp(&[4, 64]))
            .initializer("v", &ramp(&[64, 8]))
            .initializer("u", &ramp(&[4, 4]))
            .initializer("shared", &ramp(&[4]))
            .node("Neg", &["time"], &["cheap"])
            .node("Add", &["cheap", "shared"], &["t"])
            .node("MatMul", &["t", "w"], &["hidden"])
            .node("Tanh", &["hidden"], &["tanh"])
            .node("MatMul", &["tanh", "v"], &["both"])
            .initializer("parts", &Tensor::from_i64s(&[4, 4]))
            .node_with("Split", &["both", "parts"], &["scale", "shift"], [("axis", Attribute::Int(1))])
            .node("MatMul", &["x", "u"], &["y"])
            .node("Mul", &["y", "scale"], &["scaled"])
            .node("Add", &["scaled", "shift"], &["shifted"])
            .node("Mul", &["shifted", "shared"], &["weighted"])
            .node("Sub", &["weighted", "t"], &["out"])
            .output("out", "2 4")
    }

    fn inferred() -> Graph {
        let mut graph = layer().graph();
        infer_shapes(&mut graph).unwrap();
        graph
    }

    fn names(graph: &Graph, ids: &[ValueId]) -> Vec<String> {
        ids.iter().map(|id| graph.value(*id).name.clone()).collect()
    }

    #[test]
    fn two_parts_compute_what_the_whole_computes() {
        let graph = inferred();
        let slow = BTreeSet::from([graph.find("time").unwrap()]);
        let found = graph.divide(&slow, |cost| cost.weights >= 8 * cost.outputs).unwrap();
        let (early, late) = &found.parts(&graph);
        assert_eq!(
            (names(early, &early.inputs), names(early, &early.outputs)),
            (vec!["time".into()], vec!["both".into()])
        );
        assert_eq!(names(late, &late.inputs), ["x", "time", "both"]);
        assert_eq!((early.nodes.len(), late.nodes.len()), (5, 8), "two cheap nodes are in both");
        assert_eq!((found.moved.weights, found.whole.weights), (4 * 64 + 64 * 8, 4 * 64 + 64 * 8 + 16 + 4));
        assert!(found.moved.work > 768 && found.moved.work < found.whole.work);

        let (x, time) = (ramp(&[2, 4]), ramp(&[1, 4]));
        let whole = run(&graph, &[("x", x.clone()), ("time", time.clone())]);
        let both = run(early, &[("time", time.clone())]).remove(0);
        assert_eq!(run(late, &[("x", x), ("time", time), ("both", both)]), whole);
    }

    #[test]
    fn nothing_is_divided_where_nothing_pays() {
        let graph = inferred();
        let id = |name: &str| graph.find(name).unwrap();
        assert!(graph.divide(&BTreeSet::from([id("time")]), |_| false).is_none());
        assert!(graph.divide(&BTreeSet::new(), |_| true).is_none());
        // All of it is slow, so that no part is left for later.
        assert!(graph.divide(&BTreeSet::from([id("time"), id("x")]), |_| true).is_none());
    }
}
