//! Small models for tests.

use crate::{
    Attribute, ExternalBase, Graph, GraphError, Initializer, Tensor, ValueId, eval,
    onnx_out::attribute_proto,
    proto::{
        AttributeProto, Dimension, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto,
        TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
    },
};
use prost::Message;
use sdrun_abi::DType;
use std::collections::BTreeMap;

/// A model under construction.
#[derive(Clone)]
pub(crate) struct Model(pub(crate) ModelProto);

/// An empty model of this opset.
pub(crate) fn model(opset: i64) -> Model {
    Model(ModelProto {
        ir_version: Some(8),
        opset_import: vec![import("", opset)],
        graph: Some(GraphProto { name: Some("test".into()), ..Default::default() }),
        ..Default::default()
    })
}

pub(crate) fn import(domain: &str, version: i64) -> OperatorSetIdProto {
    OperatorSetIdProto { domain: Some(domain.into()), version: Some(version) }
}

/// A typed value. `dims` holds dimensions separated by spaces: numbers, names, or `?`.
pub(crate) fn value(name: &str, dtype: DType, dims: &str) -> ValueInfoProto {
    let dim = |text: &str| match text.parse() {
        Ok(n) => Dimension { dim_value: Some(n), ..Default::default() },
        Err(_) if text == "?" => Dimension::default(),
        Err(_) => Dimension { dim_param: Some(text.into()), ..Default::default() },
    };
    let shape = TensorShapeProto { dim: dims.split_whitespace().map(dim).collect() };
    let tensor = TensorTypeProto { elem_type: Some(dtype as i32), shape: Some(shape) };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto { tensor_type: Some(tensor), ..Default::default() }),
        ..Default::default()
    }
}

/// A tensor with its bytes in `raw_data`.
pub(crate) fn tensor(name: &str, tensor: &Tensor) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        data_type: Some(tensor.dtype() as i32),
        dims: tensor.shape().iter().map(|d| *d as i64).collect(),
        raw_data: Some(tensor.data().clone()),
        ..Default::default()
    }
}

/// An f32 tensor with the elements 0, 1, 2, …
pub(crate) fn ramp(shape: &[usize]) -> Tensor {
    let values: Vec<f32> = (0..shape.iter().product()).map(|i| i as f32).collect();
    Tensor::from_elements(shape.to_vec(), &values).unwrap()
}

pub(crate) fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect();
    NodeProto { op_type: Some(op.into()), input: names(inputs), output: names(outputs), ..Default::default() }
}

pub(crate) fn attribute(name: &str, value: Attribute) -> AttributeProto {
    attribute_proto(name, &value)
}

impl Model {
    pub(crate) fn graph_mut(&mut self) -> &mut GraphProto {
        self.0.graph.as_mut().unwrap()
    }
    pub(crate) fn input(mut self, name: &str, dtype: DType, dims: &str) -> Self {
        self.graph_mut().input.push(value(name, dtype, dims));
        self
    }
    /// Adds an f32 output of this shape.
    pub(crate) fn output(mut self, name: &str, dims: &str) -> Self {
        self.graph_mut().output.push(value(name, DType::F32, dims));
        self
    }
    pub(crate) fn initializer(mut self, name: &str, value: &Tensor) -> Self {
        self.graph_mut().initializer.push(tensor(name, value));
        self
    }
    pub(crate) fn node(self, op: &str, inputs: &[&str], outputs: &[&str]) -> Self {
        self.node_with(op, inputs, outputs, [])
    }
    pub(crate) fn node_with<const N: usize>(
        mut self,
        op: &str,
        inputs: &[&str],
        outputs: &[&str],
        attributes: [(&str, Attribute); N],
    ) -> Self {
        let attributes = attributes.into_iter().map(|(name, value)| attribute(name, value)).collect();
        self.graph_mut().node.push(NodeProto { attribute: attributes, ..node(op, inputs, outputs) });
        self
    }
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.0.encode_to_vec()
    }
    pub(crate) fn read(&self) -> Result<Graph, GraphError> {
        Graph::from_bytes(self.bytes().into(), "test.onnx", ExternalBase::Stripped)
    }
    pub(crate) fn graph(&self) -> Graph {
        self.read().unwrap()
    }
    /// The message of the error that reading it returns.
    pub(crate) fn error(&self) -> String {
        self.read().unwrap_err().to_string()
    }
}

/// Computes the outputs of a graph node by node; weights must be inline.
pub(crate) fn run(graph: &Graph, inputs: &[(&str, Tensor)]) -> Vec<Tensor> {
    let mut values: BTreeMap<ValueId, Tensor> = BTreeMap::new();
    for (name, tensor) in inputs {
        values.insert(graph.find(name).unwrap(), tensor.clone());
    }
    for (id, initializer) in &graph.initializers {
        let tensor = match initializer {
            Initializer::Constant(tensor) => tensor.clone(),
            Initializer::Weight(w) => Tensor::new(w.dtype, w.shape.clone(), w.read("").unwrap()).unwrap(),
        };
        values.insert(*id, tensor);
    }
    for node in &graph.nodes {
        let inputs: Vec<Option<&Tensor>> = node.inputs.iter().map(|id| id.map(|id| &values[&id])).collect();
        let outputs = eval::evaluate(node, graph.opset(), &inputs).unwrap();
        values.extend(node.outputs.iter().zip(outputs).filter_map(|(id, tensor)| Some(((*id)?, tensor))));
    }
    graph.outputs.iter().map(|id| values[id].clone()).collect()
}
