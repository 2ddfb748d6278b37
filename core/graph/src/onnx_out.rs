//! Writes the IR as ONNX files.

use crate::{
    Attribute, Dim, Graph, GraphError, Initializer, Node, Tensor, Value, ValueId, WeightRef,
    onnx_in::roles::{ROLE_KEY, Role, can_be_weight},
    proto::{
        self, AttributeProto, Dimension, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
        StringStringEntryProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
        attribute_type as kind,
    },
};
use bytes::Bytes;
use prost::Message;
use sdrun_abi::DType;
use std::collections::{BTreeMap, HashSet};

/// Where to put the values of a weight when a graph is written.
#[derive(Clone, Debug, PartialEq)]
pub enum Placement {
    /// In another file, which the caller writes.
    External {
        /// Path relative to the model's folder.
        location: String,
        /// Byte offset.
        offset: u64,
        /// Number of bytes; must match the type and shape.
        length: u64,
    },
    /// In the model: contiguous little-endian bytes, as many as the type and shape need.
    Inline(Bytes),
}

/// Newest IR version we write: our files need nothing newer, and runtimes refuse versions they do not know. (9 added
/// the f8 types, 10 metadata on nodes; later ones added parts that we do not write.)
const NEWEST_IR: i64 = 10;

impl Graph {
    /// Encodes the graph as an ONNX `ModelProto`. `place` says where the values of each weight go, by name.
    ///
    /// Decoding the bytes gives an equal graph. Tensor metadata in the file states the roles, so the rules for
    /// foreign files do not apply.
    ///
    /// # Errors
    /// Errors of `place`; [`GraphError::Invalid`] if a placement has the wrong length or the model would exceed 2 GB,
    /// the limit of its format.
    pub fn to_onnx(
        &self,
        mut place: impl FnMut(&str, &WeightRef) -> Result<Placement, GraphError>,
    ) -> Result<Vec<u8>, GraphError> {
        let mut initializers = Vec::with_capacity(self.initializers.len());
        for (id, initializer) in &self.initializers {
            let name = &self.value(*id).name;
            initializers.push(match initializer {
                Initializer::Constant(tensor) => {
                    tensor_proto(name, tensor.dtype(), tensor.shape(), Role::Constant, tensor.data().clone())
                }
                Initializer::Weight(weight) => weight_proto(name, weight, place(name, weight)?)?,
            });
        }
        let model = self.model(initializers);
        let size = model.encoded_len();
        if size > i32::MAX as usize {
            return Err(GraphError::Invalid(format!(
                "the ONNX file would have {size} bytes, more than the 2 GB its format allows: place large weights in external data"
            )));
        }
        Ok(model.encode_to_vec())
    }

    /// Encodes the graph as an ONNX `ModelProto` without weights: each is external data with its own name as
    /// location, offset 0 and its size as length. [`ExternalBase::Stripped`](crate::ExternalBase::Stripped) reads it.
    ///
    /// # Errors
    /// [`GraphError::Invalid`] if the constants alone exceed 2 GB.
    pub fn to_onnx_stripped(&self) -> Result<Vec<u8>, GraphError> {
        self.to_onnx_without_weights(str::to_owned)
    }

    /// The same with other locations, by the names of the weights.
    ///
    /// # Errors
    /// As [`to_onnx_stripped`](Self::to_onnx_stripped).
    pub fn to_onnx_without_weights(&self, location: impl Fn(&str) -> String) -> Result<Vec<u8>, GraphError> {
        self.to_onnx(|name, weight| {
            Ok(Placement::External { location: location(name), offset: 0, length: bytes_of(name, weight)? })
        })
    }

