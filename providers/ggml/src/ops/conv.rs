//! Convolution and pooling.

use super::{
    Operator,
    activation::{activate, activation},
    elementwise,
    layout::repeated,
};
use crate::{
    ffi::{Tensor, Type},
    form::Form,
    kernels::{Activation, Conv, DepthwiseNchw, Layout, Panels, Pool, PoolKind, Window},
    shape,
    simd::Level,
    storage::is_f32,
    translate::{Operand, Outcome, Translator, refuse},
};
use sdrun_graph::{Node, ValueId};

const POOL: &str = "float, one or two spatial dimensions, one output";

const CONV: &str = "float, one or two spatial dimensions, any groups, strides, dilations and padding";

pub(super) const OPERATORS: &[Operator] = &[
    Operator { name: "Conv", takes: CONV, translate: conv },
    Operator { name: "FusedConv", takes: CONV, translate: conv },
    Operator { name: "MaxPool", takes: POOL, translate: |t, n| pool(t, n, PoolKind::Max) },
    Operator { name: "AveragePool", takes: POOL, translate: average_pool },
];

/// The input and the filters, and their shapes.
pub(super) fn operands(t: &Translator<'_>, node: &Node) -> Outcome<[(ValueId, Vec<usize>); 2]> {
    let [x, filters] = [t.input_id(node, 0)?, t.input_id(node, 1)?];
    let shapes = [t.shape(x)?, t.shape(filters)?];
    if !is_f32(t.dtype(x)?) || !is_f32(t.dtype(filters)?) {
        return refuse("its input or its filters are not float");
    }
    let [x_shape, filters_shape] = shapes;
    Ok([(x, x_shape), (filters, filters_shape)])
}

/// `act(conv(X, W, B) + Z)`, where Z broadcasts.
fn conv(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let [(x_id, x_shape), (filters_id, filters_shape)] = operands(t, node)?;
    let out = t.output_shape(node, 0)?;
    let (&[batch, channels_in, ..], &[filters, channels, ..]) = (&x_shape[..], &filters_shape[..]) else {
        return refuse("an operand has fewer than three dimensions");
    };
    let (window, _) = window(node, &x_shape[2..], &out[2..], &filters_shape[2..])?;
    let groups = match usize::try_from(node.int_or("group", 1)) {
        Ok(groups) if groups > 0 && groups * channels == channels_in && filters % groups == 0 => groups,
        _ => return refuse("its group does not divide the channels"),
    };
    let (bias, addend) = (t.optional_float(node, 2)?, t.optional_float(node, 3)?);
    let (rows, act) = (filters / groups, activation(node)?);
    let per_channel = |shape: &[usize]| {
        let inner = out.len() - 1;
        let own = [&vec![1; out.len().saturating_sub(shape.len())][..], shape].concat();
        own.len() == out.len()
            && own[0] == batch
            && own[1] == filters
            && shape::len(&own[2..]) == 1
            && inner > 0
    };
    let shift = addend.clone().filter(|addend| per_channel(&addend.shape));
    let whole =
        addend.clone().filter(|addend| shift.is_none() && shape::len(&addend.shape) == shape::len(&out));
    let depthwise = channels == 1 && rows == 1;
    // Addends that do not fit into the kernel are added afterwards.
    let complete = addend.is_none() || (!depthwise && (shift.is_some() || whole.is_some()));
    let inside = act.filter(|_| complete);
    let extent = shape::extent(&out);
    let y = if depthwise {
        let weights = match t.is_stored(filters_id) {
            true => t.weight(filters_id, Form::Plain, t.matrix_type())?,
            false => t.operand(filters_id)?.tensor,
        };
        let mut inputs = vec![t.operand(x_id)?.tensor, weights];
        inputs.extend(bias.iter().map(|bias| bias.tensor));
        let kernel = DepthwiseNchw::new(batch, groups, window, bias.is_some(), inside);
        t.custom(node, kernel, &inputs, Type::F32, extent)?
    } else {
        let taps = window.kernel[0] * window.kernel[1];
        let (level, words) = (Level::detect(), t.words());
        let panels = Panels::filters(level, words, [groups, rows, channels * taps], taps);
        let (blocks, weights) = if t.is_stored(filters_id) {
            t.matrix(filters_id, panels, false)?
        } else {
            let plain = t.operand(filters_id)?;
            let layout = Layout { start: 0, row_step: channels * taps, depth_step: 1 };
            let stride = (rows * channels * taps) as isize;
            (None, t.panels(node, plain.tensor, panels, layout, &[groups], &[stride])?)
        };
        let (x, repeat) = repeated(t, x_id)?;
        let mut kernel = Conv::new(level, batch, panels, window, repeat);
        kernel.blocks = blocks;
        kernel.bias = bias.is_some();
        kernel.activation = inside;
        let mut inputs = vec![x, weights];
        inputs.extend(bias.iter().map(|bias| bias.tensor));
        if complete {
            (kernel.shift, kernel.addend) = (shift.is_some(), whole.is_some());
            inputs.extend(addend.iter().map(|addend| addend.tensor));
        }
        t.custom(node, kernel, &inputs, Type::F32, extent)?
    };
    let y = add_after(t, node, y, &out, addend.filter(|_| !complete), act)?;
    t.define(node, 0, y)
}

/// `act(y + addend)` if there is an addend. Otherwise `y`, to which the activation is already applied.
pub(super) fn add_after(
    t: &mut Translator<'_>,
    node: &Node,
    y: Tensor,
    out: &[usize],
    addend: Option<Operand>,
    act: Option<Activation>,
) -> Outcome<Tensor> {
    let Some(addend) = addend else { return Ok(y) };
    let sum = Operand { tensor: y, dtype: addend.dtype, shape: out.to_vec() };
    let y = elementwise::add(t, node, &sum, &addend)?;
    match act {
        Some(act) => activate(t, node, y, out, act),
        None => Ok(y),
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

/// The window that the attributes describe, and the padding at the end. One spatial dimension becomes the width of two.
pub(crate) fn window(
    node: &Node,
    input: &[usize],
    output: &[usize],
    kernel: &[usize],
) -> Outcome<(Window, [usize; 2])> {
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
