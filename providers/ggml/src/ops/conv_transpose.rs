//! Transposed convolution: a matrix product whose overlapping columns are then summed.

use super::{Operator, conv::operands, conv::window, matmul};
use crate::{
    ffi::Type,
    kernels::OverlapAdd,
    shape,
    translate::{Outcome, Translator, View, refuse},
};
use sdrun_graph::Node;

pub(super) const OPERATORS: &[Operator] = &[Operator {
    name: "ConvTranspose",
    takes: "float, one or two spatial dimensions, any groups, strides, dilations and padding",
    translate: conv_transpose,
}];

fn conv_transpose(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let [(x_id, x_shape), (filters_id, filters_shape)] = operands(t, node)?;
    let out = t.output_shape(node, 0)?;
    let (&[batch, channels_in, ref input @ ..], &[channels, filters, ref kernel @ ..]) =
        (&x_shape[..], &filters_shape[..])
    else {
        return refuse("an operand has fewer than three dimensions");
    };
    let groups = match usize::try_from(node.int_or("group", 1)) {
        Ok(groups) if groups > 0 && channels_in % groups == 0 && channels == channels_in => groups,
        _ => return refuse("its group does not divide the channels"),
    };
    // The window moves over the output. It has one place for each element of the input.
    let (mut window, _) = window(node, &out[2..], input, kernel)?;
    if node.attributes.contains_key("output_shape")
        || !matches!(node.str("auto_pad").unwrap_or("NOTSET"), "NOTSET" | "VALID")
    {
        // The output size determines the padding: half of the distance that windows reach beyond the output, plus the output padding.
        let added = node.ints("output_padding").unwrap_or_default();
        let upper = node.str("auto_pad") == Some("SAME_UPPER");
        let missing = 2 - input.len();
        for axis in missing..2 {
            let added = added.get(axis - missing).copied().and_then(|v| usize::try_from(v).ok()).unwrap_or(0);
            let reach = (window.output[axis] - 1) * window.stride[axis]
                + (window.kernel[axis] - 1) * window.dilation[axis]
                + 1
                + added;
            let total = reach.saturating_sub(window.input[axis]);
            window.pad[axis] = if upper { total / 2 } else { total.div_ceil(2) };
        }
    }
    let (taps, depth) = (window.kernel[0] * window.kernel[1], channels_in / groups);
    let (rows, places) = (filters * taps, shape::len(input));
    let weights = t.operand(filters_id)?;
    // The filters of a group, transposed: for each filter and tap, one factor for each channel.
    let left = View {
        tensor: weights.tensor,
        shape: vec![groups, rows, depth],
        strides: vec![(depth * rows) as isize, 1, rows as isize],
    };
    let right = (x_id, vec![batch, groups, depth, places], false);
    let product = [batch, groups, rows, places];
    let columns = matmul::product(t, node, (left, None), right, &product, [None, None], None)?;
    let bias = t.optional_float(node, 2)?;
    let mut inputs = vec![columns];
    inputs.extend(bias.iter().map(|bias| bias.tensor));
    let channels = groups * filters;
    let kernel = OverlapAdd { planes: batch * channels, channels, window, bias: bias.is_some() };
    let y = t.custom(node, kernel, &inputs, Type::F32, shape::extent(&out))?;
    t.define(node, 0, y)
}
