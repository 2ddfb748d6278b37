//! Element-wise operators.

use super::{
    Operator,
    activation::{activate, activation, map, own_activation},
};
use crate::{
    ffi::{Home, Tensor, Type, Unary},
    kernels::{Activation, Broadcast, BroadcastOp, Function, Glu, Rotary},
    shape,
    storage::is_f32,
    translate::{Operand, Outcome, Translator, refuse},
};
use sdrun_graph::{Node, Tensor as HostTensor};

const UNARY: &str = "float";
const BINARY: &str = "float, any shapes that broadcast";

pub(super) const OPERATORS: &[Operator] = &[
    Operator { name: "Abs", takes: UNARY, translate: |t, n| unary(t, n, Unary::Abs) },
    Operator { name: "Cos", takes: UNARY, translate: |t, n| unary(t, n, Unary::Cos) },
    Operator { name: "Exp", takes: UNARY, translate: |t, n| unary(t, n, Unary::Exp) },
    Operator { name: "HardSwish", takes: UNARY, translate: |t, n| unary(t, n, Unary::HardSwish) },
    Operator { name: "Log", takes: UNARY, translate: |t, n| unary(t, n, Unary::Log) },
    Operator { name: "Neg", takes: UNARY, translate: |t, n| unary(t, n, Unary::Neg) },
    Operator { name: "Sigmoid", takes: UNARY, translate: |t, n| unary(t, n, Unary::Sigmoid) },
    Operator { name: "Sin", takes: UNARY, translate: |t, n| unary(t, n, Unary::Sin) },
    Operator { name: "Sqrt", takes: UNARY, translate: |t, n| unary(t, n, Unary::Sqrt) },
    Operator { name: "Tanh", takes: UNARY, translate: |t, n| unary(t, n, Unary::Tanh) },
    Operator { name: "Clip", takes: "float, constant bounds", translate: clip },
    Operator { name: "Gelu", takes: UNARY, translate: through },
    Operator { name: "Swish", takes: UNARY, translate: through },
    Operator { name: "GLU", takes: "float, halves along the last axis", translate: glu },
    Operator { name: "RotatePairs", takes: "float, neighbours along the last axis", translate: rotate_pairs },
    Operator { name: "Ceil", takes: UNARY, translate: own },
    Operator { name: "Celu", takes: UNARY, translate: own },
    Operator { name: "Elu", takes: UNARY, translate: own },
    Operator { name: "Erf", takes: UNARY, translate: own },
    Operator { name: "Floor", takes: UNARY, translate: own },
    Operator { name: "HardSigmoid", takes: UNARY, translate: own },
    Operator { name: "LeakyRelu", takes: UNARY, translate: own },
    Operator { name: "Mish", takes: UNARY, translate: own },
    Operator { name: "Relu", takes: UNARY, translate: own },
    Operator { name: "Round", takes: UNARY, translate: own },
    Operator { name: "Selu", takes: UNARY, translate: own },
    Operator { name: "Shrink", takes: UNARY, translate: own },
    Operator { name: "Sign", takes: UNARY, translate: own },
    Operator { name: "Softplus", takes: UNARY, translate: own },
    Operator { name: "Softsign", takes: UNARY, translate: own },
    Operator { name: "ThresholdedRelu", takes: UNARY, translate: own },
    Operator { name: "PRelu", takes: BINARY, translate: |t, n| binary(t, n, BroadcastOp::PRelu) },
    Operator { name: "Reciprocal", takes: UNARY, translate: reciprocal },
    Operator { name: "Add", takes: BINARY, translate: |t, n| binary(t, n, BroadcastOp::Add) },
    Operator { name: "Sub", takes: BINARY, translate: |t, n| binary(t, n, BroadcastOp::Sub) },
    Operator { name: "Mul", takes: BINARY, translate: |t, n| binary(t, n, BroadcastOp::Mul) },
    Operator { name: "Div", takes: BINARY, translate: |t, n| binary(t, n, BroadcastOp::Div) },
    Operator { name: "Max", takes: BINARY, translate: |t, n| variadic(t, n, BroadcastOp::Max) },
    Operator { name: "Min", takes: BINARY, translate: |t, n| variadic(t, n, BroadcastOp::Min) },
    Operator { name: "Sum", takes: BINARY, translate: |t, n| variadic(t, n, BroadcastOp::Add) },
    Operator { name: "Pow", takes: "float base and exponent, any shapes that broadcast", translate: pow },
];

