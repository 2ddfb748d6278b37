//! Normalization.

use super::{activate, combine, input, optional};
use crate::{
    ffi::{Binary, Tensor},
    ops::activation,
    shape,
    translate::{Operand, Outcome, Translator, refuse},
};
use sdrun_graph::Node;

pub(super) fn instance_norm(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x = input(t, node, 0)?;
    let channels = x.shape.get(1).copied().unwrap_or(0);
    let y = normalize(t, node, &x, channels)?;
    let factors = [input(t, node, 1)?, input(t, node, 2)?];
    let y = affine(t, y, &x, &factors)?;
    t.define(node, 0, y)
}

/// A group normalization. The fused operator can have factors for groups, then factors for channels, and an activation.
pub(super) fn group_norm(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x = input(t, node, 0)?;
    let groups = node.int("num_groups").and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
    let mut y = normalize(t, node, &x, groups)?;
    match (optional(t, node, 3)?, optional(t, node, 4)?) {
        (Some(scale), Some(bias)) => y = affine(t, y, &x, &[scale, bias])?,
        (None, None) => {}
        _ => return refuse("it has factors of the groups without addends, or the reverse"),
    }
    let factors = [input(t, node, 1)?, input(t, node, 2)?];
    y = affine(t, y, &x, &factors)?;
    if let Some(activation) = activation(node)? {
        y = activate(t, y, activation)?;
    }
    t.define(node, 0, y)
}

fn normalize(t: &mut Translator<'_>, node: &Node, x: &Operand, groups: usize) -> Outcome<Tensor> {
    let &[batch, channels, ref inner @ ..] = &x.shape[..] else {
        return refuse("its input has fewer than two dimensions");
    };
    if groups == 0 || channels % groups != 0 {
        return refuse(format!("{groups} groups do not divide {channels} channels"));
    }
    let x = t.builder.reshape(x.tensor, [shape::len(inner), 1, channels, batch])?;
    Ok(t.builder.group_norm(x, groups, node.float("epsilon").unwrap_or(1e-5))?)
}

/// `y * scale + bias`. Each factor has one element for each group or channel of `x`.
fn affine(t: &mut Translator<'_>, mut y: Tensor, x: &Operand, factors: &[Operand; 2]) -> Outcome<Tensor> {
    let (batch, channels, all) = (x.shape[0], x.shape[1], shape::len(&x.shape));
    for (factor, op) in factors.iter().zip([Binary::Mul, Binary::Add]) {
        let count = shape::len(&factor.shape);
        if channels % count != 0 {
            return refuse("its factors have neither one element for each group nor for each channel");
        }
        y = t.builder.reshape(y, [all / batch / count, count, batch, 1])?;
        let factor = t.builder.reshape(factor.tensor, [1, count, 1, 1])?;
        y = t.builder.binary(op, y, factor)?;
    }
    Ok(y)
}

pub(super) fn layer_norm(t: &mut Translator<'_>, node: &Node) -> Outcome {
    if node.outputs.iter().flatten().count() > 1 {
        return refuse("it has a second output");
    }
    let x = input(t, node, 0)?;
    let Some(axis) = shape::axis(node.int_or("axis", -1), x.shape.len()) else {
        return refuse("its axis is out of range");
    };
    let cols = shape::len(&x.shape[axis..]);
    let rows = t.builder.reshape(x.tensor, [cols, shape::len(&x.shape) / cols, 1, 1])?;
    let centred = node.op_type == "LayerNormalization";
    let y = t.builder.norm(rows, node.float("epsilon").unwrap_or(1e-5), centred)?;
    let mut y = t.builder.reshape(y, shape::extent(&x.shape))?;
    for (i, op) in [(1, Binary::Mul), (2, Binary::Add)] {
        if let Some(factor) = optional(t, node, i)? {
            y = combine(t, op, (y, &x.shape), (factor.tensor, &factor.shape), &x.shape)?;
        }
    }
    t.define(node, 0, y)
}
