//! Reductions, extremes and running sums.

use super::Operator;
use crate::{
    ffi::{Tensor, Type},
    kernels::{ArgExtreme, CumulativeSum, Reduce, Reduction},
    shape,
    translate::{Outcome, Translator, refuse},
};
use sdrun_graph::Node;

const REDUCE: &str = "float, constant axes";

pub(super) const OPERATORS: &[Operator] = &[
    Operator { name: "ReduceL1", takes: REDUCE, translate: |t, n| reduce(t, n, Reduction::L1) },
    Operator { name: "ReduceL2", takes: REDUCE, translate: |t, n| reduce(t, n, Reduction::L2) },
    Operator { name: "ReduceLogSum", takes: REDUCE, translate: |t, n| reduce(t, n, Reduction::LogOfSum) },
    Operator {
        name: "ReduceLogSumExp",
        takes: REDUCE,
        translate: |t, n| reduce(t, n, Reduction::LogOfSumOfExp),
    },
    Operator { name: "ReduceMax", takes: REDUCE, translate: |t, n| reduce(t, n, Reduction::Max) },
    Operator { name: "ReduceMean", takes: REDUCE, translate: |t, n| reduce(t, n, Reduction::Mean) },
    Operator { name: "ReduceMin", takes: REDUCE, translate: |t, n| reduce(t, n, Reduction::Min) },
    Operator { name: "ReduceProd", takes: REDUCE, translate: |t, n| reduce(t, n, Reduction::Product) },
    Operator { name: "ReduceSum", takes: REDUCE, translate: |t, n| reduce(t, n, Reduction::Sum) },
    Operator {
        name: "ReduceSumSquare",
        takes: REDUCE,
        translate: |t, n| reduce(t, n, Reduction::SumOfSquares),
    },
    Operator {
        name: "GlobalAveragePool",
        takes: "float",
        translate: |t, n| global_pool(t, n, Reduction::Mean),
    },
    Operator { name: "GlobalMaxPool", takes: "float", translate: |t, n| global_pool(t, n, Reduction::Max) },
    Operator { name: "ArgMax", takes: "float", translate: |t, n| arg_extreme(t, n, true) },
    Operator { name: "ArgMin", takes: "float", translate: |t, n| arg_extreme(t, n, false) },
    Operator { name: "CumSum", takes: "float, a constant axis", translate: cumulative_sum },
];

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
    // Even without axes, most reductions apply their function to each single element.
    let same = matches!(
        reduction,
        Reduction::Mean | Reduction::Sum | Reduction::Max | Reduction::Min | Reduction::Product
    );
    let y = if reduced.contains(&true) || !same { over(t, node, &reduced, reduction)? } else { x.tensor };
    t.define(node, 0, y)
}

fn global_pool(t: &mut Translator<'_>, node: &Node, reduction: Reduction) -> Outcome {
    let rank = t.float(node, 0)?.shape.len();
    if rank < 2 {
        return refuse("its input has fewer than two dimensions");
    }
    let spatial: Vec<bool> = (0..rank).map(|axis| axis >= 2).collect();
    let y = over(t, node, &spatial, reduction)?;
    t.define(node, 0, y)
}

/// Reduces input 0 over the given axes.
pub(super) fn over(
    t: &mut Translator<'_>,
    node: &Node,
    reduced: &[bool],
    reduction: Reduction,
) -> Outcome<Tensor> {
    let (gone, kept): (Vec<usize>, Vec<usize>) = (0..reduced.len()).partition(|axis| reduced[*axis]);
    if t.target().gpu().is_some() && matches!(reduction, Reduction::Mean | Reduction::Sum) {
        return on_device(t, node, &gone, &kept, reduction);
    }
    let view = t.view(t.input_id(node, 0)?)?;
    // Leave out axes of one element.
    let of = |axes: &[usize]| -> (Vec<usize>, Vec<isize>) {
        let long = axes.iter().filter(|axis| view.shape[**axis] > 1);
        long.map(|axis| (view.shape[*axis], view.strides[*axis])).unzip()
    };
    let (mut outer, gone) = (of(&kept), of(&gone));
    let len = shape::len(&outer.0);
    let mut run = 1;
    if outer.1.last() == Some(&1) {
        outer.1.pop();
        run = outer.0.pop().unwrap_or(1);
    }
    let (dims, mut strides) = shape::coalesce(&gone.0, &[&gone.1]);
    let gone = (dims, strides.pop().unwrap_or_default());
    t.custom(node, Reduce { outer, run, gone, reduction }, &[view.tensor], Type::F32, [len, 1, 1, 1])
}

/// ggml's own reduction of rows.
fn on_device(
    t: &mut Translator<'_>,
    node: &Node,
    gone: &[usize],
    kept: &[usize],
    reduction: Reduction,
) -> Outcome<Tensor> {
    let x = t.float(node, 0)?;
    let len: usize = gone.iter().map(|axis| x.shape[*axis]).product();
    let rows = t.transpose(node, x.tensor, &x.shape, &[kept, gone].concat())?;
    let rows = t.builder.reshape(rows, [len, shape::len(&x.shape) / len, 1, 1])?;
    Ok(match reduction {
        Reduction::Mean => t.builder.mean(rows)?,
        _ => t.builder.sum(rows)?,
    })
}

/// The number of elements before an axis, along it, and behind it.
fn around(shape: &[usize], axis: i64) -> Option<[usize; 3]> {
    let axis = shape::axis(axis, shape.len())?;
    Some([shape::len(&shape[..axis]), shape[axis], shape::len(&shape[axis + 1..])])
}

fn arg_extreme(t: &mut Translator<'_>, node: &Node, largest: bool) -> Outcome {
    let (x, out) = (t.float(node, 0)?, t.output_shape(node, 0)?);
    let Some([outer, len, inner]) = around(&x.shape, node.int_or("axis", 0)) else {
        return refuse("its axis is out of range");
    };
    let last = node.int_or("select_last_index", 0) != 0;
    let kernel = ArgExtreme { outer, len, inner, largest, last };
    let y = t.custom(node, kernel, &[x.tensor], Type::I64, shape::extent(&out))?;
    t.define(node, 0, y)
}

fn cumulative_sum(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x = t.float(node, 0)?;
    let axis = match t.constant_ints(node, 1, "its axis")?.as_deref() {
        Some([axis]) => *axis,
        _ => return refuse("it has no axis"),
    };
    let Some([outer, len, inner]) = around(&x.shape, axis) else { return refuse("its axis is out of range") };
    let flag = |name| node.int_or(name, 0) != 0;
    let kernel = CumulativeSum { outer, len, inner, exclusive: flag("exclusive"), reverse: flag("reverse") };
    let y = t.custom(node, kernel, &[x.tensor], Type::F32, shape::extent(&x.shape))?;
    t.define(node, 0, y)
}
