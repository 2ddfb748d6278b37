use crate::{Graph, Value, ValueId};
use std::collections::BTreeMap;

/// Renumbers values in a canonical order and drops unreferenced ones: first the graph's inputs, then initializers by
/// name, then outputs of nodes. Invalidates existing [`ValueId`]s.
pub fn compact(graph: &mut Graph) {
    let mut stored: Vec<ValueId> = graph.initializers.keys().copied().collect();
    stored.sort_by(|a, b| graph.value(*a).name.cmp(&graph.value(*b).name));
    let mut order = graph.inputs.clone();
    order.extend(stored);
    order.extend(graph.nodes.iter().flat_map(|node| node.outputs.iter().flatten().copied()));
    // Only an invalid graph has others, but none may be lost.
    order.extend(graph.nodes.iter().flat_map(|node| node.inputs.iter().flatten().copied()));
    order.extend(&graph.outputs);

    let mut new_ids: Vec<Option<ValueId>> = vec![None; graph.values.len()];
    let mut values: Vec<Value> = Vec::with_capacity(order.len());
    for old in order {
        let slot = &mut new_ids[old.0 as usize];
        if slot.is_none() {
            *slot = Some(ValueId(values.len() as u32));
            values.push(graph.values[old.0 as usize].clone());
        }
    }
    let renumber = |id: &mut ValueId| {
        if let Some(new) = new_ids[id.0 as usize] {
            *id = new;
        }
    };
    graph.values = values;
    graph.inputs.iter_mut().chain(&mut graph.outputs).for_each(renumber);
    for node in &mut graph.nodes {
        node.inputs.iter_mut().chain(&mut node.outputs).flatten().for_each(renumber);
    }
    let stored = std::mem::take(&mut graph.initializers).into_iter().map(|(mut id, initializer)| {
        renumber(&mut id);
        (id, initializer)
    });
    graph.initializers = stored.collect::<BTreeMap<_, _>>();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{model, ramp};
    use sdrun_abi::DType;

    #[test]
    fn values_are_renumbered_and_unused_ones_dropped() {
        let mut graph = model(17)
            .initializer("w2", &ramp(&[2]))
            .initializer("w1", &ramp(&[2]))
            .node("Clip", &["x", "", "w2"], &["a", ""])
            .node("Add", &["a", "w1"], &["y"])
            .input("x", DType::F32, "2")
            .output("y", "2")
            .graph();
        graph.add_value(Value { name: "orphan".into(), dtype: None, shape: None });
        let before = graph.topology_hash();
        compact(&mut graph);
        let names: Vec<_> = graph.values.iter().map(|v| v.name.as_str()).collect();
        assert_eq!(names, ["x", "w1", "w2", "a", "y"]);
        assert_eq!(graph.nodes[0].inputs, [Some(ValueId(0)), None, Some(ValueId(2))]);
        assert_eq!(graph.nodes[0].outputs, [Some(ValueId(3)), None]);
        assert_eq!(graph.initializers.keys().copied().collect::<Vec<_>>(), [ValueId(1), ValueId(2)]);
        assert_eq!((graph.inputs.clone(), graph.outputs.clone()), (vec![ValueId(0)], vec![ValueId(4)]));
        assert_eq!(graph.topology_hash(), before);
    }
}