    fn model(&self, initializer: Vec<TensorProto>) -> ModelProto {
        let borders: HashSet<ValueId> = self.inputs.iter().chain(&self.outputs).copied().collect();
        let mut input = self.value_infos(&self.inputs);
        if self.ir_version < 4 {
            // Before IR version 4 every initializer must also be listed as an input.
            let stored: Vec<ValueId> = self.initializers.keys().copied().collect();
            input.extend(self.value_infos(&stored));
        }
        let between: Vec<ValueId> = (0..self.values.len() as u32)
            .map(ValueId)
            .filter(|id| {
                !borders.contains(id)
                    && !self.initializers.contains_key(id)
                    && self.value(*id).dtype.is_some()
            })
            .collect();
        let graph = GraphProto {
            name: Some(self.name.clone()),
            node: self.nodes.iter().map(|node| self.node_proto(node)).collect(),
            initializer,
            input,
            output: self.value_infos(&self.outputs),
            value_info: self.value_infos(&between),
            ..Default::default()
        };
        let opset = |(domain, version): (&String, &i64)| OperatorSetIdProto {
            domain: Some(domain.clone()),
            version: Some(*version),
        };
        ModelProto {
            ir_version: Some(self.ir_version.min(NEWEST_IR)),
            opset_import: self.opsets.iter().map(opset).collect(),
            producer_name: Some(self.producer.clone()),
            graph: Some(graph),
            metadata_props: entries(&self.metadata),
            ..Default::default()
        }
    }

    fn value_infos(&self, ids: &[ValueId]) -> Vec<ValueInfoProto> {
        ids.iter().map(|id| value_info(self.value(*id))).collect()
    }

    fn node_proto(&self, node: &Node) -> NodeProto {
        let names = |ids: &[Option<ValueId>]| {
            ids.iter().map(|id| id.map_or(String::new(), |id| self.value(id).name.clone())).collect()
        };
        NodeProto {
            name: Some(node.name.clone()),
            domain: Some(node.domain.clone()),
            op_type: Some(node.op_type.clone()),
            input: names(&node.inputs),
            output: names(&node.outputs),
            attribute: node.attributes.iter().map(|(name, value)| attribute_proto(name, value)).collect(),
            metadata_props: entries(&node.metadata),
            ..Default::default()
        }
    }
}

/// A graph as a body, without its name and inputs; `own` says which initializers are stored in it. It states the types that are known, for
/// readers that do not infer them. Shapes may change from one step of a loop to the next.
pub(crate) fn body_proto(graph: &Graph, own: impl Fn(ValueId, &Initializer) -> bool) -> GraphProto {
    let initializer = graph.initializers.iter().filter_map(|(id, initializer)| match initializer {
        // The role keeps readers from taking it for a weight.
        Initializer::Constant(tensor) if own(*id, initializer) => {
            let (name, data) = (&graph.value(*id).name, tensor.data().clone());
            Some(tensor_proto(name, tensor.dtype(), tensor.shape(), Role::Constant, data))
        }
        _ => None,
    });
    let made = graph.nodes.iter().flat_map(|node| &node.outputs).filter_map(|id| *id);
    let made = made.filter(|id| graph.value(*id).dtype.is_some() && !graph.outputs.contains(id));
    GraphProto {
        node: graph.nodes.iter().map(|node| graph.node_proto(node)).collect(),
        initializer: initializer.collect(),
        output: graph.value_infos(&graph.outputs),
        value_info: made.map(|id| value_info(&Value { shape: None, ..graph.value(id).clone() })).collect(),
        ..Default::default()
    }
}

fn bytes_of(name: &str, weight: &WeightRef) -> Result<u64, GraphError> {
    let bytes = weight.dtype.bytes_of(&weight.shape);
    bytes
        .map(|n| n as u64)
        .ok_or_else(|| GraphError::Invalid(format!("weight {name:?} is too large: {:?}", weight.shape)))
}

