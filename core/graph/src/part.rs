//! A part of a graph, as a graph of its own.

use crate::{Graph, ValueId, passes::compact};
use std::collections::BTreeSet;

impl Graph {
    /// The graph of these nodes, given by their indices, with `outputs`, which they compute. What they need from other nodes becomes an
    /// input, as do the inputs of this graph that they use.
    #[must_use]
    pub fn part(&self, nodes: &BTreeSet<usize>, outputs: &[ValueId]) -> Graph {
        let mut part = self.clone();
        let mut at = 0..;
        part.nodes.retain(|_| at.next().is_some_and(|index| nodes.contains(&index)));
        let made: BTreeSet<ValueId> =
            part.nodes.iter().flat_map(|node| node.outputs.iter().flatten().copied()).collect();
        let captured: BTreeSet<ValueId> = part.captures().into_values().flatten().collect();
        let read = part.nodes.iter().flat_map(|node| node.inputs.iter().flatten().copied()).chain(captured);
        let needed: BTreeSet<ValueId> = read.filter(|id| !made.contains(id)).collect();
        part.initializers.retain(|id, _| needed.contains(id));
        part.inputs = needed.into_iter().filter(|id| !part.initializers.contains_key(id)).collect();
        part.outputs = outputs.to_vec();
        compact(&mut part);
        part
    }

    /// The nodes that `value` depends on, by their indices, in topological order.
    pub fn ancestors(&self, value: ValueId) -> Vec<usize> {
        self.behind([value], |_| true).into_iter().collect()
    }

    /// The nodes that these values depend on, by their indices. The search leaves out nodes for which `enters` is false, and does not look
    /// behind them.
    pub(crate) fn behind(
        &self,
        values: impl IntoIterator<Item = ValueId>,
        enters: impl Fn(usize) -> bool,
    ) -> BTreeSet<usize> {
        let captures = self.captures();
        let mut wanted: BTreeSet<ValueId> = values.into_iter().collect();
        let mut found = BTreeSet::new();
        for (index, node) in self.nodes.iter().enumerate().rev() {
            if node.outputs.iter().flatten().any(|id| wanted.contains(id)) && enters(index) {
                found.insert(index);
                wanted.extend(node.inputs.iter().flatten().chain(captures.get(&index).into_iter().flatten()));
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{model, ramp};
    use sdrun_abi::DType;

    #[test]
    fn what_is_cut_becomes_an_input() {
        let graph = model(17)
            .input("x", DType::F32, "2")
            .initializer("a", &ramp(&[2]))
            .initializer("b", &ramp(&[2]))
            .node("Add", &["x", "a"], &["t"])
            .node("Neg", &["x"], &["aside"])
            .node("Mul", &["t", "b"], &["u"])
            .node("Add", &["u", "x"], &["y"])
            .output("y", "2")
            .output("aside", "2")
            .graph();
        let y = graph.find("y").unwrap();
        assert_eq!(graph.ancestors(y), [0, 2, 3]);
        assert_eq!(graph.ancestors(graph.find("t").unwrap()), [0]);
        let part = graph.part(&BTreeSet::from([2, 3]), &[y]);
        let names = |ids: &[ValueId]| ids.iter().map(|id| part.value(*id).name.clone()).collect::<Vec<_>>();
        assert_eq!(
            (names(&part.inputs), names(&part.outputs)),
            (vec!["x".into(), "t".into()], vec!["y".into()])
        );
        assert_eq!(part.weights().map(|(name, _)| name).collect::<Vec<_>>(), ["b"]);
        assert_eq!(part.nodes.len(), 2);
    }
}
