use crate::Graph;

/// Removes nodes and initializers that no graph output depends on. Graph inputs stay, and so do values that bodies
/// capture. Returns the numbers of removed nodes and initializers.
pub fn eliminate_dead(graph: &mut Graph) -> (usize, usize) {
    let captures = graph.captures();
    let mut alive = vec![false; graph.values.len()];
    for id in &graph.outputs {
        alive[id.0 as usize] = true;
    }
    let mut keep = vec![false; graph.nodes.len()];
    // Nodes are in topological order, so the reverse order visits users before producers.
    for (index, node) in graph.nodes.iter().enumerate().rev() {
        if node.outputs.iter().flatten().any(|id| alive[id.0 as usize]) {
            keep[index] = true;
            for id in node.inputs.iter().flatten().chain(captures.get(&index).into_iter().flatten()) {
                alive[id.0 as usize] = true;
            }
        }
    }
    let (nodes, initializers) = (graph.nodes.len(), graph.initializers.len());
    let mut kept = keep.into_iter();
    graph.nodes.retain(|_| kept.next().unwrap_or(true));
    graph.initializers.retain(|id, _| alive[id.0 as usize]);
    (nodes - graph.nodes.len(), initializers - graph.initializers.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Attribute,
        proto::GraphProto,
        testing::{model, node, ramp, value},
    };
    use sdrun_abi::DType;

    #[test]
    fn only_values_that_reach_an_output_stay() {
        let body = Attribute::Graph(Box::new(GraphProto {
            node: vec![node("Identity", &["captured"], &["inner"])],
            output: vec![value("inner", DType::F32, "2")],
            ..Default::default()
        }));
        let mut graph = model(17)
            .input("x", DType::F32, "2")
            .input("unused", DType::F32, "2")
            .initializer("w", &ramp(&[2]))
            .initializer("dead_weight", &ramp(&[2]))
            .initializer("kept_by_body", &ramp(&[2]))
            .node("Neg", &["x"], &["dead1"])
            .node("Add", &["dead1", "dead_weight"], &["dead2"])
            .node("Mul", &["x", "kept_by_body"], &["captured"])
            .node("Split", &["x"], &["half", "other_half"])
            .node_with("If", &["half"], &["a"], [("then_branch", body)])
            .node("Add", &["a", "w"], &["y"])
            .output("y", "2")
            .graph();
        assert_eq!(eliminate_dead(&mut graph), (2, 1));
        let ops: Vec<_> = graph.nodes.iter().map(|n| n.op_type.as_str()).collect();
        assert_eq!(ops, ["Mul", "Split", "If", "Add"]);
        assert_eq!(graph.inputs.len(), 2);
        let names: Vec<_> = graph.weights().map(|(name, _)| name).collect();
        assert_eq!(names, ["w", "kept_by_body"]);
        assert_eq!(eliminate_dead(&mut graph), (0, 0));
    }
}
