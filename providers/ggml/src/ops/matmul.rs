//! Matrix products.

use super::{
    Operator,
    activation::{activate, activation},
    elementwise,
};
use crate::{
    ffi::{Tensor, Type},
    gpu,
    kernels::{Activation, Gemm, Layout, Panels, Patches},
    shape,
    simd::{
        Level,
        product::{DEPTH, Taps},
    },
    storage::is_f32,
    translate::{Operand, Outcome, Translator, View, refuse},
};
use sdrun_graph::{Node, ValueId};

const MATMUL: &str = "float, any ranks and batch shapes that broadcast";

pub(super) const OPERATORS: &[Operator] = &[
    Operator { name: "MatMul", takes: MATMUL, translate: matmul },
    Operator { name: "FusedMatMul", takes: MATMUL, translate: matmul },
    Operator { name: "Gemm", takes: "float", translate: gemm },
];

/// `act(A * B + bias + addend)`, where `bias` has one element for each column and `addend` broadcasts to the output.
fn matmul(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (a, b) = (matrix(t, node, 0)?, t.input_id(node, 1)?);
    if !is_f32(t.dtype(b)?) {
        return refuse("its matrices are not float");
    }
    let mut b_shape = t.shape(b)?;
    if b_shape.len() == 1 {
        b_shape.push(1);
    }
    let transposed = node.int_or("transB", 0) != 0;
    let out = t.output_shape(node, 0)?;
    let (bias, addend) = (t.optional_float(node, 2)?, t.optional_float(node, 3)?);
    let y = product(t, node, (a, None), (b, b_shape, transposed), &out, [bias, addend], activation(node)?)?;
    t.define(node, 0, y)
}

/// `alpha * A' B' + beta * C`.
fn gemm(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (mut a, b) = (matrix(t, node, 0)?, t.input_id(node, 1)?);
    let (b_shape, out) = (t.shape(b)?, t.output_shape(node, 0)?);
    if a.shape.len() != 2 || b_shape.len() != 2 {
        return refuse("an operand is not a matrix");
    }
    if !is_f32(t.dtype(b)?) {
        return refuse("its matrices are not float");
    }
    let flag = |name| node.int_or(name, 0) != 0;
    if flag("transA") {
        a.shape.reverse();
        a.strides.reverse();
    }
    let (alpha, beta) = (node.float("alpha").unwrap_or(1.0), node.float("beta").unwrap_or(1.0));
    let mut c = t.optional_float(node, 2)?.filter(|_| beta != 0.0);
    if let Some(c) = c.as_mut().filter(|_| beta != 1.0) {
        c.tensor = t.builder.scale(c.tensor, beta, 0.0)?;
    }
    let b = (b, b_shape, flag("transB"));
    let y = if alpha == 1.0 {
        let row = c.as_ref().is_some_and(|c| is_row(&c.shape, &out));
        let addends = if row { [c, None] } else { [None, c] };
        product(t, node, (a, None), b, &out, addends, None)?
    } else {
        let y = product(t, node, (a, None), b, &out, [None, None], None)?;
        let y = t.builder.scale(y, alpha, 0.0)?;
        match c {
            Some(c) => elementwise::add(t, node, &Operand { tensor: y, dtype: c.dtype, shape: out }, &c)?,
            None => y,
        }
    };
    t.define(node, 0, y)
}

/// `A * B'` for contiguous stacks `[batch, rows, depth]` and `[batch, cols, depth]`. On devices it is ggml's own product.
pub(super) fn stack_product(
    t: &mut Translator<'_>,
    node: &Node,
    a: Tensor,
    b: Tensor,
    [batch, rows, cols, depth]: [usize; 4],
) -> Outcome<Tensor> {
    if t.target().gpu().is_some() {
        return gpu::multiply(t, a, (b, batch), [batch, rows, cols, depth]);
    }
    let level = Level::detect();
    let panels = Panels::right(level, t.words(), [batch, cols, depth]);
    let layout = Layout { start: 0, row_step: depth, depth_step: 1 };
    let b = t.panels(node, b, panels, layout, &[batch], &[(cols * depth) as isize])?;
    let kernel = Gemm::dense(level, batch, rows, panels);
    t.custom(node, kernel, &[a, b], Type::F32, [cols, rows, batch, 1])
}

/// An operand of a product, as a matrix at least.
fn matrix(t: &mut Translator<'_>, node: &Node, i: usize) -> Outcome<View> {
    let id = t.input_id(node, i)?;
    if !is_f32(t.dtype(id)?) {
        return refuse("its matrices are not float");
    }
    let mut view = t.view(id)?;
    match view.shape.len() {
        0 => return refuse("an operand has no dimension"),
        1 => {
            view.shape.insert(0, 1);
            view.strides.insert(0, 0);
        }
        _ => {}
    }
    Ok(view)
}

fn is_row(shape: &[usize], out: &[usize]) -> bool {
    shape::len(shape) == out[out.len() - 1] && shape.last() == out.last()
}

/// The right operand: a value, its shape (a matrix at least), and whether its matrices are transposed.
pub(super) type Right = (ValueId, Vec<usize>, bool);

/// The left operand, or a left operand of this shape that consists of patches of a tensor.
pub(super) type Left = (View, Option<Patches>);

