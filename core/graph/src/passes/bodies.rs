use super::{FoldBudget, simplify_bound};
use crate::{
    Attribute, Graph, GraphError, Initializer, Node, ValueId,
    infer::describe,
    onnx_out,
    proto::{GraphProto, NodeProto},
    scope::defined,
};
use std::collections::HashSet;

/// Simplifies the bodies of If, Loop and Scan with the known types and shapes of the values that they capture, so that
/// whatever follows from shapes is decided inside bodies too. A body that contradicts these shapes stays unchanged, because
/// only the run decides whether it is reached. Needs inferred shapes. Returns the number of bodies that changed.
///
/// # Errors
/// [`GraphError::Invalid`] if no branch of an If can be computed.
pub(super) fn simplify_bodies(graph: &mut Graph, budget: &mut FoldBudget) -> Result<usize, GraphError> {
    let mut changes = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        let (mut refused, bodies) = (Vec::new(), names(node));
        for name in &bodies {
            match simplified(graph, node, name, budget) {
                Ok(Some(body)) => changes.push((index, name.clone(), body)),
                Ok(None) => {}
                Err(error) => refused.push(format!("{name}: {error}")),
            }
        }
        if node.op_type == "If" && !bodies.is_empty() && refused.len() == bodies.len() {
            let (node, why) = (describe(node), refused.join("; "));
            return Err(GraphError::Invalid(format!("{node}: no branch can be computed ({why})")));
        }
    }
    let count = changes.len();
    for (index, name, body) in changes {
        graph.nodes[index].attributes.insert(name, Attribute::Graph(Box::new(body)));
    }
    Ok(count)
}

impl Graph {
    /// The bodies that contradict the shapes of the values they capture: a run that reaches one fails. Runtimes that
    /// infer the shapes inside bodies refuse the whole graph for it. Returns what each is and why it cannot be computed.
    pub fn contradictory_bodies(&self) -> Vec<String> {
        let (mut found, mut budget) = (Vec::new(), FoldBudget::default());
        for node in &self.nodes {
            for name in names(node) {
                if let Err(error) = simplified(self, node, &name, &mut budget) {
                    found.push(format!("{name} of {}: {error}", describe(node)));
                }
            }
        }
        found
    }

    /// Forgets all sizes but those of initializers. Ranks stay known.
    pub fn forget_sizes(&mut self) {
        for (index, value) in self.values.iter_mut().enumerate() {
            if !self.initializers.contains_key(&ValueId(index as u32)) {
                value.shape.iter_mut().flatten().for_each(|dim| *dim = crate::Dim::Unknown);
            }
        }
    }
}

/// Attributes that hold bodies.
fn names(node: &Node) -> Vec<String> {
    let flow = node.domain.is_empty() && matches!(&*node.op_type, "If" | "Loop" | "Scan");
    let bodies = node.attributes.iter().filter(|(_, value)| flow && matches!(value, Attribute::Graph(_)));
    bodies.map(|(name, _)| name.clone()).collect()
}

