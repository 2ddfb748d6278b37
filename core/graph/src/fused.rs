//! Operators of the domain [`DOMAIN`], which fusion passes create.
//!
//! Each is defined by a few operators of ai.onnx (opset [`BODY_OPSET`]), like an ONNX function. Inference and
//! evaluation use that definition. A consumer without a kernel for such an operator does not request the pass that
//! creates it.
//!
//! | operator | inputs | attributes | computes |
//! |---|---|---|---|
//! | `Attention`, `LayerNormalization`, `RMSNormalization`, `Gelu`, `Swish` | | | as in ai.onnx 25 |
//! | `GroupNormalization` | X, scale, bias, group_scale?, group_bias? | `epsilon`, `num_groups`, activation | act((norm(X) · group_scale + group_bias) · scale + bias); scale and bias are per channel, the other two per group |
//! | `FusedConv` | X, W, B?, Z? | as Conv, activation | act(Conv(X, W, B) + Z); Z broadcasts |
//! | `NhwcConv` | X, W, B?, Z? | as Conv, activation | as `FusedConv`, but channels are the last axis of X, Z and the output; W has the layout of Conv |
//! | `FusedMatMul` | A, B, bias?, Z? | `transB`, activation | act(A · B + bias + Z), with the last two dimensions of B transposed if `transB` is 1 |
//! | `RotatePairs` | X, cos, sin | | X · cos + turned · sin, where the neighbours (a, b) of the last axis of X are (−b, a) in `turned`; cos and sin broadcast to X |
//! | `GLU` | X | `gate`, activation | splits X in two along the last axis: act(half `gate`) · other half |
//!
//! An activation is written as in the contrib operators of ONNX Runtime: `activation` holds an operator's name and
//! `activation_params` its parameters; see [`Activation`].

mod activation;
mod body;

pub use activation::Activation;

use crate::{
    Attribute, GraphError, Node, Tensor, ValueId,
    eval::{EvalError, evaluate},
    infer::{Fact, node_outputs},
};
use body::Body;

/// Name of the domain.
pub const DOMAIN: &str = "sdrun";

/// Version of the domain.
pub const VERSION: i64 = 1;

/// The version of ai.onnx that the definitions use.
pub const BODY_OPSET: i64 = 25;

/// Whether the node is an operator of this domain.
pub(crate) fn is_fused(node: &Node) -> bool {
    node.domain == DOMAIN && OPERATORS.iter().any(|(name, _)| *name == node.op_type)
}

type Definition = fn(&mut Body, &Node) -> Result<(), String>;

const OPERATORS: [(&str, Definition); 11] = [
    ("Attention", same),
    ("LayerNormalization", same),
    ("RMSNormalization", same),
    ("Gelu", same),
    ("Swish", same),
    ("GroupNormalization", group_normalization),
    ("FusedConv", conv),
    ("NhwcConv", nhwc_conv),
    ("FusedMatMul", matmul),
    ("RotatePairs", rotate_pairs),
    ("GLU", glu),
];

/// The nodes that define a fused node.
fn define(node: &Node) -> Result<Body, String> {
    let Some((_, definition)) = OPERATORS.iter().find(|(name, _)| *name == node.op_type) else {
        return Err(format!("domain {DOMAIN} has no operator {}", node.op_type));
    };
    let mut body = Body::new(node);
    definition(&mut body, node)?;
    Ok(body)
}

/// Infers the outputs of a fused node.
pub(crate) fn infer(node: &Node, inputs: &[Option<Fact>]) -> Result<Vec<Fact>, GraphError> {
    let body = define(node).map_err(GraphError::Invalid)?;
    let unknown = || GraphError::Invalid(format!("the definition of {} is incomplete", node.op_type));
    body.run(inputs, Fact::constant, |step, inputs| {
        let inputs: Vec<Option<Fact>> = inputs.into_iter().map(|fact| fact.cloned()).collect();
        node_outputs(step, BODY_OPSET, &inputs)?.ok_or_else(unknown)
    })
}