/// A product. `addends` are a bias for each column, and a tensor that broadcasts to the output.
pub(super) fn product(
    t: &mut Translator<'_>,
    node: &Node,
    (a, patches): Left,
    (b, b_shape, transposed): Right,
    out: &[usize],
    [bias, addend]: [Option<Operand>; 2],
    act: Option<Activation>,
) -> Outcome<Tensor> {
    let (a_batch, &[rows, depth]) = a.shape.split_at(a.shape.len() - 2) else {
        return refuse("an operand is not a matrix");
    };
    let (b_batch, &[first, second]) = b_shape.split_at(b_shape.len().saturating_sub(2)) else {
        return refuse("an operand has no dimension");
    };
    let cols = if transposed { first } else { second };
    let level = Level::detect();
    let a_strides = a.strides.split_at(a_batch.len());
    let mut layout = Layout {
        start: 0,
        row_step: a_strides.1[0].unsigned_abs(),
        depth_step: a_strides.1[1].unsigned_abs(),
    };
    let (mut batch, mut height) = (1, rows);
    let (mut dims, mut strides) = (Vec::new(), Vec::new());
    let right = if shape::len(b_batch) == 1 {
        // If one matrix serves all batches and rows have equal distances, the batches are just more rows.
        let all = [a_batch, &[rows]].concat();
        let (merged, steps) = shape::coalesce(&all, &[&a.strides[..all.len()]]);
        if merged.len() == 1 && (patches.is_none() || shape::len(a_batch) == 1) {
            (layout.row_step, height) = (steps[0][0].unsigned_abs(), merged[0]);
        } else {
            (dims, strides, batch) = (a_batch.to_vec(), a_strides.0.to_vec(), shape::len(a_batch));
        }
        let stored = t.is_stored(b);
        let may_be_bytes = stored && patches.is_none();
        let words = if may_be_bytes { t.words_of_matrix(cols * depth) } else { t.words() };
        let panels = Panels::right(level, words, [1, cols, depth]);
        if stored {
            let (blocks, tensor) = t.matrix(b, panels, !transposed)?;
            (panels, blocks, tensor)
        } else {
            let (view, layout) = right_view(t, b, &b_shape, transposed)?;
            (panels, None, t.panels(node, view.tensor, panels, layout, &[], &[])?)
        }
    } else {
        let (view, right_layout) = right_view(t, b, &b_shape, transposed)?;
        let right_strides = &view.strides[..b_batch.len()];
        let Some((full, left, right)) = shape::broadcast(a_batch, b_batch).and_then(|full| {
            let left = shape::broadcast_view(a_batch, a_strides.0, &full)?;
            let right = shape::broadcast_view(b_batch, right_strides, &full)?;
            Some((full, left, right))
        }) else {
            return refuse("its batches do not broadcast");
        };
        batch = shape::len(&full);
        let panels = Panels::right(level, t.words(), [batch, cols, depth]);
        let right = t.panels(node, view.tensor, panels, right_layout, &full, &right)?;
        (dims, strides) = (full, left);
        (panels, None, right)
    };
    let (panels, blocks, right) = right;
    let mut inputs = vec![a.tensor, right];
    let bias = bias.filter(|bias| {
        let fits = is_row(&bias.shape, out);
        inputs.extend(fits.then_some(bias.tensor));
        true
    });
    let fused_bias = inputs.len() == 3;
    let whole = addend.as_ref().is_some_and(|addend| shape::len(&addend.shape) == shape::len(out));
    // Addends that do not fit into the product are added afterwards.
    let complete = (bias.is_none() || fused_bias) && (addend.is_none() || whole);
    inputs.extend(addend.iter().filter(|_| complete).map(|addend| addend.tensor));
    let kernel = Gemm {
        level,
        batch,
        rows: height,
        dims,
        strides,
        layout,
        patches,
        panels,
        blocks,
        bias: fused_bias,
        addend: complete && whole,
        activation: act.filter(|_| complete),
        taps: Taps::dense(DEPTH, panels.block),
    };
    let mut y = t.custom(node, kernel, &inputs, Type::F32, shape::extent(out))?;
    if !complete {
        let rest = bias.filter(|_| !fused_bias).into_iter().chain(addend);
        for addend in rest {
            let sum = Operand { tensor: y, dtype: addend.dtype, shape: out.to_vec() };
            y = elementwise::add(t, node, &sum, &addend)?;
        }
        if let Some(act) = act {
            y = activate(t, node, y, out, act)?;
        }
    }
    Ok(y)
}

/// A computed or stored right operand of this shape, with the steps of its columns (the rows of panels) and of its depth.
fn right_view(
    t: &mut Translator<'_>,
    id: ValueId,
    shape: &[usize],
    transposed: bool,
) -> Outcome<(View, Layout)> {
    let view = t.view_as(id, shape)?;
    let rank = view.strides.len();
    let steps = [view.strides[rank - 2].unsigned_abs(), view.strides[rank - 1].unsigned_abs()];
    let (row_step, depth_step) = if transposed { (steps[0], steps[1]) } else { (steps[1], steps[0]) };
    Ok((view, Layout { start: 0, row_step, depth_step }))
}