/// The simplified body, if it differs from the original. The error is a contradiction.
fn simplified(
    graph: &Graph,
    node: &Node,
    name: &str,
    budget: &mut FoldBudget,
) -> Result<Option<GraphProto>, GraphError> {
    let Some(Attribute::Graph(before)) = node.attributes.get(name) else { return Ok(None) };
    let Ok(mut body) = graph.body(node, name) else { return Ok(None) };
    body.forget_own_shapes();
    let mut inner = body.graph;
    match simplify_bound(&mut inner, budget) {
        Ok(_) => {}
        Err(error @ GraphError::Invalid(_)) => return Err(error),
        Err(_) => return Ok(None),
    }
    let outer = graph.ids_by_name();
    let stored = |name: &str| outer.get(name).and_then(|id| graph.initializers.get(id));
    let belongs_outside = |id: ValueId, initializer: &Initializer| {
        matches!(initializer, Initializer::Weight(_)) || stored(&inner.value(id).name) == Some(initializer)
    };
    let mut after = onnx_out::body_proto(&inner, |id, initializer| !belongs_outside(id, initializer));
    (after.name, after.input) = (before.name.clone(), before.input.clone());
    // A body must compute its outputs. An output that became a value of the outer graph keeps an Identity.
    let made: HashSet<String> = defined(&after).map(str::to_owned).collect();
    for (output, former) in after.output.iter_mut().zip(&before.output) {
        if !made.contains(output.name()) {
            after.node.push(NodeProto {
                op_type: Some("Identity".into()),
                input: vec![output.name().to_owned()],
                output: vec![former.name().to_owned()],
                ..Default::default()
            });
            output.name = former.name.clone();
        }
    }
    // Names made here must not hide those of the graph around.
    let own: HashSet<&str> = defined(before).collect();
    if defined(&after).any(|name| outer.contains_key(name) && !own.contains(name)) {
        return Ok(None);
    }
    Ok((after != **before).then_some(after))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        OpenDims, Tensor, simplify,
        testing::{Model, attribute, model, node, ramp, value},
    };
    use sdrun_abi::DType;
    use std::collections::BTreeMap;

    fn body(nodes: Vec<NodeProto>, output: &str, dims: &str) -> Attribute {
        Attribute::Graph(Box::new(GraphProto {
            name: Some("body".into()),
            node: nodes,
            output: vec![value(output, DType::F32, dims)],
            ..Default::default()
        }))
    }

    /// TorchScript's export of `squeeze`: it removes the dimension if it is 1, and the shape decides that.
    fn squeezed(x: &str, tag: &str) -> Vec<NodeProto> {
        let n = |name: &str| format!("{tag}_{name}");
        let branch = |op: &str| {
            let inputs: &[&str] = if op == "Squeeze" { &[x, "one"] } else { &[x] };
            body(vec![node(op, inputs, &[&n(op)])], &n(op), "?")
        };
        let branches = [("then_branch", "Squeeze"), ("else_branch", "Identity")]
            .map(|(name, op)| attribute(name, branch(op)));
        vec![
            node("Shape", &[x], &[&n("shape")]),
            node("Gather", &[&n("shape"), "one"], &[&n("size")]),
            node("Equal", &[&n("size"), "one"], &[&n("is_one")]),
            NodeProto { attribute: branches.to_vec(), ..node("If", &[&n("is_one")], &[&n("squeezed")]) },
        ]
    }

    /// One branch for inputs of one column, one for inputs of two.
    fn for_sizes() -> Model {
        let first = squeezed("x", "a").into_iter().chain([node("Mul", &["a_squeezed", "w"], &["a"])]);
        // Halves the columns, so that two of them are squeezed.
        let halved = node("MatMul", &["x", "halves"], &["half"]);
        let second = std::iter::once(halved).chain(squeezed("half", "b")).chain([node(
            "Mul",
            &["b_squeezed", "w"],
            &["b"],
        )]);
        model(17)
            .input("x", DType::F32, "rows columns")
            .input("which", DType::Bool, "")
            .initializer("one", &Tensor::from_i64s(&[1]))
            .initializer("w", &ramp(&[5]))
            .initializer("halves", &ramp(&[2, 1]))
            .node_with(
                "If",
                &["which"],
                &["y"],
                [
                    ("then_branch", body(first.collect(), "a", "?")),
                    ("else_branch", body(second.collect(), "b", "?")),
                ],
            )
            .output("y", "?")
    }

    fn bound(columns: usize) -> Result<Graph, GraphError> {
        let mut graph = for_sizes().graph();
        let shapes = BTreeMap::from([("x".to_string(), vec![5, columns])]);
        simplify(&mut graph, &shapes, OpenDims::Refuse)?;
        Ok(graph)
    }

    fn ops<'a>(graph: &'a Graph, branch: &str) -> Vec<&'a str> {
        let Attribute::Graph(body) = &graph.nodes[0].attributes[branch] else { panic!() };
        body.node.iter().map(|node| node.op_type()).collect()
    }

    #[test]
    fn what_follows_from_shapes_is_decided_in_bodies_and_nothing_else() {
        let graph = bound(2).unwrap();
        assert_eq!(graph.nodes.len(), 1, "the input decides");
        // [5, 2] · [5]: this branch contradicts itself, and stays whole.
        assert_eq!(ops(&graph, "then_branch"), ["Shape", "Gather", "Equal", "If", "Mul"]);
        assert_eq!(ops(&graph, "else_branch"), ["MatMul", "Squeeze", "Mul"]);
        // Readers without inference learn the types.
        let body = graph.body(&graph.nodes[0], "else_branch").unwrap().graph;
        assert!(body.nodes.iter().all(|node| body.value(node.outputs[0].unwrap()).dtype == Some(DType::F32)));
        let [reason] = &graph.contradictory_bodies()[..] else { panic!("one branch is impossible") };
        assert!(reason.starts_with("then_branch of") && reason.contains("Mul"), "{reason}");
        let Attribute::Graph(body) = &graph.nodes[0].attributes["else_branch"] else { panic!() };
        assert_eq!(body.output[0], value("b", DType::F32, "5"), "its shape is known");
        let names: Vec<&str> = body.initializer.iter().map(|tensor| tensor.name()).collect();
        assert_eq!(names, Vec::<&str>::new(), "what is captured stays outside");
        // A weight that only bodies capture is still one.
        assert_eq!(graph.weights().map(|(name, _)| name).collect::<Vec<_>>(), ["halves", "w"]);

        let once = graph.clone();
        let mut again = graph;
        simplify(&mut again, &BTreeMap::new(), OpenDims::Refuse).unwrap();
        assert_eq!(again, once);
    }

    #[test]
    fn a_node_without_a_possible_branch_is_refused_by_name() {
        let error = bound(3).unwrap_err().to_string();
        assert!(error.contains("an unnamed If node: no branch can be computed"), "{error}");
        assert!(error.contains("then_branch") && error.contains("else_branch"), "{error}");
    }

    #[test]
    fn sizes_are_forgotten_but_those_of_initializers() {
        let mut graph = bound(2).unwrap();
        graph.forget_sizes();
        let shape = |name: &str| graph.value(graph.find(name).unwrap()).shape.clone().unwrap();
        assert_eq!(shape("x"), [crate::Dim::Unknown, crate::Dim::Unknown]);
        assert_eq!(shape("w"), [crate::Dim::Known(5)]);
        assert!(graph.contradictory_bodies().is_empty());
    }

    #[test]
    fn sizes_in_loops_are_not_those_of_the_first_step() {
        // Each step adds a row; exporters declare the size of the first.
        let grows = Attribute::Graph(Box::new(GraphProto {
            node: vec![
                NodeProto {
                    attribute: vec![attribute("axis", Attribute::Int(0))],
                    ..node("Concat", &["carried", "row"], &["longer"])
                },
                node("Shape", &["longer"], &["size"]),
                node("Identity", &["going"], &["go_on"]),
            ],
            input: vec![
                value("i", DType::I64, ""),
                value("going", DType::Bool, ""),
                value("carried", DType::F32, "1 2"),
            ],
            output: vec![
                value("go_on", DType::Bool, ""),
                value("longer", DType::F32, "? 2"),
                value("size", DType::I64, "2"),
            ],
            ..Default::default()
        }));
        let mut graph = model(17)
            .input("row", DType::F32, "1 2")
            .initializer("times", &Tensor::scalar(3i64))
            .node_with("Loop", &["times", "", "row"], &["y", "sizes"], [("body", grows)])
            .output("y", "? 2")
            .output("sizes", "? 2")
            .graph();
        simplify(&mut graph, &BTreeMap::new(), OpenDims::Refuse).unwrap();
        let Attribute::Graph(body) = &graph.nodes[0].attributes["body"] else { panic!() };
        assert_eq!(body.input.len(), 3);
        assert_eq!(body.input[2], value("carried", DType::F32, "1 2"), "as declared");
        assert!(body.node.iter().any(|node| node.op_type() == "Shape"), "sizes grow");
        assert_eq!(graph.value(graph.outputs[0]).known_shape(), None);
    }
}