fn unary(t: &mut Translator<'_>, node: &Node, op: Unary) -> Outcome {
    let x = t.float(node, 0)?;
    let y = t.builder.unary(op, x.tensor)?;
    t.define(node, 0, y)
}

fn clip(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x = t.float(node, 0)?;
    let (low, high) = clip_bounds(t, node)?;
    let y = activate(t, node, x.tensor, &x.shape, Activation::Clip(low, high))?;
    t.define(node, 0, y)
}

/// The constant bounds of a Clip.
pub(crate) fn clip_bounds(t: &Translator<'_>, node: &Node) -> Outcome<(f32, f32)> {
    let bound = |i: usize, attribute: &str| match node.input(i) {
        Some(id) => t
            .scalar(id)
            .map_or_else(|| refuse(format!("its {attribute} is computed by the graph")), |v| Ok(Some(v))),
        None => Ok(node.float(attribute)),
    };
    let (low, high) = (bound(1, "min")?, bound(2, "max")?);
    Ok((low.unwrap_or(f32::NEG_INFINITY), high.unwrap_or(f32::INFINITY)))
}

/// An element-wise function that one of our kernels computes.
fn own(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x = t.float(node, 0)?;
    let y = map(t, node, x.tensor, &x.shape, function(node)?)?;
    t.define(node, 0, y)
}

/// The function of a node, with its attributes or their defaults.
pub(crate) fn function(node: &Node) -> Outcome<Function> {
    let attribute = |name: &str, default: f32| node.float(name).unwrap_or(default);
    Ok(match &node.op_type[..] {
        "Ceil" => Function::Ceil,
        "Celu" => Function::Celu(attribute("alpha", 1.0)),
        "Elu" => Function::Elu(attribute("alpha", 1.0)),
        "Erf" => Function::Erf,
        "Floor" => Function::Floor,
        "HardSigmoid" => {
            Function::HardSigmoid { alpha: attribute("alpha", 0.2), beta: attribute("beta", 0.5) }
        }
        "LeakyRelu" => Function::LeakyRelu(attribute("alpha", 0.01)),
        "Mish" => Function::Mish,
        "Relu" => Function::Activation(Activation::Relu),
        "Round" => Function::Round,
        "Selu" => {
            Function::Selu { alpha: attribute("alpha", 1.673_263_2), gamma: attribute("gamma", 1.050_701) }
        }
        "Shrink" => Function::Shrink { bias: attribute("bias", 0.0), lambda: attribute("lambd", 0.5) },
        "Sign" => Function::Sign,
        "Softplus" => Function::Softplus,
        "Softsign" => Function::Softsign,
        "ThresholdedRelu" => Function::ThresholdedRelu(attribute("alpha", 1.0)),
        op => return refuse(format!("{op} is not a function of one number")),
    })
}

fn through(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (x, activation) = (t.float(node, 0)?, own_activation(node)?);
    let y = activate(t, node, x.tensor, &x.shape, activation)?;
    t.define(node, 0, y)
}

/// A gated linear unit over the last axis.
fn glu(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (x, out) = (t.float(node, 0)?, t.output_shape(node, 0)?);
    let (Some(activation), Some(cols)) = (activation(node)?, out.last().copied()) else {
        return refuse("it has no activation");
    };
    let gate = usize::try_from(node.int_or("gate", 1)).unwrap_or(2);
    if gate > 1 || x.shape.last() != Some(&(2 * cols)) {
        return refuse("its halves are not halves");
    }
    let kernel = Glu { rows: shape::len(&out) / cols, cols, gate, activation };
    let y = t.custom(node, kernel, &[x.tensor], Type::F32, shape::extent(&out))?;
    t.define(node, 0, y)
}

