//! Resize and Upsample.

use super::{Operator, layout::whole_factors};
use crate::{
    kernels::{Elements, Pad, Resample},
    shape,
    storage::{into_storage, storage_type},
    translate::{Operand, Outcome, Refusal, Translator, refuse},
};
use sdrun_abi::DType;
use sdrun_graph::{
    Node, Tensor as HostTensor,
    eval::{Taps, interpolation},
    infer::Fact,
};

const RESIZE: &str = "float and 8-bit integers in every mode, other types in mode \"nearest\"; constant scales, sizes and region";

pub(super) const OPERATORS: &[Operator] = &[
    Operator { name: "Resize", takes: RESIZE, translate: resize },
    Operator { name: "Upsample", takes: RESIZE, translate: resize },
];

/// The most output positions along all axes.
const MOST_TAPS: usize = 1 << 20;

fn resize(t: &mut Translator<'_>, node: &Node) -> Outcome {
    match whole_factors(t, node) {
        Ok(factors) => repeat(t, node, &factors),
        Err(Refusal::Unsupported(_)) => resample(t, node),
        Err(failed) => Err(failed),
    }
}

/// Repeats each element. This is a strided copy, or no copy at all.
fn repeat(t: &mut Translator<'_>, node: &Node, factors: &[usize]) -> Outcome {
    let id = t.input_id(node, 0)?;
    let x = t.operand(id)?;
    let dense = shape::strides(&x.shape);
    let dims: Vec<usize> = x.shape.iter().zip(factors).flat_map(|(d, f)| [*d, *f]).collect();
    let strides: Vec<isize> = dense.iter().flat_map(|s| [*s as isize, 0]).collect();
    let y = t.strided(node, x.tensor, &dims, &strides, 0)?;
    t.define(node, 0, y)
}

/// Picks elements if each position has a single source, else interpolates axis by axis.
fn resample(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (id, out) = (t.input_id(node, 0)?, t.output_shape(node, 0)?);
    let x = t.operand(id)?;
    if out.iter().sum::<usize>() > MOST_TAPS {
        return refuse(format!("its output is {out:?}"));
    }
    let facts: Vec<Option<Fact>> = node
        .inputs
        .iter()
        .map(|id| {
            let id = (*id)?;
            let of = |tensor: &HostTensor| Fact::constant(tensor.clone());
            Some(t.constant(id).map_or_else(|| Fact::new(t.graph.value(id).dtype, None), of))
        })
        .collect();
    let plan = interpolation(node, t.graph.opset(), &facts, &x.shape, &out).or_else(refuse)?;
    let single = |taps: &Taps| taps.as_deref().is_none_or(|taps| matches!(taps, [(_, 1.0)]));
    if plan.axes.iter().flatten().flatten().all(single) {
        return pick(t, node, &x, &plan.axes, plan.outside, &out);
    }
    let elements = match x.dtype {
        DType::F32 | DType::F16 | DType::BF16 => Elements::F32,
        DType::U8 => Elements::U8,
        DType::I8 => Elements::I8,
        dtype => return refuse(format!("its input is {dtype}")),
    };
    let Some(type_) = storage_type(x.dtype) else { return refuse("its type is not supported") };
    let (mut y, mut dims) = (x.tensor, x.shape.clone());
    for (axis, taps) in plan.axes.into_iter().enumerate() {
        let Some(taps) = taps else { continue };
        let (outer, len, inner) = (shape::len(&dims[..axis]), dims[axis], shape::len(&dims[axis + 1..]));
        dims[axis] = taps.len();
        let kernel = Resample { outer, len, inner, taps, outside: plan.outside, elements };
        y = t.custom(node, kernel, &[y], type_, shape::extent(&dims))?;
    }
    t.define(node, 0, y)
}

/// Picks one element, or the extrapolation value, for each position.
fn pick(
    t: &mut Translator<'_>,
    node: &Node,
    x: &Operand,
    axes: &[Option<Vec<Taps>>],
    outside: f64,
    out: &[usize],
) -> Outcome {
    let Some(type_) = storage_type(x.dtype) else { return refuse("its type is not supported") };
    let sources = |(axis, taps): (usize, &Option<Vec<Taps>>)| match taps {
        Some(taps) => taps.iter().map(|taps| Some(taps.as_ref()?.first()?.0)).collect(),
        None => (0..x.shape[axis]).map(Some).collect(),
    };
    let sources: Vec<Vec<Option<usize>>> = axes.iter().enumerate().map(sources).collect();
    let fill = if outside == 0.0 {
        vec![0; type_.size()]
    } else if x.dtype.is_float() && x.dtype != DType::F64 {
        into_storage(DType::F32, &(outside as f32).to_le_bytes()).or_else(refuse)?.into_owned()
    } else {
        return refuse(format!("its extrapolation value is {outside} for {}", x.dtype));
    };
    let Some(kernel) = Pad::new(&x.shape, sources, fill) else { return refuse("its input has no dimension") };
    let y = t.custom(node, kernel, &[x.tensor], type_, shape::extent(out))?;
    t.define(node, 0, y)
}
