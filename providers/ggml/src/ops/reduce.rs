//! Reductions.

use super::Operator;
use crate::{
    ffi::{Builder, Tensor},
    shape,
    translate::{Outcome, Translator, refuse},
};
use sdrun_abi::Result;
use sdrun_graph::Node;

const REDUCE: &str = "float, constant axes";

pub(super) const OPERATORS: &[Operator] = &[
    Operator { name: "ReduceMean", takes: REDUCE, translate: |t, n| reduce(t, n, Builder::mean) },
    Operator { name: "ReduceSum", takes: REDUCE, translate: |t, n| reduce(t, n, Builder::sum) },
    Operator { name: "GlobalAveragePool", takes: "float", translate: global_average_pool },
];

type Reduction = fn(&mut Builder, Tensor) -> Result<Tensor>;

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
    let (kept, gone): (Vec<usize>, Vec<usize>) = (0..rank).partition(|axis| !reduced[*axis]);
    let y = if gone.is_empty() {
        x.tensor
    } else {
        let len: usize = gone.iter().map(|axis| x.shape[*axis]).product();
        let perm = [kept, gone].concat();
        let rows = t.transpose(node, x.tensor, &x.shape, &perm)?;
        let rows = t.builder.reshape(rows, [len, shape::len(&x.shape) / len, 1, 1])?;
        reduction(&mut t.builder, rows)?
    };
    t.define(node, 0, y)
}

fn global_average_pool(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x = t.float(node, 0)?;
    let &[batch, channels, ref inner @ ..] = &x.shape[..] else {
        return refuse("its input has fewer than two dimensions");
    };
    let rows = t.builder.reshape(x.tensor, [shape::len(inner), batch * channels, 1, 1])?;
    let y = t.builder.mean(rows)?;
    t.define(node, 0, y)
}
