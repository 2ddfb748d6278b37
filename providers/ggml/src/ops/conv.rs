//! Convolution and pooling.

use super::Operator;
use crate::{
    ffi::{Tensor, Type},
    kernels::{Conv, DepthwiseConv, PackPanels, Pool, PoolKind, Window, panels_len},
    shape,
    storage::is_f32,
    translate::{Outcome, Translator, refuse},
    weights::Form,
};
use sdrun_graph::Node;

const POOL: &str = "float, one or two spatial dimensions, one output";

pub(super) const OPERATORS: &[Operator] = &[
    Operator {
        name: "Conv",
        takes: "float, one or two spatial dimensions, any groups, strides, dilations and padding",
        translate: conv,
    },
    Operator { name: "MaxPool", takes: POOL, translate: |t, n| pool(t, n, PoolKind::Max) },
    Operator { name: "AveragePool", takes: POOL, translate: average_pool },
];

fn conv(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let y = conv_tensor(t, node)?;
    t.define(node, 0, y)
}

/// The tensor of a convolution with bias.
pub(super) fn conv_tensor(t: &mut Translator<'_>, node: &Node) -> Outcome<Tensor> {
    let (x, filters_id) = (t.float(node, 0)?, t.input_id(node, 1)?);
    let filters_shape = t.shape(filters_id)?;
    if !is_f32(t.dtype(filters_id)?) {
        return refuse("its filters are not float");
    }
    let out = t.output_shape(node, 0)?;
    let (&[batch, _, ..], &[filters, channels, ..]) = (&x.shape[..], &filters_shape[..]) else {
        return refuse("an operand has fewer than three dimensions");
    };
    let (window, _) = window(node, &x.shape[2..], &out[2..], &filters_shape[2..])?;
    let groups = match usize::try_from(node.int_or("group", 1)) {
        Ok(groups) if groups > 0 && groups * channels == x.shape[1] && filters % groups == 0 => groups,
        _ => return refuse("its group does not divide the channels"),
    };
    let bias = t.optional_float(node, 2)?;
    let rows = filters / groups;
    let depthwise = channels == 1 && rows == 1;
    let type_ = t.matrix_type();
    let packed = |t: &mut Translator<'_>| {
        let depth = channels * window.kernel[0] * window.kernel[1];
        if t.is_stored(filters_id) {
            return t.weight(filters_id, Form::Panels { groups, rows, depth }, type_);
        }
        let plain = t.operand(filters_id)?.tensor;
        let extent = [panels_len(groups, rows, depth), 1, 1, 1];
        t.custom(node, PackPanels { groups, rows, depth }, &[plain], Type::F32, extent)
    };
    let weights = match (depthwise, t.is_stored(filters_id)) {
        (true, true) => t.weight(filters_id, Form::Plain, type_)?,
        (true, false) => t.operand(filters_id)?.tensor,
        (false, _) => packed(t)?,
    };
    let mut inputs = vec![x.tensor, weights];
    inputs.extend(bias.iter().map(|bias| bias.tensor));
    let (bias, extent) = (bias.is_some(), shape::extent(&out));
    if depthwise {
        let kernel = DepthwiseConv { batch, channels: groups, window, bias };
        t.custom(node, kernel, &inputs, Type::F32, extent)
    } else {
        let kernel = Conv { batch, groups, channels, filters: rows, window, bias };
        t.custom(node, kernel, &inputs, Type::F32, extent)
    }
}

fn average_pool(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let padded = node.int_or("count_include_pad", 0) != 0;
    pool(t, node, if padded { PoolKind::AverageWithPadding } else { PoolKind::Average })
}

fn pool(t: &mut Translator<'_>, node: &Node, kind: PoolKind) -> Outcome {
    if node.outputs.iter().flatten().count() > 1 {
        return refuse("it has a second output");
    }
    let x = t.float(node, 0)?;
    let out = t.output_shape(node, 0)?;
    let Some(kernel) = node.ints("kernel_shape") else { return refuse("it has no kernel_shape") };
    let kernel: Vec<usize> = kernel.iter().map(|k| usize::try_from(*k).unwrap_or(0)).collect();
    if x.shape.len() < 3 {
        return refuse("its input has fewer than three dimensions");
    }
    let (window, end_pad) = window(node, &x.shape[2..], &out[2..], &kernel)?;
    let planes = x.shape[0] * x.shape[1];
    let y =
        t.custom(node, Pool { kind, planes, window, end_pad }, &[x.tensor], Type::F32, shape::extent(&out))?;
    t.define(node, 0, y)
}

/// The window the attributes describe, and the padding at the end; one spatial dimension becomes the width of two.
fn window(node: &Node, input: &[usize], output: &[usize], kernel: &[usize]) -> Outcome<(Window, [usize; 2])> {
    let rank = input.len();
    if !(1..=2).contains(&rank) || output.len() != rank || kernel.len() != rank || kernel.contains(&0) {
        return refuse(format!("it has {rank} spatial dimensions"));
    }
    let numbers = |name: &str, count: usize, default: usize, least: usize| match node.ints(name) {
        None => Ok(vec![default; count]),
        Some(values) => {
            let numbers: Option<Vec<usize>> = values.iter().map(|v| usize::try_from(*v).ok()).collect();
            match numbers.filter(|n| n.len() == count && n.iter().all(|v| *v >= least)) {
                Some(numbers) => Ok(numbers),
                None => refuse(format!("its {name} are {values:?}")),
            }
        }
    };
    let strides = numbers("strides", rank, 1, 1)?;
    let dilations = numbers("dilations", rank, 1, 1)?;
    let pads = numbers("pads", 2 * rank, 0, 0)?;
    let (mut begin, mut end) = (pads[..rank].to_vec(), pads[rank..].to_vec());
    match node.str("auto_pad").unwrap_or("NOTSET") {
        "NOTSET" => {}
        "VALID" => {
            begin.fill(0);
            end.fill(0);
        }
        same @ ("SAME_UPPER" | "SAME_LOWER") => {
            for i in 0..rank {
                let reach = (output[i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1;
                let total = reach.saturating_sub(input[i]);
                begin[i] = if same == "SAME_UPPER" { total / 2 } else { total.div_ceil(2) };
                end[i] = total - begin[i];
            }
        }
        other => return refuse(format!("its auto_pad is {other:?}")),
    }
    let pair = |values: &[usize], missing: usize| match *values {
        [height, width] => [height, width],
        [width] => [missing, width],
        _ => [missing, missing],
    };
    let window = Window {
        input: pair(input, 1),
        output: pair(output, 1),
        kernel: pair(kernel, 1),
        stride: pair(&strides, 1),
        dilation: pair(&dilations, 1),
        pad: pair(&begin, 0),
    };
    Ok((window, pair(&end, 0)))
}
