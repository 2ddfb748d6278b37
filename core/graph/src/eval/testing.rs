//! Helpers for kernel tests.

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

/// Asserts the same type and shape, and elements within 1e-6 of the larger magnitude (or of one).
pub(super) fn assert_close(actual: &Tensor, expected: &Tensor) {
    assert_eq!((actual.dtype(), actual.shape()), (expected.dtype(), expected.shape()));
    let (a, e) = (actual.to_f32s().unwrap(), expected.to_f32s().unwrap());
    for (i, (x, y)) in a.iter().zip(&e).enumerate() {
        assert!((x - y).abs() <= 1e-6 * y.abs().max(1.0), "element {i}: {x} instead of {y} in {a:?}");
    }
}

/// A node and ONNX Runtime's results for it.
struct Known {
    name: String,
    op: Op,
    inputs: Vec<Option<Tensor>>,
    outputs: Vec<Tensor>,
}

/// The cases written by `tools/reference/operators.py`.
fn reference_cases() -> Vec<Known> {
    let cases: serde_json::Value =
        serde_json::from_str(include_str!("../../testdata/reference.json")).unwrap();
    let case = |case: &serde_json::Value| {
        let list = |key: &str| case[key].as_array().unwrap().iter();
        let inputs: Vec<_> = list("inputs").map(|v| (!v.is_null()).then(|| from_json(v))).collect();
        let outputs: Vec<_> = list("outputs").map(from_json).collect();
        let attributes = case["attributes"].as_object().unwrap().iter();
        let op = Op::new(case["op"].as_str().unwrap()).outputs(outputs.len() as u32);
        let mut op = op.opset(case["opset"].as_i64().unwrap());
        op.node.domain = case["domain"].as_str().unwrap().into();
        op.node.attributes = attributes.map(|(name, v)| (name.clone(), attribute_from_json(v))).collect();
        Known { name: case["name"].as_str().unwrap().into(), op, inputs, outputs }
    };
    cases.as_array().unwrap().iter().map(case).collect()
}

fn attribute_from_json(value: &serde_json::Value) -> Attribute {
    use serde_json::Value;
    match value {
        Value::Number(n) if n.is_i64() => Attribute::Int(n.as_i64().unwrap()),
        Value::Number(n) => Attribute::Float(n.as_f64().unwrap() as f32),
        Value::String(text) => Attribute::String(text.clone().into_bytes()),
        Value::Array(list) if list.iter().all(Value::is_i64) => {
            Attribute::Ints(list.iter().map(|v| v.as_i64().unwrap()).collect())
        }
        Value::Array(list) if list.iter().all(Value::is_string) => {
            Attribute::Strings(list.iter().map(|v| v.as_str().unwrap().as_bytes().to_vec()).collect())
        }
        Value::Array(list) => Attribute::Floats(list.iter().map(|v| v.as_f64().unwrap() as f32).collect()),
        other => panic!("an attribute {other}"),
    }
}

fn from_json(value: &serde_json::Value) -> Tensor {
    let list = |key: &str| value[key].as_array().unwrap().iter();
    let shape: Vec<usize> = list("shape").map(|d| d.as_u64().unwrap() as usize).collect();
    let ints = || list("data").map(|v| v.as_i64().unwrap());
    let float = |v: &serde_json::Value| match v.as_str() {
        Some(text) => text.parse().unwrap(),
        None => v.as_f64().unwrap() as f32,
    };
    match value["dtype"].as_str().unwrap() {
        "float32" => Tensor::from_elements(shape, &list("data").map(float).collect::<Vec<f32>>()),
        "int32" => Tensor::from_elements(shape, &ints().map(|v| v as i32).collect::<Vec<_>>()),
        "int8" => Tensor::from_elements(shape, &ints().map(|v| v as i8).collect::<Vec<_>>()),
        "uint8" => Tensor::from_elements(shape, &ints().map(|v| v as u8).collect::<Vec<_>>()),
        other => panic!("elements of type {other}"),
    }
    .unwrap()
}

#[test]
fn nodes_match_the_reference() {
    for Known { name, op, inputs, outputs } in reference_cases() {
        let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
        let found = op.try_run_optional(&inputs).unwrap_or_else(|e| panic!("{name}: {e}"));
        for (i, (found, expected)) in found.iter().zip(&outputs).enumerate() {
            assert_eq!((found.dtype(), found.shape()), (expected.dtype(), expected.shape()), "{name}, {i}");
            let (Some(found), Some(expected)) = (found.to_f32s(), expected.to_f32s()) else {
                assert_eq!(found, expected, "{name}, output {i}");
                continue;
            };
            for (f, e) in found.iter().zip(&expected) {
                let close = (f - e).abs() <= 2e-6 * e.abs().max(1.0);
                assert!(
                    close || f.is_nan() && e.is_nan(),
                    "{name}, output {i}: {found:?} instead of {expected:?}"
                );
            }
        }
    }
}
