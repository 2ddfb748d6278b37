//! ONNX models made by hand.

use prost::Message;
use sdrun::{
    Model,
    abi::DType,
    graph::proto::{
        AttributeProto, Dimension, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto,
        TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto, attribute_type as kind,
    },
};
use std::path::Path;

/// An input or output.
pub fn typed(name: &str, dtype: DType, dims: &[usize]) -> ValueInfoProto {
    let dim = |d: &usize| Dimension { dim_value: Some(*d as i64), ..Default::default() };
    let shape = TensorShapeProto { dim: dims.iter().map(dim).collect() };
    let tensor = TensorTypeProto { elem_type: Some(dtype as i32), shape: Some(shape) };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto { tensor_type: Some(tensor), ..Default::default() }),
        ..Default::default()
    }
}

/// An initializer of any type.
pub fn stored(name: &str, dtype: DType, dims: &[usize], bytes: Vec<u8>) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        data_type: Some(dtype as i32),
        dims: dims.iter().map(|d| *d as i64).collect(),
        raw_data: Some(bytes.into()),
        ..Default::default()
    }
}

/// An initializer in f32.
pub fn floats(name: &str, dims: &[usize], values: &[f32]) -> TensorProto {
    stored(name, DType::F32, dims, values.iter().flat_map(|v| v.to_le_bytes()).collect())
}

/// A node with one output.
pub fn node(op: &str, inputs: &[&str], output: &str, attribute: Vec<AttributeProto>) -> NodeProto {
    NodeProto {
        op_type: Some(op.into()),
        name: Some(format!("/{op}_{output}")),
        input: inputs.iter().map(|name| name.to_string()).collect(),
        output: vec![output.into()],
        attribute,
        ..Default::default()
    }
}

/// An attribute that is a graph.
pub fn body(name: &str, graph: GraphProto) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(kind::GRAPH),
        g: Some(Box::new(GraphProto { name: Some(name.into()), ..graph })),
        ..Default::default()
    }
}

/// An attribute that is a list of integers.
pub fn ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(kind::INTS),
        ints: values.to_vec(),
        ..Default::default()
    }
}

/// An attribute that is an integer.
pub fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto { name: Some(name.into()), r#type: Some(kind::INT), i: Some(value), ..Default::default() }
}

/// An attribute that is a text.
pub fn text(name: &str, value: &str) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(kind::STRING),
        s: Some(value.as_bytes().to_vec().into()),
        ..Default::default()
    }
}

/// The file of a graph, in this version of the operators.
pub fn encoded(graph: GraphProto, opset: i64) -> Vec<u8> {
    let opset = OperatorSetIdProto { domain: Some(String::new()), version: Some(opset) };
    let graph = GraphProto { name: Some("test".into()), ..graph };
    ModelProto { ir_version: Some(8), opset_import: vec![opset], graph: Some(graph), ..Default::default() }
        .encode_to_vec()
}

/// Writes a graph of version 17 and opens it.
///
/// # Panics
/// If it cannot be written or is not valid.
#[must_use]
pub fn write(path: &Path, graph: GraphProto) -> Model {
    let written = std::fs::write(path, encoded(graph, 17));
    written.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    Model::open(path).unwrap_or_else(|e| panic!("{e}"))
}

/// Numbers in [-1, 1) that are the same in every run.
pub fn noise(n: usize, seed: u64) -> Vec<f32> {
    let number = |i: u64| {
        let mut z = (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (seed << 32);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((z >> 40) as f32) / (1 << 23) as f32 - 1.0
    };
    (0..n as u64).map(number).collect()
}
