//! Reductions.

use super::{Ctx, Facts, Ints, dims, one};
use crate::Dim;
use sdrun_abi::DType;

/// The axes that a reduction removes.
pub(crate) enum Reduced {
    /// These axes.
    Axes(Vec<usize>),
    /// None: the input passes through unchanged.
    Nothing,
    /// Unknown before the graph runs.
    Unknown,
}

/// The axes that a `Reduce*` node reduces for an input of `rank` dimensions.
pub(crate) fn reduced_axes(c: &Ctx, rank: usize) -> Result<Reduced, String> {
    let since = if c.node.op_type == "ReduceSum" { 13 } else { 18 };
    if c.opset < since && c.opt(1).is_some() {
        return Err(format!("before operator set {since}, axes are an attribute, not an input"));
    }
    Ok(match c.list("axes", 1, since) {
        Ints::Known(axes) if !axes.is_empty() => Reduced::Axes(dims::axes(&axes, rank)?),
        Ints::Unknown => Reduced::Unknown,
        _ if c.opset >= since && c.node.int_or("noop_with_empty_axes", 0) != 0 => Reduced::Nothing,
        _ => Reduced::Axes((0..rank).collect()),
    })
}

fn reduced_shape(s: &[Dim], axes: &[usize], keep: bool) -> Vec<Dim> {
    let dim = |i: usize| match (axes.contains(&i), keep) {
        (false, _) => Some(s[i].clone()),
        (true, true) => Some(Dim::Known(1)),
        (true, false) => None,
    };
    (0..s.len()).filter_map(dim).collect()
}

pub(super) fn reduce(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let keep = c.node.int_or("keepdims", 1) != 0;
    let Some(s) = &x.shape else { return one(x.dtype, None) };
    let shape = match reduced_axes(c, s.len())? {
        Reduced::Nothing => Some(s.clone()),
        Reduced::Axes(axes) => Some(reduced_shape(s, &axes, keep)),
        Reduced::Unknown => keep.then(|| dims::unknown(s.len())),
    };
    one(x.dtype, shape)
}

pub(super) fn arg(c: &Ctx) -> Facts {
    let Some(s) = &c.need(0)?.shape else { return one(Some(DType::I64), None) };
    let axis = dims::axis(c.node.int_or("axis", 0), s.len())?;
    one(Some(DType::I64), Some(reduced_shape(s, &[axis], c.node.int_or("keepdims", 1) != 0)))
}
