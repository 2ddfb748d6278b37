//! Elementwise operators with broadcasting, and operators whose output resembles their first input.

use super::{Ctx, Fact, Facts, dims, one};
use crate::Dim;
use sdrun_abi::DType;

/// Output like input 0. Checks operands that must match it.
pub(super) fn like_first(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    match c.node.op_type.as_str() {
        "Clip" if c.opset >= 11 => {
            c.common_dtype([0, 1, 2])?;
        }
        "ScatterElements" | "Scatter" => {
            c.common_dtype([0, 2])?;
            let (indices, updates) = (c.need(1)?, c.need(2)?);
            if let (Some(i), Some(u), Some(x)) = (&indices.shape, &updates.shape, &x.shape) {
                dims::same_shape(i, u)?;
                if i.len() != x.len() {
                    return Err(format!("indices must have the data's rank {}", x.len()));
                }
                dims::axis(c.node.int_or("axis", 0), x.len())?;
            }
        }
        "ScatterND" => {
            c.common_dtype([0, 2])?;
            let (indices, updates) = (c.need(1)?, c.need(2)?);
            if let (Some(i), Some(u), Some(x)) = (&indices.shape, &updates.shape, &x.shape)
                && let Some(depth) = i.last().and_then(Dim::known)
            {
                let rest = x.get(depth..).ok_or("an index tuple is longer than the data's rank")?;
                dims::same_shape(&[&i[..i.len() - 1], rest].concat(), u)?;
            }
        }
        "TensorScatter" => {
            c.common_dtype([0, 1])?;
            c.need(1)?;
        }
        "RotaryEmbedding" => {
            c.common_dtype([0, 1, 2])?;
            c.need(1)?;
            c.need(2)?;
        }
        "CumSum" | "CumProd" | "ReverseSequence" => {
            c.need(1)?;
        }
        "Trilu" => {
            c.ranked_at_least(0, 2)?;
        }
        _ => {}
    }
    one(x.dtype, x.shape.clone())
}

/// Softmax and related operators.
pub(super) fn along_axis(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    if let Some(s) = &x.shape {
        let default = if c.opset < 13 { 1 } else { -1 };
        let axis = c.node.int_or("axis", default);
        // Before opset 13 the axis splits the shape in two and may equal the rank.
        if !(c.opset < 13 && axis == s.len() as i64) {
            dims::axis(axis, s.len())?;
        }
    }
    one(x.dtype, x.shape.clone())
}

pub(super) fn predicate(c: &Ctx) -> Facts {
    one(Some(DType::Bool), c.need(0)?.shape.clone())
}

/// Broadcast shape of inputs 0 to `n`.
fn broadcast(c: &Ctx, n: usize) -> Result<Option<Vec<Dim>>, String> {
    let mut shape = Some(Vec::new());
    for i in 0..n {
        c.need(i)?;
        shape = match (shape, c.shape(i)) {
            (Some(a), Some(b)) => Some(dims::broadcast(&a, b)?),
            _ => None,
        };
    }
    Ok(shape)
}

pub(super) fn binary(c: &Ctx) -> Facts {
    let shape = broadcast(c, 2)?;
    one(c.common_dtype([0, 1])?, shape)
}

pub(super) fn binary_equal(c: &Ctx) -> Facts {
    let (a, b) = (c.need(0)?, c.need(1)?);
    let shape = match (&a.shape, &b.shape) {
        (Some(a), Some(b)) => Some(dims::same_shape(a, b)?),
        (a, b) => a.clone().or(b.clone()),
    };
    one(c.common_dtype([0, 1])?, shape)
}

/// The exponent may have a different type.
pub(super) fn power(c: &Ctx) -> Facts {
    let shape = broadcast(c, 2)?;
    one(c.dtype(0), shape)
}

pub(super) fn prelu(c: &Ctx) -> Facts {
    let (x, slope) = (c.need(0)?, c.need(1)?);
    if let (Some(x), Some(s)) = (&x.shape, &slope.shape) {
        dims::broadcast_onto(s, x)?;
    }
    one(c.common_dtype([0, 1])?, x.shape.clone())
}

pub(super) fn comparison(c: &Ctx) -> Facts {
    let shape = broadcast(c, 2)?;
    let dtype = c.common_dtype([0, 1])?;
    if matches!(c.node.op_type.as_str(), "And" | "Or" | "Xor") && dtype.is_some_and(|t| t != DType::Bool) {
        return Err("inputs must be bool".into());
    }
    one(Some(DType::Bool), shape)
}

pub(super) fn variadic(c: &Ctx) -> Facts {
    c.need(0)?;
    let shape = broadcast(c, c.inputs.len())?;
    one(c.common_dtype(0..c.inputs.len())?, shape)
}

pub(super) fn where_(c: &Ctx) -> Facts {
    let shape = broadcast(c, 3)?;
    if c.dtype(0).is_some_and(|t| t != DType::Bool) {
        return Err("the condition must be bool".into());
    }
    one(c.common_dtype([1, 2])?, shape)
}

pub(super) fn cast(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let to = i32::try_from(c.int("to")?).map_err(|_| "attribute to is not an element type".to_string())?;
    one(DType::from_onnx(to), x.shape.clone())
}

pub(super) fn cast_like(c: &Ctx) -> Facts {
    one(c.need(1)?.dtype, c.need(0)?.shape.clone())
}

pub(super) fn bit_cast(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let to = i32::try_from(c.int("to")?).ok().and_then(DType::from_onnx);
    if let (Some(from), Some(to)) = (x.dtype, to)
        && from.size() != to.size()
    {
        return Err(format!("{from} and {to} differ in width"));
    }
    one(to, x.shape.clone())
}

pub(super) fn dropout(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let mask = if c.opset < 10 { x.dtype } else { Some(DType::Bool) };
    Ok(vec![Fact::new(x.dtype, x.shape.clone()), Fact::new(mask, x.shape.clone())])
}
