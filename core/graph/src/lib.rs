//! ONNX input and output, and the steps between them: a typed IR, shape inference, evaluation on the host,
//! simplification, and the topology hash, which identifies a graph independently of its weights.
//!
//! | module | holds |
//! |---|---|
//! | [`ir`] | [`Graph`] and its parts; [`Tensor`] beside it |
//! | `onnx_in`, `external` | [`Graph::open`], [`Graph::from_bytes`]: files into the IR, with path checks on external data |
//! | `onnx_out` | [`Graph::to_onnx`], [`Graph::to_onnx_stripped`]: the IR into files |
//! | `bind` | [`Graph::bind`]: sizes for open dimensions |
//! | [`infer`] | element types and shapes of all values |
//! | [`eval`] | single operators on host tensors |
//! | [`passes`] | [`simplify()`], [`passes::optimize`], and the passes they run |
//! | `footprint` | [`footprint()`]: the memory that a graph needs |
//! | `divide` | [`Graph::divide`]: what depends only on inputs that seldom change, and the rest |
//! | [`fused`] | operators that passes merge nodes into |
//! | `hash` | [`Graph::topology_hash`] |
//! | [`proto`] | the protobuf messages of the file format |
//!
//! An initializer has one of two roles. An [`Initializer::Constant`] belongs to the topology: it is folded, hashed
//! and written with the graph. An [`Initializer::Weight`] is a named slot for values that arrive later. This crate
//! never looks at those values: opening a model checks the files that hold them but does not read them.
//!
//! ```
//! use sdrun_graph::{ExternalBase, Graph, OpenDims, simplify};
//! use std::collections::BTreeMap;
//!
//! # use sdrun_graph::proto::*;
//! # use prost::Message as _;
//! # fn value(name: &str, dims: &[&str]) -> ValueInfoProto {
//! #     let dim = |d: &&str| match d.parse() {
//! #         Ok(n) => Dimension { dim_value: Some(n), ..Default::default() },
//! #         Err(_) => Dimension { dim_param: Some(d.to_string()), ..Default::default() },
//! #     };
//! #     let shape = Some(TensorShapeProto { dim: dims.iter().map(dim).collect() });
//! #     let tensor_type = Some(TensorTypeProto { elem_type: Some(1), shape });
//! #     let r#type = Some(TypeProto { tensor_type, ..Default::default() });
//! #     ValueInfoProto { name: Some(name.into()), r#type, ..Default::default() }
//! # }
//! # fn node(op: &str, input: &[&str], output: &str) -> NodeProto {
//! #     let input = input.iter().map(|s| s.to_string()).collect();
//! #     NodeProto { op_type: Some(op.into()), input, output: vec![output.into()], ..Default::default() }
//! # }
//! # let weight = TensorProto { name: Some("w".into()), data_type: Some(1), dims: vec![4],
//! #     raw_data: Some(vec![0; 16].into()), ..Default::default() };
//! # let model = ModelProto {
//! #     ir_version: Some(8),
//! #     opset_import: vec![OperatorSetIdProto { domain: None, version: Some(17) }],
//! #     graph: Some(GraphProto {
//! #         node: vec![node("Mul", &["x", "w"], "m"), node("Shape", &["x"], "s"), node("Reshape", &["m", "s"], "y")],
//! #         initializer: vec![weight],
//! #         input: vec![value("x", &["batch", "4"])],
//! #         output: vec![value("y", &["batch", "4"])],
//! #         ..Default::default()
//! #     }),
//! #     ..Default::default()
//! # };
//! # let bytes = model.encode_to_vec();
//! // A model: y = reshape(x * w, shape(x)), with an open batch. A file is opened with `Graph::open`.
//! let mut graph = Graph::from_bytes(bytes.into(), "model.onnx", ExternalBase::Stripped)?;
//! assert_eq!(graph.nodes.len(), 3);
//!
//! let shapes = BTreeMap::from([("x".to_owned(), vec![2, 4])]);
//! let report = simplify(&mut graph, &shapes, OpenDims::Refuse)?;
//! assert_eq!(report.nodes_after, 1); // The reshape is a no-op once the shape of x is bound.
//! assert_eq!(graph.value(graph.outputs[0]).known_shape(), Some(vec![2, 4]));
//!
//! // Providers receive the graph without the values of its weights.
//! let weightless = Graph::from_bytes(graph.to_onnx_stripped()?.into(), "stripped", ExternalBase::Stripped)?;
//! assert_eq!(weightless.topology_hash(), graph.topology_hash());
//! # Ok::<(), sdrun_graph::GraphError>(())
//! ```

mod bind;
mod divide;
mod error;
pub mod eval;
mod external;
mod footprint;
pub mod fused;
mod hash;
pub mod infer;
pub mod ir;
mod onnx_in;
mod onnx_out;
mod part;
pub mod passes;
pub mod proto;
pub mod recurrent;
mod scope;
mod tensor;
#[cfg(test)]
mod testing;

pub use bind::OpenDims;
pub use divide::{Cost, Division, Load};
pub use error::GraphError;
pub use external::{ExternalBase, OpenOptions, WeightsPolicy};
pub use footprint::{Footprint, footprint};
pub use ir::{Attribute, Dim, Graph, Initializer, Node, Value, ValueId, WeightData, WeightRef};
pub use onnx_in::{Body, IR_VERSIONS, OPSETS};
pub use onnx_out::Placement;
pub use passes::{SimplifyReport, simplify};
pub use tensor::{Element, Tensor};
