//! Operators in ggml's own terms, for devices besides the CPU: our kernels run on the CPU alone. What is refused here,
//! and what the device says it does not run, is left to the CPU, with copies there and back.

use crate::{
    ffi::{Binary, Home, Tensor, Type, product::Words},
    kernels::Panels,
    shape,
    storage::is_f32,
    translate::{Outcome, Translator, refuse},
    weights::Form,
};
use sdrun_graph::{Node, ValueId};

type Translate = fn(&mut Translator<'_>, &Node) -> Outcome;

/// How a node of the default domain is said.
pub(crate) fn find(node: &Node) -> Option<Translate> {
    if !matches!(&node.domain[..], "" | "ai.onnx") {
        return None;
    }
    Some(match &node.op_type[..] {
        "Add" => |t, n| binary(t, n, Binary::Add),
        "Sub" => |t, n| binary(t, n, Binary::Sub),
        "Mul" => |t, n| binary(t, n, Binary::Mul),
        "Div" => |t, n| binary(t, n, Binary::Div),
        "Conv" => conv,
        "MatMul" => matmul,
        "InstanceNormalization" => instance_norm,
        "Transpose" => transpose,
        "Concat" => concat,
        _ => return None,
    })
}

/// Makes `tensor` the node's output, unless the device does not run it.
fn finish(t: &mut Translator<'_>, node: &Node, tensor: Tensor) -> Outcome {
    if !t.builder.device_runs(tensor) {
        return refuse("the device does not run it");
    }
    t.define(node, 0, tensor)
}

/// A floating-point operand of `node`; weights come from the device's memory.
fn operand(t: &mut Translator<'_>, id: ValueId) -> Outcome<Tensor> {
    if !is_f32(t.dtype(id)?) {
        return refuse("an operand is not float");
    }
    if t.is_stored(id) {
        t.weight_at(id, Form::Plain, Type::F32, Home::Device)
    } else {
        Ok(t.operand(id)?.tensor)
    }
}

fn four(dims: &[usize]) -> Outcome<[usize; 4]> {
    if dims.len() > 4 { refuse("it has more than four dimensions") } else { Ok(shape::extent(dims)) }
}

fn binary(t: &mut Translator<'_>, node: &Node, op: Binary) -> Outcome {
    let (mut a, mut b) = (t.input_id(node, 0)?, t.input_id(node, 1)?);
    let out = t.output_shape(node, 0)?;
    if t.shape(a)? != out && matches!(op, Binary::Add | Binary::Mul) {
        std::mem::swap(&mut a, &mut b);
    }
    if t.shape(a)? != out {
        return refuse("its first operand would have to be repeated");
    }
    let (whole, part) = (four(&out)?, four(&t.shape(b)?)?);
    let (x, y) = (operand(t, a)?, operand(t, b)?);
    let (x, y) = (t.builder.reshape(x, whole)?, t.builder.reshape(y, part)?);
    let z = t.builder.binary(op, x, y)?;
    finish(t, node, z)
}

fn conv(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (x_id, w_id) = (t.input_id(node, 0)?, t.input_id(node, 1)?);
    let (x_shape, w_shape, out) = (t.shape(x_id)?, t.shape(w_id)?, t.output_shape(node, 0)?);
    let two = |name: &str, default: i64| -> Outcome<[usize; 2]> {
        let numbers = node.ints(name).map_or_else(|| vec![default; 2], <[i64]>::to_vec);
        match numbers[..] {
            [h, w] if h >= 0 && w >= 0 => Ok([w as usize, h as usize]),
            _ => refuse(format!("its {name} are {numbers:?}")),
        }
    };
    let pads = node.ints("pads").map_or_else(|| vec![0; 4], <[i64]>::to_vec);
    let pad = match pads[..] {
        [top, left, bottom, right] if top == bottom && left == right && top >= 0 && left >= 0 => {
            [left as usize, top as usize]
        }
        _ => return refuse(format!("its pads are {pads:?}")),
    };
    let plain = x_shape.len() == 4
        && node.int_or("group", 1) == 1
        && matches!(node.str("auto_pad"), None | Some("NOTSET"))
        && w_shape[1] == x_shape[1];
    if !plain {
        return refuse("it is no plain convolution of images");
    }
    let x = operand(t, x_id)?;
    let w = match t.is_stored(w_id) && is_f32(t.dtype(w_id)?) {
        true => t.weight_at(w_id, Form::Plain, t.matrix_type(), Home::Device)?,
        false => operand(t, w_id)?,
    };
    let (x, w) = (t.builder.reshape(x, four(&x_shape)?)?, t.builder.reshape(w, four(&w_shape)?)?);
    let mut y = t.builder.conv_2d(w, x, two("strides", 1)?, pad, two("dilations", 1)?)?;
    if !t.builder.device_runs(y) || t.builder.extent(y) != four(&out)? {
        return refuse("the device does not run it");
    }
    if let Some(bias) = node.input(2) {
        let bias = operand(t, bias)?;
        let bias = t.builder.reshape(bias, [1, 1, out[1], 1])?;
        y = t.builder.binary(Binary::Add, y, bias)?;
    }
    finish(t, node, y)
}

/// `mul_mat` takes the second matrix transposed.
fn matmul(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (a_id, b_id) = (t.input_id(node, 0)?, t.input_id(node, 1)?);
    let (a_shape, b_shape) = (t.shape(a_id)?, t.shape(b_id)?);
    let (rank, b_rank) = (a_shape.len(), b_shape.len());
    if rank < 2 || b_rank < 2 || !is_f32(t.dtype(b_id)?) {
        return refuse("an operand is no matrix");
    }
    let (rows, depth, cols) = (a_shape[rank - 2], a_shape[rank - 1], b_shape[b_rank - 1]);
    let (a_count, b_count) = (shape::len(&a_shape[..rank - 2]), shape::len(&b_shape[..b_rank - 2]));
    if b_count != 1 && a_shape[..rank - 2] != b_shape[..b_rank - 2] {
        return refuse("its batches would have to be repeated");
    }
    let b = if t.is_stored(b_id) {
        let blocks = t.blocks(shape::len(&b_shape)).and_then(|blocks| blocks.of_ggml(depth));
        let (form, type_) = match blocks {
            Some((blocks, type_)) => {
                (Form::Blocks { matrices: [b_count, cols, depth], transposed: true, blocks }, type_)
            }
            None => {
                // Panels of one row each are the transposed matrices.
                let panels =
                    Panels { groups: b_count, rows: cols, depth, block: 1, words: Words::F32, taps: 1 };
                (Form::Panels { panels, transposed: true, blocks: None }, t.matrix_type())
            }
        };
        t.weight_at(b_id, form, type_, Home::Device)?
    } else {
        let b = operand(t, b_id)?;
        let b = t.builder.reshape(b, [cols, depth, b_count, 1])?;
        t.builder.permute(b, [1, 0, 2, 3])?
    };
    let a = operand(t, a_id)?;
    let (a, b) = if b_count == 1 {
        (t.builder.reshape(a, [depth, rows * a_count, 1, 1])?, t.builder.reshape(b, [depth, cols, 1, 1])?)
    } else {
        (t.builder.reshape(a, [depth, rows, a_count, 1])?, t.builder.reshape(b, [depth, cols, b_count, 1])?)
    };
    let y = t.builder.mul_mat(b, a)?;
    finish(t, node, y)
}

fn instance_norm(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x_id = t.input_id(node, 0)?;
    let dims = t.shape(x_id)?;
    if dims.len() < 3 {
        return refuse("its input has fewer than three dimensions");
    }
    let (batch, channels, inner) = (dims[0], dims[1], shape::len(&dims[2..]));
    let x = operand(t, x_id)?;
    let x = t.builder.reshape(x, [inner, 1, channels, batch])?;
    let y = t.builder.group_norm(x, channels, node.float("epsilon").unwrap_or(1e-5))?;
    if !t.builder.device_runs(y) {
        return refuse("the device does not run it");
    }
    let mut factor = |i: usize| -> Outcome<Tensor> {
        let id = t.input_id(node, i)?;
        let tensor = operand(t, id)?;
        Ok(t.builder.reshape(tensor, [1, 1, channels, 1])?)
    };
    let (scale, bias) = (factor(1)?, factor(2)?);
    let y = t.builder.binary(Binary::Mul, y, scale)?;
    let y = t.builder.binary(Binary::Add, y, bias)?;
    finish(t, node, y)
}

fn transpose(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let id = t.input_id(node, 0)?;
    let dims = t.shape(id)?;
    let rank = dims.len();
    let default: Vec<i64> = (0..rank as i64).rev().collect();
    let perm: Option<Vec<usize>> =
        node.ints("perm").unwrap_or(&default).iter().map(|axis| shape::axis(*axis, rank)).collect();
    let Some(perm) = perm.filter(|perm| perm.len() == rank && rank <= 4) else {
        return refuse("it has more than four dimensions");
    };
    let x = operand(t, id)?;
    let x = t.builder.reshape(x, four(&dims)?)?;
    // Innermost first, and the other way round: where each dimension goes.
    let mut axes = [0, 1, 2, 3];
    for (to, from) in perm.iter().enumerate() {
        axes[rank - 1 - from] = rank - 1 - to;
    }
    let y = t.builder.permute(x, axes)?;
    finish(t, node, y)
}

fn concat(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let out = t.output_shape(node, 0)?;
    let Some(axis) = node.int("axis").and_then(|axis| shape::axis(axis, out.len())) else {
        return refuse("it has no axis");
    };
    four(&out)?;
    let mut parts = Vec::new();
    for i in 0..node.inputs.len() {
        let id = t.input_id(node, i)?;
        let (dims, tensor) = (t.shape(id)?, operand(t, id)?);
        parts.push(t.builder.reshape(tensor, four(&dims)?)?);
    }
    let Some((first, rest)) = parts.split_first() else { return refuse("it has no inputs") };
    let mut y = *first;
    for part in rest {
        y = t.builder.concat(y, *part, out.len() - 1 - axis)?;
    }
    finish(t, node, y)
}
