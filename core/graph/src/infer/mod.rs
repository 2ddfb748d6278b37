//! Type and shape inference.
//!
//! Each operator has one rule. It infers the outputs from the inputs and refuses what contradicts the operator's
//! definition. [`crate::eval`] uses the same rules for validation and output shapes. The definitions are those of
//! <https://onnx.ai/onnx/operators/>, for the versions in [`OPSETS`](crate::OPSETS).

mod context;
pub(crate) mod dims;
mod driver;
pub(crate) mod einsum;
mod partial;
pub(crate) mod resize;
mod rules;
pub(crate) mod slice;
#[cfg(test)]
mod tests;
pub(crate) mod window;

pub(crate) use context::Ctx;
pub(crate) use driver::{describe, outputs_by_rule};
pub use driver::{infer_shapes, node_outputs};
pub use partial::PartialInt;
pub(crate) use rules::{layout, reduce};

use crate::{Dim, Tensor};
use sdrun_abi::DType;

/// What is known about a value before the graph runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fact {
    /// Element type, if known.
    pub dtype: Option<DType>,
    /// Shape, if the rank is known.
    pub shape: Option<Vec<Dim>>,
    /// All elements, if the value is constant and small enough to carry.
    pub value: Option<Tensor>,
    /// Elements, in order, of a small integer tensor (a shape under construction) that is only partly known.
    pub elements: Option<Vec<PartialInt>>,
}

impl Fact {
    /// A fact with only a type and a shape.
    pub fn new(dtype: Option<DType>, shape: Option<Vec<Dim>>) -> Self {
        Fact { dtype, shape, value: None, elements: None }
    }
    /// The full fact about a constant.
    pub fn constant(value: Tensor) -> Self {
        let mut fact = Self::typed(&value);
        fact.value = Some(value);
        fact
    }
    /// The type and shape of a tensor.
    pub fn typed(tensor: &Tensor) -> Self {
        Self::new(Some(tensor.dtype()), Some(dims::known(tensor.shape())))
    }
    /// The shape, if every dimension is known.
    pub fn known_shape(&self) -> Option<Vec<usize>> {
        self.shape.as_ref()?.iter().map(Dim::known).collect()
    }
}

#[cfg(test)]
pub(crate) fn has_rule(op_type: &str) -> bool {
    rules::find(op_type).is_some()
}
