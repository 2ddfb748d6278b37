//! Matrix products.

use super::{activate, combine, input, operand, optional};
use crate::{
    ffi::{Binary, Home, Tensor},
    form::Form,
    kernels::Panels,
    ops::activation,
    shape,
    storage::is_f32,
    translate::{Operand, Outcome, Translator, refuse},
};
use sdrun_graph::{Node, ValueId};

/// `act(A * B + bias + addend)`, where both addends broadcast.
pub(super) fn matmul(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let a = input(t, node, 0)?;
    let (b, out) = (t.input_id(node, 1)?, t.output_shape(node, 0)?);
    let mut y = product(t, node, &a, b, node.int_or("transB", 0) != 0)?;
    for i in [2, 3] {
        if let Some(addend) = optional(t, node, i)? {
            y = combine(t, Binary::Add, (y, &out), (addend.tensor, &addend.shape), &out)?;
        }
    }
    if let Some(activation) = activation(node)? {
        y = activate(t, y, activation)?;
    }
    t.define(node, 0, y)
}

/// `alpha * A B' + beta * C`.
pub(super) fn gemm(t: &mut Translator<'_>, node: &Node) -> Outcome {
    if node.int_or("transA", 0) != 0 {
        return refuse("its first matrix is transposed");
    }
    let a = input(t, node, 0)?;
    let (b, out) = (t.input_id(node, 1)?, t.output_shape(node, 0)?);
    let (alpha, beta) = (node.float("alpha").unwrap_or(1.0), node.float("beta").unwrap_or(1.0));
    let mut y = product(t, node, &a, b, node.int_or("transB", 0) != 0)?;
    if alpha != 1.0 {
        y = t.builder.scale(y, alpha, 0.0)?;
    }
    if let Some(mut c) = optional(t, node, 2)?.filter(|_| beta != 0.0) {
        if beta != 1.0 {
            c.tensor = t.builder.scale(c.tensor, beta, 0.0)?;
        }
        y = combine(t, Binary::Add, (y, &out), (c.tensor, &c.shape), &out)?;
    }
    t.define(node, 0, y)
}

/// `A * B`, of the shape that stacks of matrices have in ONNX. ggml's product takes the second matrix transposed.
fn product(
    t: &mut Translator<'_>,
    node: &Node,
    a: &Operand,
    b_id: ValueId,
    transposed: bool,
) -> Outcome<Tensor> {
    let b_shape = t.shape(b_id)?;
    let (Some(split), Some(b_split)) = (a.shape.len().checked_sub(2), b_shape.len().checked_sub(2)) else {
        return refuse("an operand is no matrix");
    };
    if !is_f32(t.dtype(b_id)?) {
        return refuse("an operand is not float");
    }
    let (a_batch, b_batch) = (&a.shape[..split], &b_shape[..b_split]);
    let (rows, depth) = (a.shape[split], a.shape[split + 1]);
    let cols = b_shape[b_split + usize::from(!transposed)];
    let (count, b_count) = (shape::len(a_batch), shape::len(b_batch));
    if t.is_stored(b_id) {
        if b_count != 1 && b_batch != a_batch {
            return refuse("its batches would have to be repeated");
        }
        let blocks = t.blocks(shape::len(&b_shape)).and_then(|blocks| blocks.of_ggml(depth));
        let (form, type_) = match blocks {
            Some((blocks, type_)) => {
                let matrices = [b_count, cols, depth];
                (Form::Blocks { matrices, transposed: !transposed, blocks }, type_)
            }
            None if transposed => (Form::Plain, t.matrix_type()),
            None => {
                // Panels of one row each are the transposed matrices.
                let panels = Panels::columns([b_count, cols, depth], 1);
                (Form::Panels { panels, transposed: true, blocks: None }, t.matrix_type())
            }
        };
        let b = t.weight_at(b_id, form, type_, Home::Device)?;
        return multiply(t, a.tensor, (b, b_count), [count, rows, cols, depth]);
    }
    let view = t.view(b_id)?;
    let (mut steps, matrix) = (view.strides[..b_split].to_vec(), &view.strides[b_split..]);
    let matrix = if transposed { [matrix[0], matrix[1]] } else { [matrix[1], matrix[0]] };
    let mut batch = b_batch.to_vec();
    if b_count != 1 && b_batch != a_batch {
        let Some(repeated) = shape::broadcast_view(b_batch, &steps, a_batch) else {
            return refuse("its first operand would have to be repeated");
        };
        (batch, steps) = (a_batch.to_vec(), repeated);
    }
    let (dims, steps) = ([&batch[..], &[cols, depth]].concat(), [&steps[..], &matrix].concat());
    let b = match view.strides == shape::dense(&view.shape) && transposed && batch == b_batch {
        true => operand(t, b_id)?.tensor,
        false => t.strided(node, view.tensor, &dims, &steps, 0)?,
    };
    multiply(t, a.tensor, (b, shape::len(&batch)), [count, rows, cols, depth])
}

/// A stack of `count` matrices, `rows` x `depth`, times as many or one of `cols` x `depth`.
pub(crate) fn multiply(
    t: &mut Translator<'_>,
    a: Tensor,
    (b, b_count): (Tensor, usize),
    [count, rows, cols, depth]: [usize; 4],
) -> Outcome<Tensor> {
    let (rows, count) = if b_count == 1 { (rows * count, 1) } else { (rows, count) };
    let a = t.builder.reshape(a, [depth, rows, count, 1])?;
    let b = t.builder.reshape(b, [depth, cols, b_count, 1])?;
    Ok(t.builder.mul_mat(b, a)?)
}
