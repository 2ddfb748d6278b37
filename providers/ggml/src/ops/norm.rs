//! Normalization and softmax.

use super::{Operator, activation::activation};
use crate::{
    ffi::{Tensor, Type},
    kernels::{Activation, BatchNorm, GroupNorm, LayerNorm},
    shape,
    translate::{Operand, Outcome, Translator, refuse},
};
use sdrun_graph::{Node, fused::DOMAIN};

pub(super) const OPERATORS: &[Operator] = &[
    Operator {
        name: "LayerNormalization",
        takes: "float, any trailing axes, scale and bias of their shape, one output",
        translate: layer_norm,
    },
    Operator {
        name: "RMSNormalization",
        takes: "float, any trailing axes, scale of their shape",
        translate: layer_norm,
    },
    Operator {
        name: "BatchNormalization",
        takes: "float, at least two dimensions, not in training mode",
        translate: batch_norm,
    },
    Operator { name: "InstanceNormalization", takes: "float", translate: instance_norm },
    Operator { name: "GroupNormalization", takes: "float", translate: group_normalization },
    Operator { name: "Softmax", takes: "float, any axis", translate: softmax },
];

/// A group normalization and the optional operands of [`GroupNorm`].
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
    activation: Option<Activation>,
}

/// A group normalization, with the shape of its input.
fn group_norm(t: &mut Translator<'_>, node: &Node, parts: GroupNormParts) -> Outcome<Tensor> {
    let GroupNormParts { x, groups, epsilon, affine, weight, shift, activation } = parts;
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
        activation,
    };
    t.custom(node, kernel, &inputs, Type::F32, shape::extent(&x.shape))
}

fn batch_norm(t: &mut Translator<'_>, node: &Node) -> Outcome {
    if node.int_or("training_mode", 0) != 0 || node.outputs.iter().flatten().count() > 1 {
        return refuse("it is in training mode");
    }
    let x = t.float(node, 0)?;
    let &[batch, channels, ref inner @ ..] = &x.shape[..] else {
        return refuse("its input has fewer than two dimensions");
    };
    let mut inputs = vec![x.tensor];
    for i in 1..5 {
        let factor = t.float(node, i)?;
        if factor.shape != [channels] {
            return refuse(format!("input {i} does not have one element for each channel"));
        }
        inputs.push(factor.tensor);
    }
    let epsilon = node.float("epsilon").unwrap_or(1e-5);
    let kernel = BatchNorm { batch, channels, inner: shape::len(inner), epsilon };
    let y = t.custom(node, kernel, &inputs, Type::F32, shape::extent(&x.shape))?;
    t.define(node, 0, y)
}

fn instance_norm(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (x, scale, bias) = (t.float(node, 0)?, t.float(node, 1)?, t.float(node, 2)?);
    let groups = shape::len(&scale.shape);
    let epsilon = node.float("epsilon").unwrap_or(1e-5);
    let affine = Some((scale, bias));
    let parts = GroupNormParts { x, groups, epsilon, affine, weight: None, shift: None, activation: None };
    let y = group_norm(t, node, parts)?;
    t.define(node, 0, y)
}

/// In domain [`DOMAIN`], it has factors for groups, then factors for channels, and an activation.
fn group_normalization(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (x, scale, bias) = (t.float(node, 0)?, t.float(node, 1)?, t.float(node, 2)?);
    let Some(groups) = node.int("num_groups").and_then(|n| usize::try_from(n).ok()) else {
        return refuse("it has no num_groups");
    };
    let epsilon = node.float("epsilon").unwrap_or(1e-5);
    let (group_scale, group_bias) = (t.optional_float(node, 3)?, t.optional_float(node, 4)?);
    let activation = activation(node)?;
    let plain = GroupNormParts { x, groups, epsilon, affine: None, weight: None, shift: None, activation };
    let parts = match (node.domain == DOMAIN, group_scale, group_bias) {
        (true, Some(group_scale), Some(group_bias)) => GroupNormParts {
            affine: Some((group_scale, group_bias)),
            weight: Some(scale),
            shift: Some(bias),
            ..plain
        },
        (_, None, None) => GroupNormParts { affine: Some((scale, bias)), ..plain },
        _ => return refuse("it has factors of the groups without addends, or the reverse"),
    };
    let y = group_norm(t, node, parts)?;
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
    let cols = shape::len(&inner);
    let (scale, bias) = (t.optional_float(node, 1)?, t.optional_float(node, 2)?);
    let mut inputs = vec![x.tensor];
    let mut factors = Vec::new();
    for factor in [scale, bias].into_iter().enumerate().filter_map(|(i, factor)| Some((i, factor?))) {
        if shape::broadcast_strides(&factor.1.shape, &x.shape).is_none() {
            return refuse("scale or bias does not broadcast to the input");
        }
        factors.push(factor);
    }
    // The kernel takes factors with the length of a row. Others are applied afterwards.
    let rows_of_one =
        factors.iter().all(|(_, factor)| shape::len(&factor.shape) == cols && factor.shape.ends_with(&inner));
    inputs.extend(factors.iter().filter(|_| rows_of_one).map(|(_, factor)| factor.tensor));
    let has = |i: usize| rows_of_one && factors.iter().any(|(index, _)| *index == i);
    let kernel = LayerNorm {
        rows: shape::len(&x.shape) / cols,
        cols,
        epsilon: node.float("epsilon").unwrap_or(1e-5),
        centred: node.op_type == "LayerNormalization",
        scale: has(0),
        bias: has(1),
    };
    let tensor = t.custom(node, kernel, &inputs, Type::F32, shape::extent(&x.shape))?;
    let mut y = Operand { tensor, dtype: x.dtype, shape: x.shape.clone() };
    for (i, factor) in factors.iter().filter(|_| !rows_of_one) {
        y.tensor = match i {
            0 => super::elementwise::multiply(t, node, &y, factor)?,
            _ => super::elementwise::add(t, node, &y, factor)?,
        };
    }
    t.define(node, 0, y.tensor)
}

fn softmax(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x = t.float(node, 0)?;
    let single_axis = t.graph.opset() >= 13;
    let rank = x.shape.len();
    let default = if single_axis { -1 } else { 1 };
    // Before opset 13, all dimensions from the axis on form one row, and the axis may be the rank.
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
