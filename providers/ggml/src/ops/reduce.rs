//! Reductions.

use super::Operator;
use crate::{
    ffi::{Tensor, Type},
    kernels::Reduce,
    shape,
    translate::{Outcome, Translator, refuse},
};
use sdrun_graph::Node;

const REDUCE: &str = "float, constant axes";

pub(super) const OPERATORS: &[Operator] = &[
    Operator { name: "ReduceMean", takes: REDUCE, translate: |t, n| reduce(t, n, Reduction::Mean) },
    Operator { name: "ReduceSum", takes: REDUCE, translate: |t, n| reduce(t, n, Reduction::Sum) },
    Operator { name: "GlobalAveragePool", takes: "float", translate: global_average_pool },
];

#[derive(Clone, Copy, PartialEq)]
enum Reduction {
    Mean,
    Sum,
}

fn reduce(t: &mut Translator<'_>, node: &Node, reduction: Reduction) -> Outcome {
    let x = t.float(node, 0)?;
    let rank = x.shape.len();
    let axes = match t.constant_ints(node, 1, "its axes")? {
        Some(axes) => axes,
        None => node.ints("axes").unwrap_or_default().to_vec(),
    };
    let mut reduced = vec![axes.is_empty() && node.int_or("noop_with_empty_axes", 0) == 0; rank];
    for axis in axes {
        match shape::axis(axis, rank) {
            Some(axis) => reduced[axis] = true,
            None => return refuse(format!("axis {axis} is out of range")),
        }
    }
    let y = if reduced.contains(&true) { over(t, node, &reduced, reduction)? } else { x.tensor };
    t.define(node, 0, y)
}

fn global_average_pool(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let rank = t.float(node, 0)?.shape.len();
    if rank < 2 {
        return refuse("its input has fewer than two dimensions");
    }
    let spatial: Vec<bool> = (0..rank).map(|axis| axis >= 2).collect();
    let y = over(t, node, &spatial, Reduction::Mean)?;
    t.define(node, 0, y)
}

/// Input 0 over those of its axes.
fn over(t: &mut Translator<'_>, node: &Node, reduced: &[bool], reduction: Reduction) -> Outcome<Tensor> {
    let view = t.view(t.input_id(node, 0)?)?;
    let (gone, kept): (Vec<usize>, Vec<usize>) = (0..reduced.len()).partition(|axis| reduced[*axis]);
    let of = |axes: &[usize]| -> (Vec<usize>, Vec<isize>) {
        axes.iter().map(|axis| (view.shape[*axis], view.strides[*axis])).unzip()
    };
    // Axes of one element have no direction.
    let long: Vec<usize> = kept.iter().copied().filter(|axis| view.shape[*axis] > 1).collect();
    if t.target().gpu().is_none()
        && let Some((last, outer)) = long.split_last()
        && view.strides[*last] == 1
    {
        let (run, mean) = (view.shape[*last], reduction == Reduction::Mean);
        let kernel = Reduce { outer: of(outer), run, gone: of(&gone), mean };
        let extent = [shape::len(&of(&kept).0), 1, 1, 1];
        return t.custom(node, kernel, &[view.tensor], Type::F32, extent);
    }
    let x = t.float(node, 0)?;
    let len = shape::len(&of(&gone).0);
    let rows = t.transpose(node, x.tensor, &x.shape, &[kept, gone].concat())?;
    let rows = t.builder.reshape(rows, [len, shape::len(&x.shape) / len, 1, 1])?;
    Ok(match reduction {
        Reduction::Mean => t.builder.mean(rows)?,
        Reduction::Sum => t.builder.sum(rows)?,
    })
}
