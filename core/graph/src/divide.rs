//! A graph in two parts, by how often its inputs change.

use crate::{Graph, Node, ValueId, eval, passes::is_random};
use std::collections::{BTreeSet, HashMap};

/// A graph whose nodes depend partly on inputs that seldom change.
#[derive(Clone, Debug)]
pub struct Division {
    /// Computes values from the slow inputs alone. It runs when one of them has changed.
    pub early: Graph,
    /// Computes the outputs. It takes the values of `early` as inputs, under their names, and runs each time.
    pub late: Graph,
    /// What only `early` has.
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
enum Pace {
    Nothing,
    SlowInputs,
    OtherInputs,
}

impl Graph {
    /// Divides the graph: `early` gets the nodes that depend on the inputs `slow` alone, if it `pays` to keep their outputs, and all that
    /// these nodes need. Cheap nodes that both parts need are in both. `None` if no node pays.
    ///
    /// The shapes must be inferred. A node with inputs or outputs of unknown size never pays.
    #[must_use]
    pub fn divide(&self, slow: &BTreeSet<ValueId>, pays: impl Fn(Cost) -> bool) -> Option<Division> {
        let captures = self.captures();
        let reads = |index: usize| {
            let captured = captures.get(&index).into_iter().flatten();
            self.nodes[index].inputs.iter().flatten().chain(captured).copied()
        };
        let mut pace = vec![Pace::Nothing; self.values.len()];
        for id in &self.inputs {
            pace[id.0 as usize] = if slow.contains(id) { Pace::SlowInputs } else { Pace::OtherInputs };
        }
        // Nodes that pay, and values that depend on them.
        let (mut paying, mut dear) = (BTreeSet::new(), BTreeSet::new());
        let mut whole = Load { weights: elements_of_weights(self).values().sum(), work: 0 };
        let mut costs = HashMap::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let slowest = reads(index).map(|id| pace[id.0 as usize]).max().unwrap_or(Pace::Nothing);
            let slowest = if is_random(node) { Pace::OtherInputs } else { slowest };
            let cost = self.cost(node, &pace);
            whole.work += cost.map_or(0, |cost| cost.work);
            costs.extend(cost.map(|cost| (index, cost)));
            let outputs = || node.outputs.iter().flatten().copied();
            outputs().for_each(|id| pace[id.0 as usize] = slowest);
            if slowest != Pace::SlowInputs {
                continue;
            }
            let pays = cost.is_some_and(&pays);
            if pays {
                paying.insert(index);
            }
            if pays || reads(index).any(|id| dear.contains(&id)) {
                dear.extend(outputs());
            }
        }
        let (mut early, mut wanted) = (BTreeSet::new(), BTreeSet::new());
        for (index, node) in self.nodes.iter().enumerate().rev() {
            if paying.contains(&index) || node.outputs.iter().flatten().any(|id| wanted.contains(id)) {
                early.insert(index);
                wanted.extend(reads(index));
            }
        }
        let (mut late, mut between) = (BTreeSet::new(), BTreeSet::new());
        let mut wanted: BTreeSet<ValueId> = self.outputs.iter().copied().collect();
        for (index, node) in self.nodes.iter().enumerate().rev() {
            let found: Vec<ValueId> =
                node.outputs.iter().flatten().filter(|id| wanted.contains(id)).copied().collect();
            if found.is_empty() {
                continue;
            }
            if early.contains(&index) && found.iter().any(|id| dear.contains(id)) {
                between.extend(found);
            } else {
                late.insert(index);
                wanted.extend(reads(index));
            }
        }
        if between.is_empty() || self.outputs.iter().any(|id| between.contains(id)) {
            return None;
        }
        let between: Vec<ValueId> = between.into_iter().collect();
        let work = early.difference(&late).filter_map(|index| costs.get(index)).map(|cost| cost.work).sum();
        let (early, late) = (self.part(&early, &between), self.part(&late, &self.outputs));
        let stays = elements_of_weights(&late);
        let leaves = elements_of_weights(&early).into_iter().filter(|(name, _)| !stays.contains_key(name));
        let weights = leaves.map(|(_, elements)| elements).sum();
        Some(Division { moved: Load { weights, work }, whole, early, late })
    }

    /// What a node costs; `None` if a size is unknown.
    fn cost(&self, node: &Node, pace: &[Pace]) -> Option<Cost> {
        let shape = |id: ValueId| match self.initializers.get(&id) {
            Some(initializer) => Some(initializer.shape().to_vec()),
            None => self.value(id).known_shape(),
        };
        let elements = |shape: &Vec<usize>| shape.iter().map(|dim| *dim as u64).product::<u64>();
        let mut inputs = Vec::with_capacity(node.inputs.len());
        let mut weights = 0;
        for id in &node.inputs {
            inputs.push(match id {
                Some(id) => Some(shape(*id)?),
                None => None,
            });
            if let (Some(id), Some(Some(shape))) = (id, inputs.last())
                && pace[id.0 as usize] == Pace::Nothing
            {
                weights += elements(shape);
            }
        }
        let outputs = node.outputs.iter().flatten().map(|id| shape(*id)).collect::<Option<Vec<_>>>()?;
        let given = inputs.iter().map(Option::as_deref);
        let work = eval::work(node, given, outputs.iter().map(Vec::as_slice));
        Some(Cost { weights, work, outputs: outputs.iter().map(elements).sum() })
    }
}

/// The number of elements of each weight.
fn elements_of_weights(graph: &Graph) -> HashMap<&str, u64> {
    let elements = |shape: &[usize]| shape.iter().map(|dim| *dim as u64).product::<u64>();
    graph.weights().map(|(name, weight)| (name, elements(&weight.shape))).collect()
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
        let (early, late) = (&found.early, &found.late);
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
