//! Operators that passes make (`sdrun_graph::fused`), by the operations they consist of.

use super::{
    Operator,
    conv::conv_tensor,
    elementwise::{add, combine, multiply},
    matmul::product,
};
use crate::{
    ffi::{Tensor, Type, Unary},
    kernels::{BroadcastOp, Function, Map, RmsNorm},
    shape,
    translate::{Operand, Outcome, Translator, refuse},
};
use sdrun_graph::{Node, fused::Activation};

const ATTENTION: &str =
    "float, three or four dimensions, a mask that is added, as many key heads as query heads";

pub(super) const OPERATORS: &[Operator] = &[
    Operator { name: "Attention", takes: ATTENTION, translate: attention },
    Operator {
        name: "RMSNormalization",
        takes: "float, the last axes, a scale of their shape",
        translate: rms_norm,
    },
    Operator { name: "Gelu", takes: "float", translate: gelu },
    Operator { name: "Swish", takes: "float", translate: swish },
    Operator { name: "GLU", takes: "float", translate: glu },
    Operator { name: "FusedConv", takes: "as Conv", translate: fused_conv },
    Operator { name: "FusedMatMul", takes: "float", translate: fused_matmul },
];

/// The node's activation.
pub(super) fn activation(node: &Node) -> Outcome<Option<Activation>> {
    Activation::of(node).or_else(refuse)
}

/// An activation of `x`, of this shape.
pub(super) fn activate(
    t: &mut Translator<'_>,
    node: &Node,
    x: Tensor,
    activation: Activation,
) -> Outcome<Tensor> {
    let function = match activation {
        Activation::Relu => return Ok(t.builder.unary(Unary::Relu, x)?),
        Activation::Clip(low, high) => return Ok(t.builder.clamp(x, low, high)?),
        Activation::Swish(1.0) => return Ok(t.builder.unary(Unary::Silu, x)?),
        Activation::Gelu => return Ok(t.builder.unary(Unary::GeluErf, x)?),
        Activation::Swish(alpha) => Function::Swish(alpha),
        Activation::GeluTanh => Function::GeluTanh,
    };
    let (len, extent) = (t.builder.len(x), t.builder.extent(x));
    t.custom(node, Map { function, len }, &[x], Type::F32, extent)
}

fn swish(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x = t.float(node, 0)?;
    let y = activate(t, node, x.tensor, Activation::Swish(node.float("alpha").unwrap_or(1.0)))?;
    t.define(node, 0, y)
}

fn gelu(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let activation = match node.str("approximate") {
        None | Some("none") => Activation::Gelu,
        // ggml looks it up in a table of f16 values.
        Some("tanh") => Activation::GeluTanh,
        Some(other) => return refuse(format!("its approximate is {other:?}")),
    };
    let x = t.float(node, 0)?;
    let y = activate(t, node, x.tensor, activation)?;
    t.define(node, 0, y)
}

fn glu(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x = t.float(node, 0)?;
    let Some(activation) = activation(node)? else { return refuse("it has no activation") };
    let gate = usize::from(node.int_or("gate", 0) != 0);
    let out = t.output_shape(node, 0)?;
    let strides: Vec<isize> = shape::strides(&x.shape).iter().map(|s| *s as isize).collect();
    let half = |t: &mut Translator<'_>, which: usize| {
        t.strided(node, x.tensor, &out, &strides, which * out[out.len() - 1])
    };
    let (gate, value) = (half(t, gate)?, half(t, 1 - gate)?);
    let gate = activate(t, node, gate, activation)?;
    let operand = |tensor| Operand { tensor, dtype: x.dtype, shape: out.clone() };
    let y = multiply(t, node, &operand(value), &operand(gate))?;
    t.define(node, 0, y)
}

fn fused_conv(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let y = conv_tensor(t, node)?;
    finish(t, node, y, 3)
}

fn fused_matmul(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let mut y = product(t, node, node.int_or("transB", 0) != 0)?;
    if let Some(bias) = t.optional_float(node, 2)? {
        let product = Operand { tensor: y, dtype: bias.dtype, shape: t.output_shape(node, 0)? };
        y = add(t, node, &product, &bias)?;
    }
    finish(t, node, y, 3)
}