fn rotate_pairs(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (x, out) = (t.float(node, 0)?, t.output_shape(node, 0)?);
    let [cos, sin] = [t.float(node, 1)?, t.float(node, 2)?];
    let Some((cols, dims)) = out.split_last().filter(|(cols, _)| cols.is_multiple_of(2) && x.shape == out)
    else {
        return refuse("its elements are no neighbours");
    };
    let rows = |factor: &Operand| {
        let strides = shape::broadcast_strides(&factor.shape, &out)?;
        strides.split_last().filter(|(step, _)| **step == 1).map(|(_, rows)| rows.to_vec())
    };
    let (Some(of_cos), Some(of_sin)) = (rows(&cos), rows(&sin)) else {
        return refuse("its factors have no element for each element of a row");
    };
    let kernel = Rotary { dims: dims.to_vec(), cols: *cols, strides: [of_cos, of_sin] };
    let y = t.custom(node, kernel, &[x.tensor, cos.tensor, sin.tensor], Type::F32, shape::extent(&out))?;
    t.define(node, 0, y)
}

fn reciprocal(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x = t.float(node, 0)?;
    let one = t.constant_tensor(HostTensor::scalar(1f32), Home::Host)?;
    let one = Operand { tensor: one, dtype: x.dtype, shape: vec![1] };
    let shape = x.shape.clone();
    let y = combine(t, node, BroadcastOp::Div, &one, &x, &shape)?;
    t.define(node, 0, y)
}

fn binary(t: &mut Translator<'_>, node: &Node, op: BroadcastOp) -> Outcome {
    let shape = t.output_shape(node, 0)?;
    let (a, b) = (t.input_id(node, 0)?, t.input_id(node, 1)?);
    for (i, id) in [a, b].into_iter().enumerate() {
        let dtype = t.dtype(id)?;
        if !is_f32(dtype) {
            return refuse(format!("input {i} is {dtype}"));
        }
    }
    let y = match as_line(t, node, op, &shape)? {
        Some((i, factor, addend)) => {
            let x = t.operand([a, b][i])?;
            t.builder.scale(x.tensor, factor, addend)?
        }
        None => {
            let (a, b) = (t.operand(a)?, t.operand(b)?);
            combine(t, node, op, &a, &b, &shape)?
        }
    };
    t.define(node, 0, y)
}

/// Arithmetic with a constant scalar as an operand, a factor and an addend, which takes a single pass.
pub(crate) fn as_line(
    t: &Translator<'_>,
    node: &Node,
    op: BroadcastOp,
    shape: &[usize],
) -> Outcome<Option<(usize, f32, f32)>> {
    let (a, b) = (t.input_id(node, 0)?, t.input_id(node, 1)?);
    let whole = |id| t.shape(id).is_ok_and(|own| shape::len(&own) == shape::len(shape));
    Ok(match (t.scalar(a), t.scalar(b)) {
        (_, Some(c)) if whole(a) => match op {
            BroadcastOp::Add => Some((0, 1.0, c)),
            BroadcastOp::Sub => Some((0, 1.0, -c)),
            BroadcastOp::Mul => Some((0, c, 0.0)),
            BroadcastOp::Div if (1.0 / c).is_normal() => Some((0, 1.0 / c, 0.0)),
            _ => None,
        },
        (Some(c), _) if whole(b) => match op {
            BroadcastOp::Add => Some((1, 1.0, c)),
            BroadcastOp::Sub => Some((1, -1.0, c)),
            BroadcastOp::Mul => Some((1, c, 0.0)),
            _ => None,
        },
        _ => None,
    })
}

