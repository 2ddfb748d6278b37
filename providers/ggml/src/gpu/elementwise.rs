//! Element-wise operators.

use super::{QUICK, activate, combine, input};
use crate::{
    ffi::{Gate, Unary},
    kernels::{Activation, BroadcastOp},
    ops::{activation, as_line, clip_bounds, own_activation},
    shape,
    translate::{Outcome, Translator, refuse},
};
use sdrun_graph::Node;

pub(super) fn binary(t: &mut Translator<'_>, node: &Node, op: BroadcastOp) -> Outcome {
    let shape = t.output_shape(node, 0)?;
    let y = match as_line(t, node, op, &shape)? {
        Some((i, factor, addend)) => {
            let x = input(t, node, i)?;
            t.builder.scale(x.tensor, factor, addend)?
        }
        None => {
            let (a, b) = (input(t, node, 0)?, input(t, node, 1)?);
            let Some(op) = op.of_ggml() else { return refuse("ggml has no such operation") };
            combine(t, op, (a.tensor, &a.shape), (b.tensor, &b.shape), &shape)?
        }
    };
    t.define(node, 0, y)
}

pub(super) fn through(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (x, activation) = (input(t, node, 0)?, own_activation(node)?);
    let y = activate(t, x.tensor, activation)?;
    t.define(node, 0, y)
}

/// An element-wise function that ggml has for devices.
pub(super) fn function(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x = input(t, node, 0)?.tensor;
    let alpha = |default: f32| node.float("alpha").unwrap_or(default);
    let y = match &node.op_type[..] {
        "Relu" => t.builder.unary(Unary::Relu, x)?,
        "Elu" if alpha(1.0) == 1.0 => t.builder.unary(Unary::Elu, x)?,
        "LeakyRelu" => t.builder.leaky_relu(x, alpha(0.01))?,
        "HardSigmoid" => {
            let line = t.builder.scale(x, alpha(0.2), node.float("beta").unwrap_or(0.5))?;
            t.builder.clamp(line, 0.0, 1.0)?
        }
        "Clip" => {
            let (low, high) = clip_bounds(t, node)?;
            t.builder.clamp(x, low, high)?
        }
        _ => return refuse("ggml has no such function"),
    };
    t.define(node, 0, y)
}

/// A gated linear unit over the last axis.
pub(super) fn glu(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x = input(t, node, 0)?;
    let gate = match activation(node)? {
        Some(Activation::Relu) => Gate::Relu,
        Some(Activation::Gelu) => Gate::GeluErf,
        Some(Activation::GeluTanh) => Gate::GeluTanh,
        Some(Activation::Swish(1.0)) => Gate::Silu,
        Some(Activation::Swish(QUICK)) => Gate::GeluQuick,
        _ => return refuse("ggml has no gated unit with its activation"),
    };
    let Some(cols) = x.shape.last().copied() else { return refuse("its input has no dimension") };
    let rows = t.builder.reshape(x.tensor, [cols, shape::len(&x.shape) / cols, 1, 1])?;
    let y = t.builder.glu(rows, gate, node.int_or("gate", 1) == 1)?;
    t.define(node, 0, y)
}