/// Evaluates a fused node.
pub(crate) fn evaluate_node(node: &Node, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, EvalError> {
    let body = define(node).map_err(EvalError::Invalid)?;
    let inputs: Vec<Option<Tensor>> = inputs.iter().map(|tensor| tensor.cloned()).collect();
    body.run(&inputs, |tensor| tensor, |step, inputs| evaluate(step, BODY_OPSET, &inputs))
}

fn same(body: &mut Body, node: &Node) -> Result<(), String> {
    body.same(node);
    Ok(())
}

/// With group factors, `scale` becomes `group_scale · scale` and `bias` becomes `group_bias · scale + bias`.
fn group_normalization(body: &mut Body, node: &Node) -> Result<(), String> {
    let (x, mut scale, mut bias) = (body.need(0)?, body.need(1)?, body.need(2)?);
    let groups = node.int("num_groups").ok_or("attribute num_groups is missing")?;
    let by_group = body.constant(Tensor::from_i64s(&[groups, -1]));
    let column = body.constant(Tensor::from_i64s(&[groups, 1]));
    let flat = body.constant(Tensor::from_i64s(&[-1]));
    let plain = body.node("Reshape", &[scale, by_group], []);
    let spread = |body: &mut Body, factor| {
        let factor = body.node("Reshape", &[factor, column], []);
        let product = body.node("Mul", &[plain, factor], []);
        body.node("Reshape", &[product, flat], [])
    };
    if let Some(group_scale) = body.input(3) {
        scale = spread(body, group_scale);
    }
    if let Some(group_bias) = body.input(4) {
        let offset = spread(body, group_bias);
        bias = body.node("Add", &[offset, bias], []);
    }
    let epsilon = Attribute::Float(node.float("epsilon").unwrap_or(1e-5));
    let attributes = [("num_groups", Attribute::Int(groups)), ("epsilon", epsilon)];
    let y = body.node("GroupNormalization", &[x, scale, bias], attributes);
    body.activate(node, y)
}

fn conv(body: &mut Body, node: &Node) -> Result<(), String> {
    let x = body.need(0)?;
    let y = body.conv(node, x)?;
    add_and_activate(body, node, y)
}

fn nhwc_conv(body: &mut Body, node: &Node) -> Result<(), String> {
    let turned = |body: &mut Body, x, perm: [i64; 4]| {
        body.node("Transpose", &[x], [("perm", Attribute::Ints(perm.to_vec()))])
    };
    let x = body.need(0)?;
    let x = turned(body, x, [0, 3, 1, 2]);
    let y = body.conv(node, x)?;
    let y = turned(body, y, [0, 2, 3, 1]);
    add_and_activate(body, node, y)
}

/// Adds Z and applies the activation after the convolution.
fn add_and_activate(body: &mut Body, node: &Node, mut y: ValueId) -> Result<(), String> {
    if let Some(z) = body.input(3) {
        y = body.node("Add", &[y, z], []);
    }
    body.activate(node, y)
}

fn matmul(body: &mut Body, node: &Node) -> Result<(), String> {
    let (a, mut b) = (body.need(0)?, body.need(1)?);
    if node.int_or("transB", 0) != 0 {
        b = body.node("Transpose", &[b], [("perm", Attribute::Ints(vec![1, 0]))]);
    }
    let mut y = body.node("MatMul", &[a, b], []);
    for i in [2, 3] {
        if let Some(addend) = body.input(i) {
            y = body.node("Add", &[y, addend], []);
        }
    }
    body.activate(node, y)
}

fn rotate_pairs(body: &mut Body, _: &Node) -> Result<(), String> {
    let (x, cos, sin) = (body.need(0)?, body.need(1)?, body.need(2)?);
    let neighbours = body.constant(Tensor::from_i64s(&[-1, 2]));
    let neighbours = body.node("Reshape", &[x, neighbours], []);
    let last = || ("axis", Attribute::Int(-1));
    let halves = body.nodes("Split", &[neighbours], [last(), ("num_outputs", Attribute::Int(2))], 2);
    let negated = body.node("Neg", &[halves[1]], []);
    let joined = body.node("Concat", &[negated, halves[0]], [last()]);
    let shape = body.node("Shape", &[x], []);
    let turned = body.node("Reshape", &[joined, shape], []);
    let (plain, turned) = (body.node("Mul", &[x, cos], []), body.node("Mul", &[turned, sin], []));
    let y = body.node("Add", &[plain, turned], []);
    body.finish(y);
    Ok(())
}

fn glu(body: &mut Body, node: &Node) -> Result<(), String> {
    let x = body.need(0)?;
    let gate = match node.int("gate") {
        Some(gate @ (0 | 1)) => gate as usize,
        other => return Err(format!("attribute gate must be 0 or 1, not {other:?}")),
    };
    let activation = Activation::of(node)?.ok_or("attribute activation is missing")?;
    let attributes = [("axis", Attribute::Int(-1)), ("num_outputs", Attribute::Int(2))];
    let halves = body.nodes("Split", &[x], attributes, 2);
    let gated = body.activation(&activation, halves[gate]);
    let y = body.node("Mul", &[gated, halves[1 - gate]], []);
    body.finish(y);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn f32s(shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::from_elements(shape.to_vec(), values).unwrap()
    }

    fn node(op: &str, inputs: usize, attributes: &[(&str, Attribute)]) -> Node {
        Node {
            name: op.into(),
            domain: DOMAIN.into(),
            op_type: op.into(),
            inputs: (0..inputs as u32).map(|i| Some(crate::ValueId(i))).collect(),
            outputs: vec![Some(crate::ValueId(99))],
            attributes: attributes.iter().map(|(name, value)| (name.to_string(), value.clone())).collect(),
            metadata: BTreeMap::new(),
        }
    }

    fn run(node: &Node, inputs: &[&Tensor]) -> Vec<f32> {
        let inputs: Vec<_> = inputs.iter().map(|t| Some(*t)).collect();
        let outputs = evaluate(node, VERSION, &inputs).unwrap();
        let facts: Vec<_> = inputs.iter().map(|t| t.map(Fact::typed)).collect();
        let inferred = node_outputs(node, VERSION, &facts).unwrap().unwrap();
        assert_eq!(inferred[0].known_shape().as_deref(), Some(outputs[0].shape()));
        outputs[0].to_f32s().unwrap()
    }

    fn relu() -> (&'static str, Attribute) {
        ("activation", Attribute::String(b"Relu".to_vec()))
    }

    #[test]
    fn group_factors_apply_before_channel_factors() {
        let x = f32s(&[1, 4, 1], &[-1.0, 1.0, -3.0, 3.0]);
        let (scale, bias) = (f32s(&[4], &[1.0, 2.0, 3.0, 4.0]), f32s(&[4], &[0.0, 0.5, 0.0, 0.0]));
        let (group_scale, group_bias) = (f32s(&[2], &[1.0, 2.0]), f32s(&[2], &[0.0, 1.0]));
        let attributes = [("num_groups", Attribute::Int(2)), ("epsilon", Attribute::Float(0.0)), relu()];
        let inputs = [&x, &scale, &bias, &group_scale, &group_bias];
        // (±1 · 2 + 1) · 3 and · 4; then Relu cuts negative values.
        assert_eq!(run(&node("GroupNormalization", 5, &attributes), &inputs), [0.0, 2.5, 0.0, 12.0]);
        assert_eq!(run(&node("GroupNormalization", 3, &attributes), &inputs[..3]), [0.0, 2.5, 0.0, 4.0]);
    }

    #[test]
    fn fused_products_and_convolutions() {
        let (a, b) = (f32s(&[1, 2], &[1.0, 2.0]), f32s(&[2, 2], &[1.0, 2.0, 3.0, 4.0]));
        let (bias, z) = (f32s(&[2], &[0.5, -20.0]), f32s(&[1, 2], &[1.0, 1.0]));
        assert_eq!(run(&node("FusedMatMul", 2, &[]), &[&a, &b]), [7.0, 10.0]);
        let transposed = [("transB", Attribute::Int(1)), relu()];
        assert_eq!(run(&node("FusedMatMul", 4, &transposed), &[&a, &b, &bias, &z]), [6.5, 0.0]);
        let (x, w) = (f32s(&[1, 1, 1, 3], &[1.0, 2.0, 3.0]), f32s(&[1, 1, 1, 1], &[2.0]));
        let (bias, z) = (f32s(&[1], &[1.0]), f32s(&[1, 1, 1, 1], &[-6.0]));
        assert_eq!(run(&node("FusedConv", 4, &[relu()]), &[&x, &w, &bias, &z]), [0.0, 0.0, 1.0]);
    }

    #[test]
    fn neighbours_rotate() {
        let x = f32s(&[2, 1, 2], &[1.0, 2.0, 3.0, 4.0]);
        let (cos, sin) = (f32s(&[2], &[2.0, 3.0]), f32s(&[2, 1, 1], &[10.0, 100.0]));
        assert_eq!(run(&node("RotatePairs", 3, &[]), &[&x, &cos, &sin]), [-18.0, 16.0, -394.0, 312.0]);
    }

    #[test]
    fn either_half_can_be_the_gate() {
        let x = f32s(&[1, 4], &[-1.0, 2.0, 3.0, -4.0]);
        let gate = |gate| [("gate", Attribute::Int(gate)), relu()];
        assert_eq!(run(&node("GLU", 1, &gate(0)), &[&x]), [0.0, -8.0]);
        assert_eq!(run(&node("GLU", 1, &gate(1)), &[&x]), [-3.0, 0.0]);
        assert!(evaluate(&node("GLU", 1, &gate(2)), VERSION, &[Some(&x)]).is_err());
    }
}
