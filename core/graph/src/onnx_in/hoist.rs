//! Weights of bodies become weights of the graph.

use super::{
    roles::{self, Role},
    tensors,
};
use crate::{
    proto::{AttributeProto, GraphProto, NodeProto, TensorProto},
    scope::{self, defined},
};
use std::collections::{HashMap, HashSet};

/// Moves the weights inside the bodies of If, Loop and Scan to the initializers of `graph`; the bodies capture them. There
/// they are listed, left out of the topology hash and refitted like any other weight.
///
/// A weight keeps its name if no other value of the model has it. Otherwise, or if a body returns the weight itself, it
/// becomes `name_1`, `name_2`, and so on. A tensor that cannot be read stays in its body.
pub(super) fn hoist_weights(graph: &mut GraphProto) {
    if graph.node.iter().flat_map(|node| &node.attribute).flat_map(bodies).next().is_none() {
        return;
    }
    let mut hoist = Hoist { names: HashMap::new(), weights: Vec::new() };
    hoist.count_names(graph);
    for node in &mut graph.node {
        hoist.node(node);
    }
    graph.initializer.append(&mut hoist.weights);
}

struct Hoist {
    /// How often each name is defined in the graph and in all bodies.
    names: HashMap<String, usize>,
    weights: Vec<TensorProto>,
}

impl Hoist {
    fn count_names(&mut self, graph: &GraphProto) {
        for name in defined(graph) {
            *self.names.entry(name.to_owned()).or_default() += 1;
        }
        for body in graph.node.iter().flat_map(|node| &node.attribute).flat_map(bodies) {
            self.count_names(body);
        }
    }

    fn node(&mut self, node: &mut NodeProto) {
        for attribute in &mut node.attribute {
            for body in attribute.g.iter_mut().map(|g| &mut **g).chain(&mut attribute.graphs) {
                self.body(body);
            }
        }
    }

    fn body(&mut self, body: &mut GraphProto) {
        let values = values_used(body);
        // An initializer that is also an input is the input's default.
        let inputs: HashSet<&str> = body.input.iter().map(|input| input.name()).collect();
        let moves = |name: &str, tensor: &TensorProto, literal: bool| {
            values.contains(name) && !inputs.contains(name) && is_weight(tensor, literal)
        };
        let (mut found, mut initializers, mut nodes) = (Vec::new(), Vec::new(), Vec::new());
        for tensor in std::mem::take(&mut body.initializer) {
            match moves(tensor.name(), &tensor, false) {
                true => found.push(tensor),
                false => initializers.push(tensor),
            }
        }
        for mut node in std::mem::take(&mut body.node) {
            match constant(&mut node) {
                Some((name, tensor)) if moves(name, tensor, true) => {
                    found.push(TensorProto { name: Some(name.to_owned()), ..std::mem::take(tensor) });
                }
                _ => nodes.push(node),
            }
        }
        (body.initializer, body.node) = (initializers, nodes);

        let mut renamed = HashMap::new();
        let mut handed_on = Vec::new();
        for mut weight in found {
            let name = weight.name().to_owned();
            let returned = body.output.iter().any(|output| output.name() == name);
            if returned || self.names.get(&name).is_some_and(|count| *count > 1) {
                let fresh = self.fresh(&name);
                weight.name = Some(fresh.clone());
                if returned {
                    // A body may return only what it computes itself.
                    handed_on.push(NodeProto {
                        op_type: Some("Identity".into()),
                        input: vec![fresh],
                        output: vec![name],
                        ..NodeProto::default()
                    });
                } else {
                    renamed.insert(name, fresh);
                }
            }
            self.weights.push(weight);
        }
        scope::rename(body, &renamed);
        body.node.splice(0..0, handed_on);
        for node in &mut body.node {
            self.node(node);
        }
    }

    /// A name derived from this one that no value has.
    fn fresh(&mut self, name: &str) -> String {
        let free = |n: &usize| !self.names.contains_key(&format!("{name}_{n}"));
        let number = (1..).find(free).unwrap_or_default();
        let fresh = format!("{name}_{number}");
        self.names.insert(fresh.clone(), 1);
        fresh
    }
}

