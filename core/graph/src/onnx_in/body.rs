//! Turns a body into a separate graph.

use super::{Import, graft::invalid, order, tensors::Fault};
use crate::{
    Attribute, ExternalBase, Graph, GraphError, Initializer, Node, Tensor, ValueId, WeightData,
    external::ExternalFiles, scope::captured,
};
use std::collections::HashMap;

/// A body (of If, Loop or Scan) as a graph.
#[derive(Clone, Debug)]
pub struct Body {
    /// Its inputs are the body's inputs, then the values it captures. A captured initializer becomes an initializer
    /// of this graph, and a captured weight keeps its name from the enclosing graph. Tensors defined inside the body are
    /// constants: its weights were moved to the enclosing graph.
    pub graph: Graph,
    /// Number of the body's own inputs.
    pub formal: usize,
    /// The captured values as ids in the enclosing graph, in the order of the remaining inputs.
    pub captures: Vec<ValueId>,
}

impl Body {
    /// Forgets the shapes of its own inputs: they may change from one step of a loop to the next, whatever exporters declare.
    pub(crate) fn forget_own_shapes(&mut self) {
        for id in &self.graph.inputs[..self.formal] {
            self.graph.values[id.0 as usize].shape = None;
        }
    }
}

impl Graph {
    /// The bodies of a node that follow the format, with the types that they state and no shapes of their own inputs.
    pub fn bodies(&self, node: &Node) -> impl Iterator<Item = Body> {
        let attributes = node.attributes.iter().filter(|(_, value)| matches!(value, Attribute::Graph(_)));
        attributes.filter_map(|(name, _)| {
            let mut body = self.body(node, name).ok()?;
            body.forget_own_shapes();
            Some(body)
        })
    }

    /// The body in attribute `name` of a node of this graph.
    ///
    /// # Errors
    /// [`GraphError::Invalid`] if the attribute has no body or the body violates the format.
    pub fn body(&self, node: &Node, name: &str) -> Result<Body, GraphError> {
        let Some(Attribute::Graph(proto)) = node.attributes.get(name) else {
            return Err(GraphError::Invalid(format!("node {:?} has no body {name}", node.name)));
        };
        let graph = Graph {
            name: self.name.clone(),
            opsets: self.opsets.clone(),
            ir_version: self.ir_version,
            ..Graph::default()
        };
        let mut import = Import::resume(graph);
        let fail = |fault: Fault| invalid(node, fault);
        let outer = self.ids_by_name();
        let (mut captures, mut stored) = (Vec::new(), HashMap::new());
        let mut inputs = Vec::new();
        for name in captured(proto) {
            let Some(of_outer) = outer.get(name).copied() else { continue };
            let id = import.define(name, "captured value").map_err(fail)?;
            *import.graph.value_mut(id) = self.value(of_outer).clone();
            match self.initializers.get(&of_outer) {
                Some(initializer) => drop(stored.insert(id, initializer.clone())),
                None => {
                    captures.push(of_outer);
                    inputs.push(id);
                }
            }
        }
        for tensor in &proto.initializer {
            import.add_initializer(tensor).map_err(fail)?;
        }
        for input in &proto.input {
            let id = import.define(input.name(), "input").map_err(fail)?;
            import.set_type(id, input).map_err(fail)?;
            import.graph.inputs.push(id);
        }
        let formal = import.graph.inputs.len();
        import.graph.inputs.extend(inputs);
        for inner in proto.node.clone() {
            import.add_node(inner).map_err(fail)?;
        }
        for output in &proto.output {
            let id = import.id(output.name());
            import.set_type(id, output).map_err(fail)?;
            import.graph.outputs.push(id);
        }
        for info in &proto.value_info {
            if let Some(id) = import.ids.get(info.name()).copied() {
                import.set_type(id, info).map_err(fail)?;
            }
        }
        import.check_uses().map_err(fail)?;
        order::sort(&mut import.graph).map_err(|why| fail(Fault::Malformed(why)))?;
        // Bodies have no external data: the reader refuses it.
        let mut graph = import.place_tensors(&mut ExternalFiles::new(ExternalBase::Stripped))?;
        for initializer in graph.initializers.values_mut() {
            if let Initializer::Weight(weight) = initializer
                && let WeightData::Inline(data) = &weight.data
            {
                *initializer =
                    Initializer::Constant(Tensor::new(weight.dtype, weight.shape.clone(), data.clone())?);
            }
        }
        graph.initializers.extend(stored);
        Ok(Body { graph, formal, captures })
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        Attribute, Initializer, Tensor,
        proto::GraphProto,
        testing::{model, node, ramp, tensor, value},
    };
    use sdrun_abi::DType;

    #[test]
    fn captures_become_inputs_and_initializers() {
        let body = Attribute::Graph(Box::new(GraphProto {
            node: vec![node("Add", &["x", "w"], &["a"]), node("Reshape", &["a", "own"], &["b"])],
            initializer: vec![tensor("own", &Tensor::from_i64s(&[2]))],
            output: vec![value("b", DType::F32, "2"), value("x", DType::F32, "2")],
            value_info: vec![value("a", DType::F32, "?")],
            ..Default::default()
        }));
        let graph = model(17)
            .input("c", DType::Bool, "")
            .input("x", DType::F32, "2")
            .initializer("w", &ramp(&[2]))
            .node_with("If", &["c"], &["y", "z"], [("then_branch", body.clone()), ("else_branch", body)])
            .output("y", "2")
            .graph();
        let body = graph.body(&graph.nodes[0], "then_branch").unwrap();
        let inputs: Vec<&str> = body.graph.inputs.iter().map(|id| &*body.graph.value(*id).name).collect();
        assert_eq!((inputs, body.formal), (vec!["x"], 0));
        assert_eq!(graph.value(body.captures[0]).name, "x");
        assert_eq!(body.graph.value(body.graph.inputs[0]).known_shape(), Some(vec![2]));
        assert_eq!(body.graph.outputs[1], body.graph.inputs[0]);
        assert_eq!(body.graph.weights().map(|(name, _)| name).collect::<Vec<_>>(), ["w"]);
        assert_eq!(body.graph.value(body.graph.find("a").unwrap()).dtype, Some(DType::F32));
        let own = body.graph.find("own").unwrap();
        assert!(matches!(body.graph.initializers[&own], Initializer::Constant(_)));
        assert!(graph.body(&graph.nodes[0], "body").is_err());
    }
}