/// Adds input `addend`, if it is there, and applies the activation, if there is one.
fn finish(t: &mut Translator<'_>, node: &Node, mut y: Tensor, addend: usize) -> Outcome {
    let shape = t.output_shape(node, 0)?;
    if let Some(addend) = t.optional_float(node, addend)? {
        let whole = Operand { tensor: y, dtype: addend.dtype, shape: shape.clone() };
        y = combine(t, node, BroadcastOp::Add, &whole, &addend, &shape)?;
    }
    if let Some(activation) = activation(node)? {
        y = activate(t, node, y, activation)?;
    }
    t.define(node, 0, y)
}

fn rms_norm(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (x, scale) = (t.float(node, 0)?, t.float(node, 1)?);
    let Some(axis) = shape::axis(node.int_or("axis", -1), x.shape.len()) else {
        return refuse("its axis is out of range");
    };
    let len = shape::len(&x.shape[axis..]);
    if shape::len(&scale.shape) != len {
        return refuse("its scale does not have the shape of what is normalised");
    }
    let epsilon = node.float("epsilon").unwrap_or(1e-5);
    let kernel = RmsNorm { rows: shape::len(&x.shape) / len, len, epsilon };
    let y = t.custom(node, kernel, &[x.tensor, scale.tensor], Type::F32, shape::extent(&x.shape))?;
    t.define(node, 0, y)
}

/// softmax(scale · q · kᵀ + mask) · v.
fn attention(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let plain = node.outputs.iter().flatten().count() == 1
        && node.inputs.iter().skip(4).flatten().count() == 0
        && node.int_or("is_causal", 0) == 0
        && node.float("softcap").unwrap_or(0.0) == 0.0
        && ["left_window_size", "right_window_size"].iter().all(|name| node.int_or(name, -1) == -1);
    if !plain {
        return refuse("it is causal, has a window, a cap, a cache or further outputs");
    }
    let (q, k, v) = (t.float(node, 0)?, t.float(node, 1)?, t.float(node, 2)?);
    let joined = q.shape.len() == 3;
    // [batch, heads, length, size], and the axes in which that lies in memory.
    let heads = |x: &Operand, attribute: &str| match x.shape[..] {
        [batch, heads, length, size] => Ok([batch, heads, length, size]),
        [batch, length, wide] => match usize::try_from(node.int_or(attribute, 0)) {
            Ok(heads) if heads > 0 && wide % heads == 0 => Ok([batch, heads, length, wide / heads]),
            _ => refuse(format!("its {attribute} does not divide {wide}")),
        },
        _ => refuse("an operand has neither three nor four dimensions"),
    };
    let ([batch, count, queries, size], [_, kv, keys, _], [.., width]) =
        (heads(&q, "q_num_heads")?, heads(&k, "kv_num_heads")?, heads(&v, "kv_num_heads")?);
    if kv != count {
        return refuse(format!("it has {count} query heads and {kv} key heads"));
    }
    let apart = |t: &mut Translator<'_>, x: &Operand, length: usize, size: usize, transposed: bool| {
        let (shape, mut perm) = match joined {
            true => ([batch, length, count, size], [0, 2, 1, 3]),
            false => ([batch, count, length, size], [0, 1, 2, 3]),
        };
        if transposed {
            perm.swap(2, 3);
        }
        t.transpose(node, x.tensor, &shape, &perm)
    };
    let (q, k) = (apart(t, &q, queries, size, false)?, apart(t, &k, keys, size, false)?);
    let v = apart(t, &v, keys, width, true)?;
    let stack = batch * count;
    let k = t.builder.reshape(k, [size, keys, stack, 1])?;
    let q = t.builder.reshape(q, [size, queries, stack, 1])?;
    let v = t.builder.reshape(v, [keys, width, stack, 1])?;
    let scores = t.builder.mul_mat(k, q)?;
    let scale = node.float("scale").unwrap_or_else(|| 1.0 / (size as f32).sqrt());
    let mut scores = t.builder.scale(scores, scale, 0.0)?;
    if let Some(mask) = t.optional_float(node, 3)? {
        if mask.shape.last() != Some(&keys) {
            return refuse("its mask covers only some of the keys");
        }
        let whole = Operand { tensor: scores, dtype: mask.dtype, shape: vec![batch, count, queries, keys] };
        scores = add(t, node, &whole, &mask)?;
    }
    let rows = t.builder.reshape(scores, [keys, queries, stack, 1])?;
    let weights = t.builder.soft_max(rows)?;
    let mut y = t.builder.mul_mat(v, weights)?;
    if joined {
        y = t.transpose(node, y, &[batch, count, queries, width], &[0, 2, 1, 3])?;
    }
    t.define(node, 0, y)
}