fn weight_proto(name: &str, weight: &WeightRef, placement: Placement) -> Result<TensorProto, GraphError> {
    let expected = bytes_of(name, weight)?;
    let given = match &placement {
        Placement::External { length, .. } => *length,
        Placement::Inline(data) => data.len() as u64,
    };
    if given != expected {
        return Err(GraphError::Invalid(format!(
            "weight {name:?} is placed in {given} bytes, but {} {:?} needs {expected}",
            weight.dtype, weight.shape
        )));
    }
    Ok(match placement {
        Placement::Inline(data) => tensor_proto(name, weight.dtype, &weight.shape, Role::Weight, data),
        Placement::External { location, offset, length } => TensorProto {
            raw_data: None,
            data_location: Some(proto::EXTERNAL),
            external_data: vec![
                // MIGraphX reads these by position: location, offset, length.
                entry("location", location),
                entry("offset", offset.to_string()),
                entry("length", length.to_string()),
            ],
            ..tensor_proto(name, weight.dtype, &weight.shape, Role::Weight, Bytes::new())
        },
    })
}

fn tensor_proto(name: &str, dtype: DType, shape: &[usize], role: Role, data: Bytes) -> TensorProto {
    // Other tensors are constants, whatever the file says.
    let ambiguous = can_be_weight(dtype, shape);
    TensorProto {
        name: Some(name.to_owned()),
        data_type: Some(dtype as i32),
        dims: shape.iter().map(|d| *d as i64).collect(),
        raw_data: Some(data),
        metadata_props: if ambiguous { vec![entry(ROLE_KEY, role.name())] } else { Vec::new() },
        ..Default::default()
    }
}

fn entry(key: &str, value: impl Into<String>) -> StringStringEntryProto {
    StringStringEntryProto { key: Some(key.to_owned()), value: Some(value.into()) }
}

fn entries(map: &BTreeMap<String, String>) -> Vec<StringStringEntryProto> {
    map.iter().map(|(key, value)| entry(key, value)).collect()
}

fn value_info(value: &Value) -> ValueInfoProto {
    let dimension = |dim: &Dim| match dim {
        Dim::Known(n) => Dimension { dim_value: Some(*n as i64), ..Default::default() },
        Dim::Symbol(name) => Dimension { dim_param: Some(name.clone()), ..Default::default() },
        Dim::Unknown => Dimension::default(),
    };
    let tensor_type = value.dtype.map(|dtype| TensorTypeProto {
        elem_type: Some(dtype as i32),
        shape: value
            .shape
            .as_ref()
            .map(|dims| TensorShapeProto { dim: dims.iter().map(dimension).collect() }),
    });
    ValueInfoProto {
        name: Some(value.name.clone()),
        r#type: tensor_type
            .map(|tensor_type| TypeProto { tensor_type: Some(tensor_type), ..Default::default() }),
        ..Default::default()
    }
}

