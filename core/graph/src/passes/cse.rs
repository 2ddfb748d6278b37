use super::{eliminate_dead, is_random};
use crate::{Graph, Initializer, Node, ValueId, scope};
use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
};

/// Constants up to this size are compared.
const MAX_CONSTANT_BYTES: usize = 4096;

/// Computes repeated subexpressions once, and keeps one of several equal small constants. Outputs of the graph,
/// values that bodies capture and random values are not merged. Returns the number of nodes whose results now come
/// from another node.
pub fn merge_common_subexpressions(graph: &mut Graph) -> usize {
    let mut source: Vec<ValueId> = (0..graph.values.len() as u32).map(ValueId).collect();
    let mut constants = HashMap::new();
    for (id, initializer) in &graph.initializers {
        if let Initializer::Constant(tensor) = initializer
            && tensor.data().len() <= MAX_CONSTANT_BYTES
        {
            let content = (tensor.dtype(), tensor.shape(), &tensor.data()[..]);
            source[id.0 as usize] = *constants.entry(content).or_insert(*id);
        }
    }
    let mut pinned = vec![false; graph.values.len()];
    for id in graph.captures().values().flatten().chain(&graph.outputs) {
        pinned[id.0 as usize] = true;
    }
    let resolve = |source: &[ValueId], node: &Node| -> Vec<Option<ValueId>> {
        node.inputs.iter().map(|id| id.map(|id| source[id.0 as usize])).collect()
    };
    let mut seen: HashMap<u64, Vec<usize>> = HashMap::new();
    let mut merged = 0;
    for (index, node) in graph.nodes.iter().enumerate() {
        let fixed = node.outputs.iter().flatten().any(|id| pinned[id.0 as usize]);
        if is_random(node) || scope::bodies(node).next().is_some() {
            continue;
        }
        let inputs = resolve(&source, node);
        let mut hasher = DefaultHasher::new();
        (&node.op_type, &node.domain, &inputs, node.outputs.len()).hash(&mut hasher);
        let bucket = seen.entry(hasher.finish()).or_default();
        let same = bucket.iter().map(|at| &graph.nodes[*at]).find(|other| {
            let kept = other.outputs.iter().zip(&node.outputs).all(|(a, b)| a.is_some() || b.is_none());
            (&other.op_type, &other.domain, &other.attributes)
                == (&node.op_type, &node.domain, &node.attributes)
                && other.outputs.len() == node.outputs.len()
                && kept
                && resolve(&source, other) == inputs
        });
        match same.filter(|_| !fixed) {
            Some(other) => {
                merged += 1;
                for (from, to) in other.outputs.iter().zip(&node.outputs) {
                    if let (Some(from), Some(to)) = (from, to) {
                        source[to.0 as usize] = *from;
                    }
                }
            }
            None => bucket.push(index),
        }
    }
    for id in graph.nodes.iter_mut().flat_map(|node| node.inputs.iter_mut().flatten()) {
        *id = source[id.0 as usize];
    }
    if merged > 0 {
        eliminate_dead(graph);
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Attribute, Tensor,
        testing::{model, ramp, run},
    };
    use sdrun_abi::DType;

    #[test]
    fn equal_computations_happen_once() {
        let axis = |axis| [("axis", Attribute::Int(axis))];
        let file = model(17)
            .input("x", DType::F32, "n 3")
            .initializer("one", &Tensor::scalar(1f32))
            .initializer("uno", &Tensor::scalar(1f32))
            .initializer("w1", &ramp(&[3]))
            .initializer("w2", &ramp(&[3]))
            .node("Add", &["x", "one"], &["a"])
            .node("Add", &["x", "uno"], &["b"])
            .node_with("Softmax", &["a"], &["sa"], axis(0))
            .node_with("Softmax", &["b"], &["sb"], axis(0))
            .node_with("Softmax", &["b"], &["sc"], axis(1))
            .node("Mul", &["sa", "w1"], &["p"])
            .node("Mul", &["sb", "w2"], &["q"])
            .node("Sum", &["p", "q", "sc"], &["y"])
            .output("y", "n 3");
        let (mut graph, original) = (file.graph(), file.graph());
        assert_eq!(merge_common_subexpressions(&mut graph), 2);
        let ops: Vec<_> = graph.nodes.iter().map(|n| n.op_type.as_str()).collect();
        // Equal weights may be replaced one by one, so both products stay.
        assert_eq!(ops, ["Add", "Softmax", "Softmax", "Mul", "Mul", "Sum"]);
        let x = ramp(&[2, 3]);
        assert_eq!(run(&graph, &[("x", x.clone())]), run(&original, &[("x", x)]));
        assert_eq!(merge_common_subexpressions(&mut graph), 0);
    }

    #[test]
    fn outputs_of_the_graph_and_random_values_stay() {
        let random = [("shape", Attribute::Ints(vec![2]))];
        let mut graph = model(17)
            .input("x", DType::F32, "2")
            .node("Exp", &["x"], &["y"])
            .node("Exp", &["x"], &["z"])
            .node_with("RandomNormal", &[], &["r"], random.clone())
            .node_with("RandomNormal", &[], &["s"], random)
            .node("Sub", &["r", "s"], &["d"])
            .output("y", "2")
            .output("z", "2")
            .output("d", "2")
            .graph();
        assert_eq!(merge_common_subexpressions(&mut graph), 0);
        assert_eq!(graph.nodes.len(), 5);
    }
}
