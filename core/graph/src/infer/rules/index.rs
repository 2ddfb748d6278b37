//! Operators that select elements by index or value.

use super::{Ctx, Fact, Facts, dims, one};
use crate::Dim;
use sdrun_abi::DType;

pub(super) fn gather(c: &Ctx) -> Facts {
    let (x, indices) = (c.need(0)?, c.need(1)?);
    let (Some(s), Some(i)) = (&x.shape, &indices.shape) else { return one(x.dtype, None) };
    let axis = dims::axis(c.node.int_or("axis", 0), s.len())?;
    one(x.dtype, Some([&s[..axis], i.as_slice(), &s[axis + 1..]].concat()))
}

pub(super) fn gather_elements(c: &Ctx) -> Facts {
    let (x, indices) = (c.need(0)?, c.need(1)?);
    if let (Some(s), Some(i)) = (&x.shape, &indices.shape) {
        dims::axis(c.node.int_or("axis", 0), s.len())?;
        if s.len() != i.len() {
            return Err(format!("indices {} must have the data's rank {}", dims::text(i), s.len()));
        }
    }
    one(x.dtype, indices.shape.clone())
}

pub(super) fn gather_nd(c: &Ctx) -> Facts {
    let (x, indices) = (c.need(0)?, c.need(1)?);
    let (Some(s), Some(i)) = (&x.shape, &indices.shape) else { return one(x.dtype, None) };
    let batch = match c.opset {
        ..12 => 0,
        _ => usize::try_from(c.node.int_or("batch_dims", 0)).map_err(|_| "batch_dims is negative")?,
    };
    let Some(last) = i.last() else { return Err("indices must have at least one dimension".into()) };
    if batch >= s.len() || batch >= i.len() {
        return Err(format!("batch_dims {batch} is out of range"));
    }
    dims::same_shape(&s[..batch], &i[..batch])?;
    let Some(depth) = last.known() else { return one(x.dtype, None) };
    let rest = s
        .get(batch + depth..)
        .ok_or_else(|| format!("an index tuple of length {depth} does not fit {}", dims::text(s)))?;
    one(x.dtype, Some([&i[..i.len() - 1], rest].concat()))
}

pub(super) fn compress(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    c.need(1)?;
    c.ranked(1, 1)?;
    let Some(axis) = c.node.int("axis") else { return one(x.dtype, Some(dims::unknown(1))) };
    let Some(s) = &x.shape else { return one(x.dtype, None) };
    let mut out = s.clone();
    out[dims::axis(axis, s.len())?] = Dim::Unknown;
    one(x.dtype, Some(out))
}

pub(super) fn non_zero(c: &Ctx) -> Facts {
    let rank = c.need(0)?.shape.as_ref().map_or(Dim::Unknown, |s| Dim::Known(s.len()));
    one(Some(DType::I64), Some(vec![rank, Dim::Unknown]))
}

pub(super) fn unique(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let shape = match (c.node.int("axis"), &x.shape) {
        (None, _) => Some(dims::unknown(1)),
        (Some(_), None) => None,
        (Some(axis), Some(s)) => {
            let mut out = s.clone();
            out[dims::axis(axis, s.len())?] = Dim::Unknown;
            Some(out)
        }
    };
    let positions = Fact::new(Some(DType::I64), Some(dims::unknown(1)));
    Ok(vec![Fact::new(x.dtype, shape), positions.clone(), positions.clone(), positions])
}

pub(super) fn top_k(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let k = match c.opset {
        ..10 => Dim::Known(usize::try_from(c.int("k")?).map_err(|_| "k is negative")?),
        _ => {
            c.need(1)?;
            match c.partial_ints(1).as_deref() {
                Some([k]) if k.known().is_some_and(|k| k < 0) => return Err("k is negative".into()),
                Some([k]) => Dim::from(k),
                Some(_) => return Err("k must have one element".into()),
                None => Dim::Unknown,
            }
        }
    };
    let shape = match &x.shape {
        None => None,
        Some(s) => {
            let axis = dims::axis(c.node.int_or("axis", -1), s.len())?;
            if let (Some(k), Some(n)) = (k.known(), s[axis].known())
                && k > n
            {
                return Err(format!("k = {k} exceeds the {n} elements along axis {axis}"));
            }
            let mut out = s.clone();
            out[axis] = k;
            Some(out)
        }
    };
    Ok(vec![Fact::new(x.dtype, shape.clone()), Fact::new(Some(DType::I64), shape)])
}