/// Encodes an attribute.
pub(crate) fn attribute_proto(name: &str, attribute: &Attribute) -> AttributeProto {
    let empty = AttributeProto { name: Some(name.to_owned()), ..Default::default() };
    let bytes = |s: &Vec<u8>| Bytes::from(s.clone());
    match attribute {
        Attribute::Int(i) => AttributeProto { r#type: Some(kind::INT), i: Some(*i), ..empty },
        Attribute::Ints(ints) => AttributeProto { r#type: Some(kind::INTS), ints: ints.clone(), ..empty },
        Attribute::Float(f) => AttributeProto { r#type: Some(kind::FLOAT), f: Some(*f), ..empty },
        Attribute::Floats(floats) => {
            AttributeProto { r#type: Some(kind::FLOATS), floats: floats.clone(), ..empty }
        }
        Attribute::String(s) => AttributeProto { r#type: Some(kind::STRING), s: Some(bytes(s)), ..empty },
        Attribute::Strings(strings) => AttributeProto {
            r#type: Some(kind::STRINGS),
            strings: strings.iter().map(bytes).collect(),
            ..empty
        },
        Attribute::Tensor(tensor) => {
            AttributeProto { r#type: Some(kind::TENSOR), t: Some(literal(tensor)), ..empty }
        }
        Attribute::Graph(body) => {
            AttributeProto { r#type: Some(kind::GRAPH), g: Some(body.clone()), ..empty }
        }
        Attribute::Other(other) => AttributeProto { name: Some(name.to_owned()), ..(**other).clone() },
    }
}

fn literal(tensor: &Tensor) -> TensorProto {
    TensorProto {
        data_type: Some(tensor.dtype() as i32),
        dims: tensor.shape().iter().map(|d| *d as i64).collect(),
        raw_data: Some(tensor.data().clone()),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ExternalBase, WeightData,
        passes::compact,
        testing::{Model, model, ramp},
    };
    use proptest::prelude::*;

    fn read(bytes: Vec<u8>) -> Graph {
        Graph::from_bytes(bytes.into(), "written", ExternalBase::Stripped).unwrap()
    }

    fn inline(graph: &Graph) -> Vec<u8> {
        graph.to_onnx(|name, weight| Ok(Placement::Inline(weight.read(name)?))).unwrap()
    }

    /// Brings the values into canonical order.
    fn canonical(mut graph: Graph) -> Graph {
        compact(&mut graph);
        graph
    }

    fn sample() -> Model {
        let mut file = model(17)
            .input("x", DType::F32, "batch ? 2")
            .input("scalar", DType::I64, "")
            .initializer("w", &ramp(&[2, 3]))
            .initializer("scales", &ramp(&[4]))
            .initializer("axes", &Tensor::from_i64s(&[0]))
            .node_with(
                "Constant",
                &[],
                &["literal"],
                [("value_floats", Attribute::Floats(vec![1.0, 2.0, 3.0]))],
            )
            .node("MatMul", &["x", "w"], &["xw"])
            .node_with(
                "Resize",
                &["xw", "", "scales"],
                &["r", ""],
                [
                    ("mode", Attribute::String(b"nearest".to_vec())),
                    ("many", Attribute::Ints(vec![-1, 2])),
                    ("tensor", Attribute::Tensor(ramp(&[2]))),
                ],
            )
            .node("Add", &["r", "literal"], &["y"])
            .output("y", "batch ? 3");
        file.0.metadata_props = vec![entry("key", "value")];
        file.graph_mut().node[1].metadata_props = vec![entry("scope", "fc")];
        file.graph_mut().value_info.push(crate::testing::value("xw", DType::F32, "batch ? 3"));
        file
    }

    #[test]
    fn writing_and_reading_gives_the_same_graph() {
        let graph = sample().graph();
        assert_eq!(canonical(read(inline(&graph))), canonical(graph));
    }

    #[test]
    fn roles_survive() {
        let mut graph = sample().graph();
        // Mimics a pass that created a large constant and left a weight used only as a setting.
        let literal = graph.find("literal").unwrap();
        graph.initializers.insert(literal, Initializer::Constant(ramp(&[5000])));
        graph.value_mut(literal).shape = Some(vec![Dim::Known(5000)]);
        let scales = graph.find("scales").unwrap();
        let weight = WeightRef {
            dtype: DType::F32,
            shape: vec![4],
            data: WeightData::Inline(ramp(&[4]).data().clone()),
        };
        graph.initializers.insert(scales, Initializer::Weight(weight));
        assert_eq!(canonical(read(inline(&graph))), canonical(graph));
    }

    #[test]
    fn stripped_models_name_their_weights() {
        let graph = sample().graph();
        let bytes = graph.to_onnx_stripped().unwrap();
        let proto = ModelProto::decode(&*bytes).unwrap().graph.unwrap();
        let stored = proto.initializer.iter().find(|t| t.name() == "w").unwrap();
        let pairs: Vec<_> = stored.external_data.iter().map(|e| (e.key(), e.value())).collect();
        assert_eq!(pairs, [("location", "w"), ("offset", "0"), ("length", "24")]);
        assert_eq!((stored.data_location, &stored.raw_data), (Some(proto::EXTERNAL), &None));

        let again = read(bytes);
        let absent = WeightData::Absent { location: "w".into(), offset: 0 };
        assert_eq!(again.weights().map(|(name, w)| (name, &w.data)).collect::<Vec<_>>(), [("w", &absent)]);
        assert_eq!(again.topology_hash(), graph.topology_hash());
    }

    #[test]
    fn old_versions_list_initializers_as_inputs() {
        let mut graph = sample().graph();
        graph.ir_version = 3;
        let proto = ModelProto::decode(&*inline(&graph)).unwrap().graph.unwrap();
        let mut inputs: Vec<&str> = proto.input.iter().map(|i| i.name()).collect();
        inputs.sort_unstable();
        assert_eq!(inputs, ["axes", "literal", "scalar", "scales", "w", "x"]);
        assert_eq!(canonical(read(inline(&graph))), canonical(graph));
    }

    #[test]
    fn placements_must_fit() {
        let graph = sample().graph();
        let short = graph.to_onnx(|_, _| Ok(Placement::Inline(Bytes::from_static(b"1234"))));
        assert!(short.unwrap_err().to_string().contains("\"w\" is placed in 4 bytes"));
        let long =
            graph.to_onnx(|_, _| Ok(Placement::External { location: "w".into(), offset: 0, length: 25 }));
        assert!(long.unwrap_err().to_string().contains("needs 24"));
        let refused = graph.to_onnx(|name, _| Err(GraphError::Invalid(format!("no {name}"))));
        assert_eq!(refused, Err(GraphError::Invalid("no w".into())));
    }

    #[test]
    fn two_gigabytes_are_refused_before_they_are_written() {
        let mut graph = sample().graph();
        // One buffer backs many weights, so the test needs little memory.
        let data = Bytes::from(vec![0u8; 1 << 20]);
        for i in 0..2100 {
            let shape = vec![1 << 18];
            let id = graph.add_value(Value { name: format!("big{i}"), dtype: Some(DType::F32), shape: None });
            let weight = WeightRef { dtype: DType::F32, shape, data: WeightData::Inline(data.clone()) };
            graph.initializers.insert(id, Initializer::Weight(weight));
        }
        let error = graph.to_onnx(|name, weight| Ok(Placement::Inline(weight.read(name)?))).unwrap_err();
        assert!(error.to_string().contains("2 GB"), "{error}");
        assert!(graph.to_onnx_stripped().is_ok());
    }

    proptest! {
        /// Chains of nodes over random earlier values, with random types, shapes and roles of initializers.
        #[test]
        fn random_graphs_survive(
            stored in prop::collection::vec((0..4u8, prop::collection::vec(0..4usize, 0..3)), 1..6),
            wiring in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..12),
            opset in 7..=28i64,
            ir in 3..=14i64,
        ) {
            let mut file = model(opset).input("v0", DType::F32, "n 2");
            file.0.ir_version = Some(ir);
            for (i, (kind, shape)) in stored.iter().enumerate() {
                let n: usize = shape.iter().product();
                let tensor = match kind {
                    0 => ramp(shape),
                    1 => Tensor::new(DType::F16, shape.clone(), vec![1u8; 2 * n]).unwrap(),
                    2 => Tensor::new(DType::Bool, shape.clone(), vec![1u8; n]).unwrap(),
                    _ => Tensor::new(DType::I64, shape.clone(), vec![3u8; 8 * n]).unwrap(),
                };
                file = file.initializer(&format!("v{}", i + 1), &tensor);
            }
            let first = stored.len() + 1;
            for (i, (a, b)) in wiring.iter().enumerate() {
                let pick = |index: &prop::sample::Index| format!("v{}", index.index(first + i));
                file = file.node("Op", &[&pick(a), "", &pick(b)], &[&format!("v{}", first + i)]);
            }
            let graph = file.output(&format!("v{}", first + wiring.len() - 1), "?").graph();
            let expected = Graph { ir_version: graph.ir_version.min(NEWEST_IR), ..graph.clone() };
            prop_assert_eq!(canonical(read(inline(&graph))), canonical(expected));
            let stripped = read(graph.to_onnx_stripped().unwrap());
            prop_assert_eq!(stripped.topology_hash(), graph.topology_hash());
            prop_assert_eq!(canonical(read(stripped.to_onnx_stripped().unwrap())), canonical(stripped));
        }
    }
}