fn variadic(t: &mut Translator<'_>, node: &Node, op: BroadcastOp) -> Outcome {
    let mut result = t.float(node, 0)?;
    for i in 1..node.inputs.len() {
        let next = t.float(node, i)?;
        let Some(shape) = shape::broadcast(&result.shape, &next.shape) else {
            return refuse("its shapes do not broadcast");
        };
        let tensor = combine(t, node, op, &result, &next, &shape)?;
        result = Operand { tensor, dtype: result.dtype, shape };
    }
    t.define(node, 0, result.tensor)
}

fn pow(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let shape = t.output_shape(node, 0)?;
    let x = t.float(node, 0)?;
    let exponent = t.input_id(node, 1)?;
    let whole = shape::len(&x.shape) == shape::len(&shape);
    let y = match t.scalar(exponent) {
        Some(1.0) if whole => x.tensor,
        Some(2.0) if whole => t.builder.unary(Unary::Sqr, x.tensor)?,
        Some(0.5) if whole && t.target().gpu().is_some() => t.builder.unary(Unary::Sqrt, x.tensor)?,
        Some(0.5) if whole => map(t, node, x.tensor, &x.shape, Function::SquareRootPower)?,
        _ => {
            let exponent = t.float(node, 1)?;
            combine(t, node, BroadcastOp::Pow, &x, &exponent, &shape)?
        }
    };
    t.define(node, 0, y)
}

/// `a op b`, broadcast to `shape`. ggml computes it if one operand has that shape and the other is repeated along outer dimensions
/// only. ggml is slow along the innermost dimension, so one of our kernels takes that and all other cases.
fn combine(
    t: &mut Translator<'_>,
    node: &Node,
    op: BroadcastOp,
    a: &Operand,
    b: &Operand,
    shape: &[usize],
) -> Outcome<Tensor> {
    if let Some(op) = op.of_ggml() {
        if let Some((whole, repeated)) = repeatable(&a.shape, &b.shape, shape) {
            let (whole, repeated) =
                (t.builder.reshape(a.tensor, whole)?, t.builder.reshape(b.tensor, repeated)?);
            return Ok(t.builder.binary(op, whole, repeated)?);
        }
        if let Some((whole, repeated)) = repeatable(&b.shape, &a.shape, shape).filter(|_| op.commutes()) {
            let (whole, repeated) =
                (t.builder.reshape(b.tensor, whole)?, t.builder.reshape(a.tensor, repeated)?);
            return Ok(t.builder.binary(op, whole, repeated)?);
        }
    }
    let Some(kernel) = Broadcast::new(op, &a.shape, &b.shape, shape) else {
        return refuse("its shapes do not broadcast");
    };
    t.custom(node, kernel, &[a.tensor, b.tensor], Type::F32, shape::extent(shape))
}

/// Extents with which ggml repeats `b` to `a`. `None` if `a` does not have the whole `shape` or the innermost dimension is repeated.
fn repeatable(a: &[usize], b: &[usize], shape: &[usize]) -> Option<([usize; 4], [usize; 4])> {
    if shape::len(a) != shape::len(shape) {
        return None;
    }
    let (whole, repeated) = (shape::broadcast_strides(a, shape)?, shape::broadcast_strides(b, shape)?);
    let (dims, strides) = shape::coalesce(shape, &[&whole, &repeated]);
    let repeated = &strides[1];
    if dims.len() > 4 || repeated.last() == Some(&0) {
        return None;
    }
    Some((shape::extent(&dims), shape::extent(&shape::once(&dims, repeated))))
}

/// `a + b`, where `b` is broadcast to `a`.
pub(super) fn add(t: &mut Translator<'_>, node: &Node, a: &Operand, b: &Operand) -> Outcome<Tensor> {
    combine(t, node, BroadcastOp::Add, a, b, &a.shape)
}

/// `a * b`, where `b` is broadcast to `a`.
pub(super) fn multiply(t: &mut Translator<'_>, node: &Node, a: &Operand, b: &Operand) -> Outcome<Tensor> {
    combine(t, node, BroadcastOp::Mul, a, b, &a.shape)
}