fn bodies(attribute: &AttributeProto) -> impl Iterator<Item = &GraphProto> {
    attribute.g.iter().map(|g| &**g).chain(&attribute.graphs)
}

/// Name and tensor of a `Constant` node that holds a tensor.
fn constant(node: &mut NodeProto) -> Option<(&str, &mut TensorProto)> {
    let plain = node.op_type() == "Constant" && matches!(node.domain(), "" | "ai.onnx");
    let [attribute] = &mut *node.attribute else { return None };
    let (name, tensor) = (node.output.first()?, attribute.t.as_mut()?);
    (plain && attribute.name.as_deref() == Some("value")).then_some((name, tensor))
}

/// `literal`: whether it is the tensor of a `Constant` node.
fn is_weight(tensor: &TensorProto, literal: bool) -> bool {
    let Ok(stored) = tensors::read(tensor) else { return false };
    roles::can_be_weight(stored.dtype, &stored.shape)
        && !(literal && roles::is_literal(&stored))
        && !matches!(Role::stated(tensor), Ok(Some(Role::Constant)) | Err(_))
}

/// Names that nodes of a body, and of the bodies inside it, use for their elements, and names of its outputs.
fn values_used(body: &GraphProto) -> HashSet<String> {
    let mut values: HashSet<String> = body.output.iter().map(|output| output.name().to_owned()).collect();
    for node in &body.node {
        let domain = super::functions::domain(node.domain());
        let slots = node.input.iter().enumerate();
        let used = slots.filter(|(slot, _)| !roles::is_setting(domain, node.op_type(), *slot));
        values.extend(used.map(|(_, name)| name.clone()));
        values.extend(node.attribute.iter().flat_map(bodies).flat_map(values_used));
    }
    values
}

#[cfg(test)]
mod tests {
    use crate::{
        Attribute, ExternalBase, Graph, OpenOptions, Tensor, WeightData,
        onnx_in::tests::external,
        proto::{GraphProto, NodeProto, TensorProto},
        testing::{Model, attribute, model, node, ramp, tensor, value},
    };
    use sdrun_abi::DType;

    fn body(initializers: Vec<TensorProto>, nodes: Vec<NodeProto>, output: &str) -> Attribute {
        Attribute::Graph(Box::new(GraphProto {
            node: nodes,
            initializer: initializers,
            output: vec![value(output, DType::F32, "2")],
            ..Default::default()
        }))
    }

    fn choosing(then: Attribute, otherwise: Attribute) -> Model {
        model(17)
            .input("c", DType::Bool, "")
            .input("x", DType::F32, "2")
            .node_with("If", &["c"], &["y"], [("then_branch", then), ("else_branch", otherwise)])
            .output("y", "2")
    }

    /// `x * then_w * shared` and `x * else_w * shared`, in which both branches have weights called `w`.
    fn both(then_w: &Tensor, else_w: &Tensor) -> Model {
        let branch = |w: &Tensor, own: &str| {
            let nodes = vec![node("Mul", &["x", "w"], &["a"]), node("Mul", &["a", own], &["r"])];
            body(vec![tensor("w", w), tensor(own, &ramp(&[2]))], nodes, "r")
        };
        choosing(branch(then_w, "u"), branch(else_w, "v"))
    }

    fn weights(graph: &Graph) -> Vec<&str> {
        let mut names: Vec<&str> = graph.weights().map(|(name, _)| name).collect();
        names.sort_unstable();
        names
    }

