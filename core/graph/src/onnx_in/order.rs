//! Topological order.

use crate::{Graph, ValueId};
use std::{cmp::Reverse, collections::BinaryHeap};

/// Sorts the nodes topologically. Nodes that are already in order keep their places. The error names a node that
/// depends on the cycle.
pub(super) fn sort(graph: &mut Graph) -> Result<(), String> {
    let mut producer = vec![None; graph.values.len()];
    for (index, node) in graph.nodes.iter().enumerate() {
        for id in node.outputs.iter().flatten() {
            producer[id.0 as usize] = Some(index);
        }
    }
    let captures = graph.captures();
    // For each node: the nodes that wait for it (once per use), and the number of uses it still waits for.
    let mut waiting: Vec<Vec<usize>> = vec![Vec::new(); graph.nodes.len()];
    let mut missing = vec![0usize; graph.nodes.len()];
    for (index, node) in graph.nodes.iter().enumerate() {
        let captured = captures.get(&index).map(Vec::as_slice).unwrap_or_default();
        for id in node.inputs.iter().flatten().chain(captured) {
            if let Some(before) = producer[id.0 as usize] {
                waiting[before].push(index);
                missing[index] += 1;
            }
        }
    }
    let mut ready: BinaryHeap<Reverse<usize>> =
        (0..missing.len()).filter(|i| missing[*i] == 0).map(Reverse).collect();
    let mut order = Vec::with_capacity(missing.len());
    while let Some(Reverse(index)) = ready.pop() {
        order.push(index);
        for after in &waiting[index] {
            missing[*after] -= 1;
            if missing[*after] == 0 {
                ready.push(Reverse(*after));
            }
        }
    }
    if let Some(index) = missing.iter().position(|n| *n > 0) {
        return Err(format!("the nodes form a cycle that {} depends on", describe(graph, index)));
    }
    let mut nodes: Vec<_> = std::mem::take(&mut graph.nodes).into_iter().map(Some).collect();
    graph.nodes = order.into_iter().filter_map(|index| nodes[index].take()).collect();
    Ok(())
}

/// Describes a node by its name, or else by its first output.
fn describe(graph: &Graph, index: usize) -> String {
    let node = &graph.nodes[index];
    let output = node.outputs.iter().flatten().next().map(|id: &ValueId| graph.value(*id).name.as_str());
    match (node.name.as_str(), output) {
        ("", Some(output)) => format!("the {} node of {output:?}", node.op_type),
        ("", None) => format!("a {} node", node.op_type),
        (name, _) => format!("{} node {name:?}", node.op_type),
    }
}
