//! Evaluation of single ONNX nodes on host tensors.
//!
//! An interpreter that favours correctness: f16, bf16 and f8 are computed in f32 and rounded once, and sums use f64
//! if that costs nothing. The operator's inference rule checks each node first and supplies the output shapes.

mod activation;
mod attention;
mod binary;
mod call;
mod cast;
mod conv;
mod conv_transpose;
mod create;
mod einsum;
mod f8;
mod gather;
mod kernels;
mod layout;
mod matmul;
mod norm;
mod number;
mod pool;
mod quantize;
mod recurrent;
mod reduce;
mod resize;
#[cfg(test)]
mod robustness;
mod rotary;
mod sample;
mod scatter;
mod search;
mod softmax;
mod strided;
#[cfg(test)]
mod testing;
mod unary;
mod work;

use crate::infer::{Ctx, Fact, describe, outputs_by_rule};
use crate::{GraphError, Node, OPSETS, Tensor, fused, recurrent::MICROSOFT};
use call::{Call, Fault};
pub use resize::{Interpolation, Taps, interpolation};
pub use work::is_long;
pub(crate) use work::{count, work};

/// Maximum number of elements of an output. A larger one is a mistake or an attack.
const OUTPUT_LIMIT: usize = 1 << 30;

/// Why a node cannot be evaluated.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum EvalError {
    /// An unsupported operator, attribute or element type.
    #[error("operator {op} cannot be evaluated on the host: {why}")]
    Unsupported {
        /// Operator name with its operator set version.
        op: String,
        /// Why it is unsupported.
        why: String,
    },
    /// Inputs or attributes that contradict the operator's definition.
    #[error("{0}")]
    Invalid(String),
}

/// Computes the outputs of one node, in the order of `node.outputs`.
///
/// `inputs[i]` is `None` if optional input `i` is absent. `opset` is the version of the node's operator set, one of
/// [`OPSETS`]. Random operators and control flow are not supported.
pub fn evaluate(node: &Node, opset: i64, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, EvalError> {
    if fused::is_fused(node) {
        return fused::evaluate_node(node, inputs);
    }
    let unsupported = |why: String| EvalError::Unsupported { op: format!("{}-{opset}", node.op_type), why };
    let Some(kernel) = find(node, opset) else {
        return Err(unsupported("it is not implemented".into()));
    };
    let facts: Vec<Option<Fact>> = inputs.iter().map(|t| t.map(|t| Fact::constant(t.clone()))).collect();
    let ctx = Ctx { node, opset, inputs: &facts };
    let outputs = match outputs_by_rule(&ctx) {
        Ok(Some(outputs)) => outputs,
        Ok(None) => return Err(unsupported("it is not implemented".into())),
        Err(GraphError::Invalid(e)) => return Err(EvalError::Invalid(e)),
        Err(e) => return Err(EvalError::Invalid(e.to_string())),
    };
    for fact in &outputs {
        if let Some(shape) = fact.known_shape()
            && shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).is_none_or(|n| n > OUTPUT_LIMIT)
        {
            return Err(unsupported(format!("an output of shape {shape:?} is too large")));
        }
    }
    // A kernel would loop over the other dimensions of an empty tensor, which may be huge.
    let empty = |fact: &Fact| {
        let shape = fact.known_shape().filter(|shape| shape.contains(&0))?;
        Tensor::new(fact.dtype?, shape, Vec::new()).ok()
    };
    let empty: Option<Vec<Tensor>> = outputs.iter().map(empty).collect();
    let call = Call { ctx, inputs, outputs };
    let mut values = match empty.filter(|tensors| !tensors.is_empty()) {
        Some(tensors) => tensors,
        None => kernel(&call).map_err(|fault| match fault {
            Fault::Invalid(e) => EvalError::Invalid(format!("{}: {e}", describe(node))),
            Fault::Unsupported(why) => unsupported(why),
        })?,
    };
    if values.len() < node.outputs.len() {
        return Err(unsupported(format!("output {} is not computed", values.len())));
    }
    values.truncate(node.outputs.len());
    Ok(values)
}

/// Whether [`evaluate`] implements the operator. It may still refuse some attributes and element types.
pub fn supports(node: &Node, opset: i64) -> bool {
    fused::is_fused(node) || find(node, opset).is_some()
}

fn find(node: &Node, opset: i64) -> Option<kernels::Kernel> {
    match node.domain.as_str() {
        "" | "ai.onnx" if OPSETS.contains(&opset) => kernels::find(&node.op_type),
        MICROSOFT => kernels::find_microsoft(&node.op_type),
        _ => None,
    }
}