    fn branch<'g>(graph: &'g Graph, name: &str) -> &'g GraphProto {
        let Attribute::Graph(body) = &graph.nodes[0].attributes[name] else { panic!("{name}") };
        body
    }

    #[test]
    fn weights_of_branches_are_those_of_the_graph_and_no_part_of_the_topology() {
        let file = both(&ramp(&[2]), &ramp(&[2]));
        let graph = file.graph();
        assert_eq!(weights(&graph), ["u", "v", "w_1", "w_2"]);
        let else_branch = branch(&graph, "else_branch");
        assert!(else_branch.initializer.is_empty());
        let inputs: Vec<_> = else_branch.node.iter().flat_map(|node| &node.input).collect();
        assert!(inputs.contains(&&"v".to_string()), "{inputs:?}");
        let values = Tensor::from_elements(vec![2], &[7f32, 8.0]).unwrap();
        assert_eq!(both(&values, &ramp(&[2])).graph().topology_hash(), graph.topology_hash());
        assert_ne!(
            both(&values, &ramp(&[1, 2])).graph().topology_hash(),
            graph.topology_hash(),
            "shapes of weights count"
        );
        let written = graph.to_onnx_stripped().unwrap();
        let read = Graph::from_bytes(written.into(), "written", ExternalBase::Stripped).unwrap();
        assert_eq!((weights(&read), read.topology_hash()), (weights(&graph), graph.topology_hash()));
    }

    #[test]
    fn bodies_in_bodies_and_large_constants_count_small_and_returned_ones_do_not_hide() {
        let large: Vec<f32> = (0..2048).map(|i| i as f32).collect();
        let large = Tensor::from_elements(vec![1024, 2], &large).unwrap();
        let literal = |name: &str, tensor: Tensor| NodeProto {
            attribute: vec![attribute("value", Attribute::Tensor(tensor))],
            ..node("Constant", &[], &[name])
        };
        let inner = body(
            vec![tensor("deep", &ramp(&[2])), tensor("low", &ramp(&[2]))],
            vec![
                literal("table", large.clone()),
                literal("two", ramp(&[2])),
                node("Gather", &["table", "axes"], &["g"]),
                node("Clip", &["deep", "low"], &["p"]),
                node("Mul", &["p", "two"], &["q"]),
                node("Add", &["q", "g"], &["d"]),
            ],
            "d",
        );
        let nested =
            NodeProto { attribute: vec![attribute("then_branch", inner)], ..node("If", &["c"], &["o"]) };
        let ints = tensor("axes", &Tensor::from_i64s(&[0, 1]));
        let graph = choosing(
            body(vec![ints], vec![nested], "o"),
            body(vec![tensor("returned", &ramp(&[2]))], vec![], "returned"),
        )
        .graph();
        assert_eq!(weights(&graph), ["deep", "returned_1", "table"]);
        let then = branch(&graph, "then_branch");
        assert_eq!(then.initializer[0].name(), "axes", "integers stay");
        let nested = then.node[0].attribute[0].g.as_ref().unwrap();
        let names: Vec<_> = nested.initializer.iter().map(|tensor| tensor.name()).collect();
        assert_eq!(names, ["low"], "settings stay");
        let operators: Vec<_> = nested.node.iter().map(|node| node.op_type()).collect();
        assert_eq!(operators, ["Constant", "Gather", "Clip", "Mul", "Add"], "literals stay");
        let returned = &branch(&graph, "else_branch").node[0];
        assert_eq!(
            (returned.op_type(), &*returned.input[0], &*returned.output[0]),
            ("Identity", "returned_1", "returned")
        );
    }

    #[test]
    fn weights_of_bodies_may_be_external() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("w.bin"), ramp(&[2]).data()).unwrap();
        let mut w = tensor("w", &ramp(&[2]));
        external(&mut w, "w.bin", 0);
        let then = body(vec![w], vec![node("Mul", &["x", "w"], &["r"])], "r");
        let file = choosing(then, body(vec![], vec![node("Neg", &["x"], &["r"])], "r"));
        let path = dir.path().join("m.onnx");
        std::fs::write(&path, file.bytes()).unwrap();
        let graph = Graph::open(&path, &OpenOptions::default()).unwrap();
        let (name, weight) = graph.weights().next().unwrap();
        assert!(name == "w" && matches!(weight.data, WeightData::External { .. }), "{weight:?}");
    }
}
