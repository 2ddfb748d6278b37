use crate::{Attribute, Graph, GraphError, onnx_in::graft};
use std::collections::BTreeMap;

/// Replaces each `If` node whose condition is constant by the nodes of the branch taken. Returns the number of
/// replaced `If` nodes.
///
/// # Errors
/// [`GraphError::Invalid`] if a branch violates the format. The graph is then unchanged.
pub fn inline_branches(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut taken = BTreeMap::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        if !node.domain.is_empty() || node.op_type != "If" {
            continue;
        }
        let condition =
            node.input(0).and_then(|id| graph.constant(id)).and_then(|tensor| tensor.to_few_i64s());
        let branch = match condition.as_deref() {
            Some([0]) => "else_branch",
            Some([_]) => "then_branch",
            _ => continue,
        };
        if let Some(Attribute::Graph(body)) = node.attributes.get(branch) {
            taken.insert(index, (**body).clone());
        }
    }
    if !taken.is_empty() {
        *graph = graft(graph, &taken)?;
    }
    Ok(taken.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Tensor,
        proto::{GraphProto, NodeProto},
        testing::{attribute, model, node, ramp, tensor, value},
    };
    use sdrun_abi::DType;

    fn body(nodes: Vec<NodeProto>, output: &str) -> Attribute {
        Attribute::Graph(Box::new(GraphProto {
            node: nodes,
            output: vec![value(output, DType::F32, "2")],
            ..Default::default()
        }))
    }

    fn choosing(condition: Option<bool>) -> Graph {
        // Names in the first branch are already taken: by an outer value and by the other branch.
        let mut then = body(vec![node("Neg", &["x"], &["a"]), node("Mul", &["a", "w"], &["r"])], "r");
        if let Attribute::Graph(body) = &mut then {
            body.initializer.push(tensor("w", &ramp(&[2])));
            let inner = GraphProto { output: vec![value("a", DType::F32, "2")], ..Default::default() };
            let attribute = vec![attribute("then_branch", Attribute::Graph(Box::new(inner)))];
            body.node.push(NodeProto { attribute, ..node("If", &["x"], &["unused"]) });
        }
        let otherwise = body(vec![node("Abs", &["a"], &["r"])], "r");
        let mut file = model(17).input("x", DType::F32, "2").node("Exp", &["x"], &["a"]);
        file = match condition {
            Some(value) => file.initializer("c", &Tensor::from_elements(vec![1], &[value]).unwrap()),
            None => file.input("c", DType::Bool, "1"),
        };
        file.node_with("If", &["c"], &["y"], [("then_branch", then), ("else_branch", otherwise)])
            .output("y", "2")
            .graph()
    }

    fn listing(graph: &Graph) -> Vec<String> {
        let name = |id: Option<crate::ValueId>| id.map_or("", |id| graph.value(id).name.as_str());
        let line = |n: &crate::Node| format!("{} {} {}", n.op_type, name(n.input(0)), name(n.output(0)));
        graph.nodes.iter().map(line).collect()
    }

    #[test]
    fn the_branch_taken_is_inlined_under_fresh_names() {
        let mut graph = choosing(Some(true));
        assert_eq!(inline_branches(&mut graph), Ok(1));
        let ops = ["Exp x a", "Neg x a_1", "Mul a_1 r", "If x unused", "Identity r y"];
        assert_eq!(listing(&graph), ops);
        let Attribute::Graph(inner) = &graph.nodes[3].attributes["then_branch"] else { panic!() };
        assert_eq!(inner.output[0].name(), "a_1", "nested bodies are renamed too");
        assert_eq!(
            graph.weights().map(|(name, w)| (name, w.shape.clone())).collect::<Vec<_>>(),
            [("w", vec![2])]
        );

        let mut graph = choosing(Some(false));
        assert_eq!(inline_branches(&mut graph), Ok(1));
        assert_eq!(listing(&graph), ["Exp x a", "Abs a r", "Identity r y"]);
    }

    #[test]
    fn an_open_condition_keeps_the_node() {
        let mut graph = choosing(None);
        let before = graph.clone();
        assert_eq!(inline_branches(&mut graph), Ok(0));
        assert_eq!(graph, before);
    }

    #[test]
    fn a_bad_branch_changes_nothing() {
        let mut graph = choosing(Some(true));
        graph.nodes[1]
            .attributes
            .insert("then_branch".into(), body(vec![node("Neg", &["gone"], &["r"])], "r"));
        let before = graph.clone();
        let error = inline_branches(&mut graph).unwrap_err().to_string();
        assert!(error.contains("\"gone\", which is not defined"), "{error}");
        assert_eq!(graph, before);
    }
}
