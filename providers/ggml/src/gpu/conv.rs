//! Convolution.

use super::{activate, activation, combine, operand, operand_in, optional};
use crate::{
    ffi::Binary,
    shape,
    translate::{Outcome, Translator, refuse},
};
use sdrun_graph::Node;

/// `act(conv(X, W, B) + Z)` over one or two spatial dimensions, without groups.
pub(super) fn conv(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (x_id, w_id) = (t.input_id(node, 0)?, t.input_id(node, 1)?);
    let (x_shape, w_shape, out) = (t.shape(x_id)?, t.shape(w_id)?, t.output_shape(node, 0)?);
    let rank = x_shape.len().saturating_sub(2);
    let plain = matches!(rank, 1 | 2)
        && node.int_or("group", 1) == 1
        && matches!(node.str("auto_pad"), None | Some("NOTSET"))
        && w_shape[1] == x_shape[1];
    if !plain {
        return refuse("it is no plain convolution of images");
    }
    // Of the width, then of the height.
    let numbers = |name: &str, count: usize, default: i64| -> Outcome<Vec<usize>> {
        let values = node.ints(name).map_or_else(|| vec![default; count], <[i64]>::to_vec);
        match values.iter().rev().map(|n| usize::try_from(*n).ok()).collect::<Option<Vec<_>>>() {
            Some(values) if values.len() == count => Ok(values),
            _ => refuse(format!("its {name} are {values:?}")),
        }
    };
    let pair = |values: &[usize], missing: usize| [values[0], values.get(1).copied().unwrap_or(missing)];
    let stride = pair(&numbers("strides", rank, 1)?, 1);
    let dilation = pair(&numbers("dilations", rank, 1)?, 1);
    let pads = numbers("pads", 2 * rank, 0)?;
    let (after, before) = (pair(&pads[..rank], 0), pair(&pads[rank..], 0));
    let image = |shape: &[usize]| match shape[..] {
        [n, c, w] => [w, 1, c, n],
        _ => shape::extent(shape),
    };
    let filters = t.matrix_type();
    let (x, w) = (operand(t, x_id)?, operand_in(t, w_id, filters)?);
    let (bias, addend) = (optional(t, node, 2)?, optional(t, node, 3)?);
    let mut x = t.builder.reshape(x.tensor, image(&x_shape))?;
    let w = t.builder.reshape(w.tensor, image(&w_shape))?;
    let mut pad = before;
    if before != after {
        let zeros = [[before[0], after[0]], [before[1], after[1]], [0; 2], [0; 2]];
        (x, pad) = (t.builder.pad(x, zeros)?, [0; 2]);
    }
    let mut y = t.builder.conv_2d(w, x, stride, pad, dilation)?;
    if t.builder.extent(y) != image(&out) {
        return refuse("ggml makes another shape of it");
    }
    if let Some(bias) = bias {
        let bias = t.builder.reshape(bias.tensor, [1, 1, out[1], 1])?;
        y = t.builder.binary(Binary::Add, y, bias)?;
    }
    if let Some(addend) = addend {
        y = t.builder.reshape(y, shape::extent(&out))?;
        y = combine(t, Binary::Add, (y, &out), (addend.tensor, &addend.shape), &out)?;
    }
    if let Some(activation) = activation(node)? {
        y = activate(t, y, activation)?;
    }
    t.define(node, 0, y)
}
