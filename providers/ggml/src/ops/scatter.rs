//! Gather and scatter by index tensors.

use super::Operator;
use crate::{
    ffi::Type,
    kernels::{Pick, Places, Scatter, Update},
    shape,
    storage::storage_type,
    translate::{Outcome, Translator, refuse},
};
use sdrun_graph::Node;

const GATHER: &str = "any type, i32 or i64 indices";
const SCATTER: &str = "any type, i32 or i64 indices; a reduction of floats";

pub(super) const OPERATORS: &[Operator] = &[
    Operator { name: "GatherElements", takes: GATHER, translate: |t, n| gather(t, n, elements) },
    Operator { name: "GatherND", takes: GATHER, translate: |t, n| gather(t, n, slices) },
    Operator { name: "ScatterElements", takes: SCATTER, translate: |t, n| scatter(t, n, elements) },
    Operator { name: "ScatterND", takes: SCATTER, translate: |t, n| scatter(t, n, slices) },
];

/// The places that a node's indices name.
type Named = fn(&Translator<'_>, &Node) -> Outcome<Places>;

fn elements(t: &Translator<'_>, node: &Node) -> Outcome<Places> {
    let [data, indices] = shapes(t, node)?;
    let Some(axis) = shape::axis(node.int_or("axis", 0), data.len()) else {
        return refuse("its axis is out of range");
    };
    let fits = |i: usize| i == axis || indices[i] <= data[i];
    if indices.len() != data.len() || !(0..data.len()).all(fits) {
        return refuse(format!("indices of shape {indices:?} reach beyond {data:?}"));
    }
    Ok(Places::Elements { data, indices, axis })
}

fn slices(t: &Translator<'_>, node: &Node) -> Outcome<Places> {
    let [data, indices] = shapes(t, node)?;
    let Some((depth, lead)) = indices.split_last() else { return refuse("its indices have no dimension") };
    let batch_dims = usize::try_from(node.int_or("batch_dims", 0)).unwrap_or(usize::MAX);
    if batch_dims > lead.len() || batch_dims + depth > data.len() || lead[..batch_dims] != data[..batch_dims]
    {
        return refuse(format!("indices of shape {indices:?} do not fit {data:?}"));
    }
    Ok(Places::Slices {
        indexed: data[batch_dims..batch_dims + depth].to_vec(),
        rows: shape::len(lead),
        depth: *depth,
        batches: shape::len(&lead[..batch_dims]),
        slice: shape::len(&data[batch_dims + depth..]),
    })
}

fn shapes(t: &Translator<'_>, node: &Node) -> Outcome<[Vec<usize>; 2]> {
    Ok([t.shape(t.input_id(node, 0)?)?, t.shape(t.input_id(node, 1)?)?])
}

fn gather(t: &mut Translator<'_>, node: &Node, named: Named) -> Outcome {
    let (places, out) = (named(t, node)?, t.output_shape(node, 0)?);
    let [data, indices] = [t.input_id(node, 0)?, t.input_id(node, 1)?];
    let [data, indices] = [t.operand(data)?, t.operand(indices)?];
    let Some(type_) = storage_type(data.dtype) else {
        return refuse(format!("{} values are not supported", data.dtype));
    };
    if !matches!(t.builder.type_of(indices.tensor), Type::I32 | Type::I64) {
        return refuse(format!("its indices are {}", indices.dtype));
    }
    let kernel = Pick { places, size: type_.size() };
    let y = t.custom(node, kernel, &[data.tensor, indices.tensor], type_, shape::extent(&out))?;
    t.define(node, 0, y)
}

fn scatter(t: &mut Translator<'_>, node: &Node, named: Named) -> Outcome {
    let places = named(t, node)?;
    let inputs = [0, 1, 2].map(|i| t.input_id(node, i));
    let [data, indices, updates] = inputs;
    let [data, indices, updates] = [t.operand(data?)?, t.operand(indices?)?, t.operand(updates?)?];
    let Some(type_) = storage_type(data.dtype) else {
        return refuse(format!("{} values are not supported", data.dtype));
    };
    if !matches!(t.builder.type_of(indices.tensor), Type::I32 | Type::I64) {
        return refuse(format!("its indices are {}", indices.dtype));
    }
    if shape::len(&updates.shape) != places.count() * places.slice() {
        return refuse("its updates have another shape than its indices say");
    }
    let update = match node.str("reduction").unwrap_or("none") {
        "none" => Update::Replace,
        "add" => Update::Add,
        "mul" => Update::Multiply,
        "max" => Update::Max,
        "min" => Update::Min,
        other => return refuse(format!("its reduction is {other:?}")),
    };
    if update != Update::Replace && type_ != Type::F32 {
        return refuse(format!("it reduces {} values", data.dtype));
    }
    let kernel = Scatter { places, len: shape::len(&data.shape), size: type_.size(), update };
    let inputs = [data.tensor, indices.tensor, updates.tensor];
    let y = t.custom(node, kernel, &inputs, type_, shape::extent(&data.shape))?;
    t.define(node, 0, y)
}
