//! Normalisation and softmax.

use super::{
    Operator,
    fused::{activate, activation},
};
use crate::{
    ffi::{Tensor, Type},
    kernels::GroupNorm,
    shape,
    translate::{Operand, Outcome, Translator, refuse},
};
use sdrun_graph::{Node, fused::Activation};

pub(super) const OPERATORS: &[Operator] = &[
    Operator {
        name: "LayerNormalization",
        takes: "float, any trailing axes, scale and bias of their shape, one output",
        translate: layer_norm,
    },
    Operator { name: "InstanceNormalization", takes: "float", translate: instance_norm },
    Operator { name: "GroupNormalization", takes: "float", translate: group_normalization },
    Operator { name: "Softmax", takes: "float, any axis", translate: softmax },
];

/// A GroupNorm with what usually surrounds it, each part optional; see [`GroupNorm`].
struct GroupNormParts {
    /// `[batch, channels, ...]`.
    x: Operand,
    groups: usize,
    epsilon: f32,
    /// Scale and bias, one element for each group or each channel.
    affine: Option<(Operand, Operand)>,
    /// One element for each channel.
    weight: Option<Operand>,
    /// One element for each channel.
    shift: Option<Operand>,
    silu: bool,
}

/// The tensor of a normalisation, of the shape of its input.
fn group_norm(t: &mut Translator<'_>, node: &Node, parts: GroupNormParts) -> Outcome<Tensor> {
    let GroupNormParts { x, groups, epsilon, affine, weight, shift, silu } = parts;
    let &[batch, channels, ref inner @ ..] = &x.shape[..] else {
        return refuse("its input has fewer than two dimensions");
    };
    if groups == 0 || channels % groups != 0 {
        return refuse(format!("{groups} groups do not divide {channels} channels"));
    }
    let mut inputs = vec![x.tensor];
    let mut affine_len = 0;
    if let Some((scale, bias)) = &affine {
        affine_len = shape::len(&scale.shape);
        if ![groups, channels].contains(&affine_len) || shape::len(&bias.shape) != affine_len {
            return refuse("scale and bias have neither one element for each group nor for each channel");
        }
        inputs.extend([scale.tensor, bias.tensor]);
    }
    for factor in [&weight, &shift].into_iter().flatten() {
        if shape::len(&factor.shape) != channels {
            return refuse("a factor does not have one element for each channel");
        }
        inputs.push(factor.tensor);
    }
    let kernel = GroupNorm {
        batch,
        channels,
        inner: shape::len(inner),
        groups,
        epsilon,
        affine: affine_len,
        weight: weight.is_some(),
        shift: shift.is_some(),
        silu,
    };
    t.custom(node, kernel, &inputs, Type::F32, shape::extent(&x.shape))
}

fn instance_norm(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (x, scale, bias) = (t.float(node, 0)?, t.float(node, 1)?, t.float(node, 2)?);
    let groups = shape::len(&scale.shape);
    let epsilon = node.float("epsilon").unwrap_or(1e-5);
    let affine = Some((scale, bias));
    let parts = GroupNormParts { x, groups, epsilon, affine, weight: None, shift: None, silu: false };
    let y = group_norm(t, node, parts)?;
    t.define(node, 0, y)
}

/// That of ai.onnx, or with factors of groups and an activation that of `sdrun_graph::fused`.
fn group_normalization(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (x, scale, bias) = (t.float(node, 0)?, t.float(node, 1)?, t.float(node, 2)?);
    let Some(groups) = node.int("num_groups").and_then(|n| usize::try_from(n).ok()) else {
        return refuse("it has no num_groups");
    };
    let epsilon = node.float("epsilon").unwrap_or(1e-5);
    let activation = activation(node)?;
    let silu = activation == Some(Activation::Swish(1.0));
    let (affine, weight, shift) = match (t.optional_float(node, 3)?, t.optional_float(node, 4)?) {
        (Some(group_scale), Some(group_bias)) => ((group_scale, group_bias), Some(scale), Some(bias)),
        (None, None) => ((scale, bias), None, None),
        _ => return refuse("it has only one of the factors of groups"),
    };
    let parts = GroupNormParts { x, groups, epsilon, affine: Some(affine), weight, shift, silu };
    let mut y = group_norm(t, node, parts)?;
    if let Some(activation) = activation.filter(|_| !silu) {
        y = activate(t, node, y, activation)?;
    }
    t.define(node, 0, y)
}

fn layer_norm(t: &mut Translator<'_>, node: &Node) -> Outcome {
    if node.outputs.iter().flatten().count() > 1 {
        return refuse("it has a second output");
    }
    let x = t.float(node, 0)?;
    let Some(axis) = shape::axis(node.int_or("axis", -1), x.shape.len()) else {
        return refuse("its axis is out of range");
    };
    let inner = x.shape[axis..].to_vec();
    let len = shape::len(&inner);
    let rows = t.builder.reshape(x.tensor, [len, shape::len(&x.shape) / len, 1, 1])?;
    let tensor = t.builder.norm(rows, node.float("epsilon").unwrap_or(1e-5))?;
    let mut y = Operand { tensor, dtype: x.dtype, shape: x.shape.clone() };
    for i in [1, 2] {
        let Some(factor) = t.optional_float(node, i)? else { continue };
        if shape::broadcast_strides(&factor.shape, &y.shape).is_none() {
            return refuse("scale or bias does not broadcast to the input");
        }
        y.tensor = match i {
            1 => super::elementwise::multiply(t, node, &y, &factor)?,
            _ => super::elementwise::add(t, node, &y, &factor)?,
        };
    }
    t.define(node, 0, y.tensor)
}

fn softmax(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x = t.float(node, 0)?;
    let single_axis = t.graph.opset() >= 13;
    let rank = x.shape.len();
    let default = if single_axis { -1 } else { 1 };
    // Before opset 13 everything from the axis on is one row, and the axis may be the rank.
    let axis = node.int_or("axis", default);
    if !single_axis || rank == 0 {
        let split = if axis == rank as i64 || rank == 0 { Some(rank) } else { shape::axis(axis, rank) };
        let Some(split) = split else { return refuse("its axis is out of range") };
        let row = shape::len(&x.shape[split..]);
        let rows = t.builder.reshape(x.tensor, [row, shape::len(&x.shape) / row, 1, 1])?;
        let y = t.builder.soft_max(rows)?;
        return t.define(node, 0, y);
    }
    let Some(axis) = shape::axis(axis, rank) else { return refuse("its axis is out of range") };
    let len = x.shape[axis];
    let (outer, inner) = (shape::len(&x.shape[..axis]), shape::len(&x.shape[axis + 1..]));
    let rows = t.transpose(node, x.tensor, &[outer, len, inner], &[0, 2, 1])?;
    let rows = t.builder.reshape(rows, [len, outer * inner, 1, 1])?;
    let y = t.builder.soft_max(rows)?;
    let y = t.transpose(node, y, &[outer, inner, len], &[0, 2, 1])?;
    t.define(node, 0, y)
}
