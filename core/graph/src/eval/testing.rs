//! Shorthand for the kernels' tests.

use super::{EvalError, evaluate};
use crate::{Attribute, Node, Tensor, ValueId};

/// A node under test.
pub(super) struct Op {
    node: Node,
    opset: i64,
}

impl Op {
    pub(super) fn new(op_type: &str) -> Self {
        let node = Node {
            name: "test".into(),
            domain: String::new(),
            op_type: op_type.into(),
            inputs: vec![],
            outputs: vec![Some(ValueId(0))],
            attributes: Default::default(),
            metadata: Default::default(),
        };
        Op { node, opset: 22 }
    }
    pub(super) fn opset(mut self, opset: i64) -> Self {
        self.opset = opset;
        self
    }
    pub(super) fn attribute(mut self, name: &str, value: Attribute) -> Self {
        self.node.attributes.insert(name.into(), value);
        self
    }
    pub(super) fn int(self, name: &str, value: i64) -> Self {
        self.attribute(name, Attribute::Int(value))
    }
    pub(super) fn ints(self, name: &str, value: &[i64]) -> Self {
        self.attribute(name, Attribute::Ints(value.to_vec()))
    }
    pub(super) fn float(self, name: &str, value: f32) -> Self {
        self.attribute(name, Attribute::Float(value))
    }
    pub(super) fn str(self, name: &str, value: &str) -> Self {
        self.attribute(name, Attribute::String(value.as_bytes().to_vec()))
    }
    pub(super) fn outputs(mut self, n: u32) -> Self {
        self.node.outputs = (0..n).map(|i| Some(ValueId(i))).collect();
        self
    }
    pub(super) fn try_run(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>, EvalError> {
        self.try_run_optional(&inputs.iter().map(|t| Some(*t)).collect::<Vec<_>>())
    }
    pub(super) fn try_run_optional(&self, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, EvalError> {
        evaluate(&self.node, self.opset, inputs)
    }
    /// The first output.
    pub(super) fn run(&self, inputs: &[&Tensor]) -> Tensor {
        self.try_run(inputs).unwrap().swap_remove(0)
    }
}

pub(super) fn f32s(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_elements(shape.to_vec(), values).unwrap()
}

pub(super) fn i64s(shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::from_elements(shape.to_vec(), values).unwrap()
}

/// Same type and shape, elements within 1e-6 of the larger magnitude (or of one).
pub(super) fn assert_close(actual: &Tensor, expected: &Tensor) {
    assert_eq!((actual.dtype(), actual.shape()), (expected.dtype(), expected.shape()));
    let (a, e) = (actual.to_f32s().unwrap(), expected.to_f32s().unwrap());
    for (i, (x, y)) in a.iter().zip(&e).enumerate() {
        assert!((x - y).abs() <= 1e-6 * y.abs().max(1.0), "element {i}: {x} instead of {y} in {a:?}");
    }
}
