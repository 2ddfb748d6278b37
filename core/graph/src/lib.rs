//! ONNX in and out, and what stands between: a typed IR, shape inference, evaluation on the host,
//! simplification, and the topology hash that names an engine whatever weights it is given.

mod error;
pub mod eval;
pub mod infer;
pub mod ir;
pub mod proto;
mod tensor;

pub use error::GraphError;
pub use ir::{Attribute, Dim, Graph, Initializer, Node, Value, ValueId, WeightData, WeightRef};
pub use tensor::{Element, Tensor};
