//! The input of a kernel, and its errors.

use crate::infer::{Ctx, Fact, dims};
use crate::{GraphError, Node, Tensor};
use sdrun_abi::DType;

/// Why a kernel fails; the caller adds the node's name.
#[derive(Debug)]
pub(super) enum Fault {
    Invalid(String),
    Unsupported(String),
}

impl From<String> for Fault {
    fn from(e: String) -> Self {
        Fault::Invalid(e)
    }
}

impl From<&str> for Fault {
    fn from(e: &str) -> Self {
        Fault::Invalid(e.into())
    }
}

impl From<GraphError> for Fault {
    fn from(e: GraphError) -> Self {
        Fault::Invalid(e.to_string())
    }
}

/// The outputs of a node.
pub(super) type Outputs = Result<Vec<Tensor>, Fault>;

/// A node to compute. Its inputs have passed the operator's inference rule.
pub(super) struct Call<'a> {
    pub(super) ctx: Ctx<'a>,
    pub(super) inputs: &'a [Option<&'a Tensor>],
    /// Types and shapes of the outputs, from the inference rule.
    pub(super) outputs: Vec<Fact>,
}

impl<'a> Call<'a> {
    pub(super) fn node(&self) -> &'a Node {
        self.ctx.node
    }
    pub(super) fn opset(&self) -> i64 {
        self.ctx.opset
    }
    /// A required input.
    pub(super) fn input(&self, i: usize) -> Result<&'a Tensor, Fault> {
        self.opt(i).ok_or_else(|| format!("required input {i} is missing").into())
    }
    /// An optional input.
    pub(super) fn opt(&self, i: usize) -> Option<&'a Tensor> {
        self.inputs.get(i).copied().flatten()
    }
    /// All elements of an integer input.
    pub(super) fn ints(&self, i: usize) -> Result<Vec<i64>, Fault> {
        self.input(i)?.to_i64s().ok_or_else(|| format!("input {i} must hold integers").into())
    }
    /// The single element of an integer input.
    pub(super) fn int(&self, i: usize) -> Result<i64, Fault> {
        match self.ints(i)?.as_slice() {
            [v] => Ok(*v),
            _ => Err(format!("input {i} must have one element").into()),
        }
    }
    /// Attribute `name` as an axis of an input with `rank` dimensions.
    pub(super) fn axis(&self, name: &str, default: i64, rank: usize) -> Result<usize, Fault> {
        Ok(dims::axis(self.node().int_or(name, default), rank)?)
    }
    /// Shape of output `i`.
    pub(super) fn out_shape(&self, i: usize) -> Result<Vec<usize>, Fault> {
        let shape = self.outputs.get(i).and_then(Fact::known_shape);
        shape.ok_or_else(|| Fault::Unsupported(format!("the shape of output {i} cannot be inferred")))
    }
    /// Element type of output `i`.
    pub(super) fn out_dtype(&self, i: usize) -> Result<DType, Fault> {
        let dtype = self.outputs.get(i).and_then(|f| f.dtype);
        dtype.ok_or_else(|| Fault::Unsupported(format!("the element type of output {i} is not supported")))
    }
    /// Whether output `i` is used.
    pub(super) fn wants(&self, i: usize) -> bool {
        self.node().output(i).is_some()
    }
    /// A string attribute that names one of the operator's modes.
    pub(super) fn mode(&self, name: &str, default: &'a str) -> &'a str {
        self.node().str(name).unwrap_or(default)
    }
}

/// The error for an element type that a kernel does not support.
pub(super) fn bad_dtype(dtype: DType) -> Fault {
    Fault::Unsupported(format!("element type {dtype} is not supported"))
}
