//! Matrix products.

use super::Operator;
use crate::{
    ffi::{Tensor, Type},
    shape,
    storage::is_f32,
    translate::{Outcome, Translator, refuse},
    weights::Form,
};
use sdrun_graph::{Node, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    Operator { name: "MatMul", takes: "float, any ranks and batch shapes that broadcast", translate: matmul },
    Operator { name: "Gemm", takes: "float", translate: gemm },
];

/// ggml's `mul_mat` takes the second matrix transposed: rows of `depth` elements, one for each column.
fn matmul(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let y = product(t, node, false)?;
    t.define(node, 0, y)
}

/// The product of a node's first two inputs. A second one that is given transposed is a matrix.
pub(super) fn product(t: &mut Translator<'_>, node: &Node, given_transposed: bool) -> Outcome<Tensor> {
    let (a_id, b_id) = (t.input_id(node, 0)?, t.input_id(node, 1)?);
    let (mut a_shape, mut b_shape) = (t.shape(a_id)?, t.shape(b_id)?);
    if !is_f32(t.dtype(a_id)?) || !is_f32(t.dtype(b_id)?) {
        return refuse("its matrices are not float");
    }
    if a_shape.is_empty() || b_shape.is_empty() {
        return refuse("an operand has no dimension");
    }
    if a_shape.len() == 1 {
        a_shape.insert(0, 1);
    }
    if b_shape.len() == 1 {
        b_shape.push(1);
    }
    let (a_batch, &[rows, depth]) = split_matrix(&a_shape) else {
        return refuse("an operand is not a matrix");
    };
    if given_transposed {
        b_shape.reverse();
    }
    let (b_batch, &[_, cols]) = split_matrix(&b_shape) else { return refuse("an operand is not a matrix") };
    let a = t.float(node, 0)?.tensor;
    let b = match given_transposed {
        true if b_shape.len() != 2 => return refuse("its second operand is not a matrix"),
        true if t.is_stored(b_id) => t.weight(b_id, Form::Plain, t.matrix_type())?,
        true => t.operand(b_id)?.tensor,
        false => transposed(t, node, b_id, &b_shape)?,
    };
    Ok(if shape::len(b_batch) == 1 {
        // One matrix for all batches: they are more rows.
        let a = t.builder.reshape(a, [depth, rows * shape::len(a_batch), 1, 1])?;
        let b = t.builder.reshape(b, [depth, cols, 1, 1])?;
        t.builder.mul_mat(b, a)?
    } else {
        let out = t.output_shape(node, 0)?;
        // The output lacks the dimensions that one-dimensional operands were given above.
        let (a_rank, b_rank) = (t.shape(a_id)?.len(), t.shape(b_id)?.len());
        let batch = &out[..out.len() - usize::from(a_rank > 1) - usize::from(b_rank > 1)];
        let count = shape::len(batch);
        let a = repeat_batch(t, node, a, a_batch, &[rows, depth], batch)?;
        let b = repeat_batch(t, node, b, b_batch, &[cols, depth], batch)?;
        let a = t.builder.reshape(a, [depth, rows, count, 1])?;
        let b = t.builder.reshape(b, [depth, cols, count, 1])?;
        t.builder.mul_mat(b, a)?
    })
}

fn split_matrix(shape: &[usize]) -> (&[usize], &[usize]) {
    shape.split_at(shape.len().saturating_sub(2))
}

/// The tensor of a stack of matrices with each matrix transposed.
fn transposed(t: &mut Translator<'_>, node: &Node, id: ValueId, shape: &[usize]) -> Outcome<Tensor> {
    let (batch, &[rows, cols]) = split_matrix(shape) else { return refuse("an operand is not a matrix") };
    if t.is_stored(id) {
        let form = Form::Transposed { batch: shape::len(batch), rows, cols };
        return t.weight(id, form, t.matrix_type());
    }
    let rank = shape.len();
    let mut swapped: Vec<usize> = (0..rank).collect();
    swapped.swap(rank - 1, rank - 2);
    // Where the graph has just transposed it, one transposition does for both; often none is left.
    if let Some((source, perm)) = transposition(t, id).filter(|(_, perm)| perm.len() == rank) {
        let composed: Vec<usize> = swapped.iter().map(|axis| perm[*axis]).collect();
        let source_shape = t.shape(source)?;
        let source = t.operand(source)?.tensor;
        return t.transpose(node, source, &source_shape, &composed);
    }
    let tensor = t.operand(id)?.tensor;
    t.transpose(node, tensor, shape, &swapped)
}

/// The input and the permutation of the Transpose that computes a value.
fn transposition(t: &Translator<'_>, id: ValueId) -> Option<(ValueId, Vec<usize>)> {
    let node = t.producer(id).filter(|node| node.op_type == "Transpose" && node.domain.is_empty())?;
    let source = node.input(0)?;
    let rank = t.shape(source).ok()?.len();
    Some((source, super::layout::permutation(node, rank)?))
}

/// Repeats a stack of matrices to the batch shape of the product.
fn repeat_batch(
    t: &mut Translator<'_>,
    node: &Node,
    tensor: Tensor,
    own: &[usize],
    matrix: &[usize],
    batch: &[usize],
) -> Outcome<Tensor> {
    let (from, to) = ([own, matrix].concat(), [batch, matrix].concat());
    if shape::len(&from) == shape::len(&to) {
        return Ok(tensor);
    }
    let Some(strides) = shape::broadcast_strides(&from, &to) else {
        return refuse("its batches do not broadcast");
    };
    t.strided(node, tensor, &to, &strides, 0)
}

/// `alpha * A' B' + beta * C`.
fn gemm(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (a, b_id) = (t.float(node, 0)?, t.input_id(node, 1)?);
    let b_shape = t.shape(b_id)?;
    let (&[a0, a1], &[b0, b1]) = (&a.shape[..], &b_shape[..]) else {
        return refuse("an operand is not a matrix");
    };
    if !is_f32(t.dtype(b_id)?) {
        return refuse("its matrices are not float");
    }
    let flag = |name| node.int_or(name, 0) != 0;
    let (a, rows, depth) = if flag("transA") {
        (t.transpose(node, a.tensor, &a.shape, &[1, 0])?, a1, a0)
    } else {
        (a.tensor, a0, a1)
    };
    let (b, cols) = if !flag("transB") {
        (transposed(t, node, b_id, &b_shape)?, b1)
    } else if t.is_stored(b_id) {
        (t.weight(b_id, Form::Plain, t.matrix_type())?, b0)
    } else {
        (t.operand(b_id)?.tensor, b0)
    };
    let a = t.builder.reshape(a, [depth, rows, 1, 1])?;
    let b = t.builder.reshape(b, [depth, cols, 1, 1])?;
    let mut y = t.builder.mul_mat(b, a)?;
    let alpha = node.float("alpha").unwrap_or(1.0);
    if alpha != 1.0 {
        y = t.builder.scale(y, alpha, 0.0)?;
    }
    let beta = node.float("beta").unwrap_or(1.0);
    if let Some(mut c) = t.optional_float(node, 2)?.filter(|_| beta != 0.0) {
        if beta != 1.0 {
            c.tensor = t.builder.scale(c.tensor, beta, 0.0)?;
        }
        let product = crate::translate::Operand { tensor: y, dtype: c.dtype, shape: vec![rows, cols] };
        y = super::elementwise::add(t, node, &product, &c)?;
    }
    debug_assert_eq!(t.builder.type_of(y), Type::F32);
    t.define(node, 0, y)
}
