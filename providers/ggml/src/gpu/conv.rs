//! Convolution.

use super::{activate, combine, operand, operand_in, optional};
use crate::{
    ffi::Binary,
    ops::{activation, window},
    shape,
    translate::{Outcome, Translator, refuse},
};
use sdrun_graph::Node;

/// `act(conv(X, W, B) + Z)` over one or two spatial dimensions, without groups.
pub(super) fn conv(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (x_id, w_id) = (t.input_id(node, 0)?, t.input_id(node, 1)?);
    let (x_shape, w_shape, out) = (t.shape(x_id)?, t.shape(w_id)?, t.output_shape(node, 0)?);
    let plain = matches!(x_shape.len(), 3 | 4)
        && node.int_or("group", 1) == 1
        && matches!(node.str("auto_pad"), None | Some("NOTSET"))
        && w_shape[1] == x_shape[1];
    if !plain {
        return refuse("it is no plain convolution of images");
    }
    let (window, after) = window(node, &x_shape[2..], &out[2..], &w_shape[2..])?;
    let before = window.pad;
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
        let zeros = [[before[1], after[1]], [before[0], after[0]], [0; 2], [0; 2]];
        (x, pad) = (t.builder.pad(x, zeros)?, [0; 2]);
    }
    let mut y = t.builder.conv_2d(w, x, window.stride, pad, window.dilation)?;
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
