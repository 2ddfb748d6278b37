//! Operators that only move elements.

use super::input;
use crate::{
    ffi::{Builder, Tensor, Type},
    ops::{pads, whole_factors},
    shape,
    translate::{Outcome, Translator, refuse},
};
use sdrun_abi::Result;
use sdrun_graph::Node;

pub(super) fn concat(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let out = t.output_shape(node, 0)?;
    let Some(axis) = node.int("axis").and_then(|axis| shape::axis(axis, out.len())) else {
        return refuse("its axis is missing or out of range");
    };
    let outer = shape::len(&out[..axis]);
    let mut joined: Option<Tensor> = None;
    for i in 0..node.inputs.len() {
        let part = input(t, node, i)?;
        let part = t.builder.reshape(part.tensor, [shape::len(&part.shape) / outer, outer, 1, 1])?;
        joined = Some(match joined {
            Some(before) => t.builder.concat(before, part)?,
            None => part,
        });
    }
    match joined {
        Some(joined) => t.define(node, 0, joined),
        None => refuse("it has no input"),
    }
}

pub(super) fn resize(t: &mut Translator<'_>, node: &Node) -> Outcome {
    whole_factors(t, node)?;
    let (x, out) = (input(t, node, 0)?, t.output_shape(node, 0)?);
    if out.len() > 4 {
        return refuse("it has more than four dimensions");
    }
    let x = t.builder.reshape(x.tensor, shape::extent(&x.shape))?;
    let y = t.builder.upscale(x, shape::extent(&out))?;
    t.define(node, 0, y)
}

/// Pads with zeros, at the ends of at most four dimensions.
pub(super) fn pad(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x = input(t, node, 0)?;
    let rank = x.shape.len();
    let pads = pads(t, node)?;
    let zero = node.input(2).is_none_or(|id| t.scalar(id) == Some(0.0))
        && node.float("value").unwrap_or(0.0) == 0.0
        && node.str("mode").unwrap_or("constant") == "constant";
    let whole = node.input(3).is_none() && rank <= 4 && pads.len() == 2 * rank;
    let Some(pads) = pads.iter().map(|n| usize::try_from(*n).ok()).collect::<Option<Vec<_>>>() else {
        return refuse("it takes elements away");
    };
    if !zero || !whole {
        return refuse("it adds other than zeros");
    }
    let mut zeros = [[0; 2]; 4];
    for axis in 0..rank {
        zeros[rank - 1 - axis] = [pads[axis], pads[rank + axis]];
    }
    let x = t.builder.reshape(x.tensor, shape::extent(&x.shape))?;
    let y = t.builder.pad(x, zeros)?;
    t.define(node, 0, y)
}

/// Copies elements of `input` from element `start` on, on the device. Dimensions and the steps between their elements come outermost
/// first; a step of 0 repeats elements. Returns `None` if the device or ggml cannot.
pub(crate) fn strided(
    builder: &mut Builder,
    input: Tensor,
    dims: &[usize],
    strides: &[isize],
    start: usize,
) -> Result<Option<Tensor>> {
    if builder.type_of(input) != Type::F32 {
        return Ok(None);
    }
    let before = builder.tensors();
    let (all, merged) = shape::coalesce(dims, &[strides]);
    let once = shape::once(&all, &merged[0]);
    let (own, steps) = shape::coalesce(&once, &[&merged[0]]);
    let Some(steps) = steps[0].iter().map(|step| usize::try_from(*step).ok()).collect::<Option<Vec<_>>>()
    else {
        return Ok(None);
    };
    let repeated = merged[0].contains(&0);
    if repeated && all.len() > 4 {
        return Ok(None);
    }
    let len = shape::len(&own);
    let mut copy = if own.len() == 1 && (steps[0] == 1 || len == 1) {
        builder.run(input, start, [len, 1, 1, 1])?
    } else if own.len() + usize::from(!steps.contains(&1)) <= 4 {
        builder.gather_strided(input, start, &own, &steps)?
    } else if start == 0 && len == builder.len(input) {
        match turn(builder, input, &own, &steps)? {
            Some(turned) => turned,
            None => return Ok(None),
        }
    } else {
        return Ok(None);
    };
    if repeated {
        copy = builder.reshape(copy, shape::extent(&once))?;
        copy = builder.repeat(copy, shape::extent(&all))?;
    }
    Ok(builder.give_to_device(copy, before).then_some(copy))
}

/// A transposition of more than four dimensions. It moves one dimension after the other to its place by swapping two neighbouring runs of
/// dimensions. Returns `None` if the steps do not cover all elements.
fn turn(builder: &mut Builder, input: Tensor, dims: &[usize], steps: &[usize]) -> Result<Option<Tensor>> {
    let mut order: Vec<usize> = (0..dims.len()).collect();
    order.sort_by_key(|axis| std::cmp::Reverse(steps[*axis]));
    let sorted: Vec<usize> = order.iter().map(|axis| dims[*axis]).collect();
    if shape::strides(&sorted).iter().zip(&order).any(|(step, axis)| *step != steps[*axis]) {
        return Ok(None);
    }
    let mut turned = input;
    for place in 0..dims.len() {
        let Some(at) = order.iter().position(|axis| *axis == place).filter(|at| *at > place) else {
            continue;
        };
        let size = |axes: &[usize]| axes.iter().map(|axis| dims[*axis]).product::<usize>();
        let (outer, over, inner) = (size(&order[..place]), size(&order[place..at]), size(&order[at + 1..]));
        let one = dims[place];
        let parts = [outer, one, over, inner];
        let steps = [over * one * inner, inner, one * inner, 1];
        turned = builder.gather_strided(turned, 0, &parts, &steps)?;
        order.remove(at);
        order.insert(place, place);
    }
    Ok(Some(turned))
}
