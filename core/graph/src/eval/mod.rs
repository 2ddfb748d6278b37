//! Evaluation of single ONNX nodes on host tensors.

use crate::{Node, Tensor};

/// Why a node cannot be evaluated.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum EvalError {
    /// An operator, attribute or element type that is not covered.
    #[error("operator {op} cannot be evaluated on the host: {why}")]
    Unsupported {
        /// Operator name.
        op: String,
        /// What about it.
        why: String,
    },
    /// Inputs or attributes against the operator's definition.
    #[error("{0}")]
    Invalid(String),
}

/// Computes one node.
pub fn evaluate(node: &Node, _opset: i64, _inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, EvalError> {
    Err(EvalError::Unsupported { op: node.op_type.clone(), why: "not implemented yet".into() })
}

/// Whether the operator is covered.
pub fn supports(_node: &Node, _opset: i64) -> bool {
    false
}
