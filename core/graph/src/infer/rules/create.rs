//! Operators that create tensors from attributes, shapes and scalars.

use super::{Ctx, Fact, Facts, dims, one};
use crate::infer::PartialInt;
use crate::{Attribute, Dim, Tensor};
use sdrun_abi::DType;

pub(super) fn constant(c: &Ctx) -> Facts {
    let floats = |v: &[f32]| Tensor::from_elements(vec![v.len()], v).map_err(|e| e.to_string());
    for name in ["value", "value_int", "value_ints", "value_float", "value_floats"] {
        let value = match c.node.attributes.get(name) {
            Some(Attribute::Tensor(t)) => t.clone(),
            Some(Attribute::Int(v)) => Tensor::scalar(*v),
            Some(Attribute::Ints(v)) => Tensor::from_i64s(v),
            Some(Attribute::Float(v)) => Tensor::scalar(*v),
            Some(Attribute::Floats(v)) => floats(v)?,
            _ => continue,
        };
        return Ok(vec![Fact::constant(value)]);
    }
    one(None, None)
}

/// Converts elements of an integer tensor to dimensions; refuses negative ones.
fn shape_from(elements: &[PartialInt]) -> Result<Vec<Dim>, String> {
    match elements.iter().filter_map(PartialInt::known).find(|n| *n < 0) {
        Some(n) => Err(format!("{n} is not a valid dimension")),
        None => Ok(elements.iter().map(Dim::from).collect()),
    }
}

pub(super) fn constant_of_shape(c: &Ctx) -> Facts {
    c.need(0)?;
    let dtype = match c.node.attributes.get("value") {
        None => Some(DType::F32),
        Some(Attribute::Tensor(t)) if t.len() == 1 => Some(t.dtype()),
        Some(Attribute::Tensor(_)) => return Err("attribute value must have one element".into()),
        Some(_) => None,
    };
    let rank = || Some(dims::unknown(c.shape(0)?.first()?.known().filter(|r| *r <= 64)?));
    one(dtype, c.partial_vector(0)?.map_or_else(|| Ok(rank()), |v| shape_from(&v).map(Some))?)
}

/// Number of elements of `Range`.
pub(crate) fn range_len(start: f64, limit: f64, delta: f64) -> Result<usize, String> {
    let n = ((limit - start) / delta).ceil();
    if delta == 0.0 || !n.is_finite() {
        return Err(format!("a range from {start} to {limit} in steps of {delta} is not finite"));
    }
    if n >= (1_u64 << 48) as f64 {
        return Err(format!(
            "a range from {start} to {limit} in steps of {delta} has more elements than any memory"
        ));
    }
    Ok(n.max(0.0) as usize)
}

pub(super) fn range(c: &Ctx) -> Facts {
    let dtype = c.common_dtype(0..3)?;
    let scalar = |i: usize| -> Result<Option<f64>, String> {
        let fact = c.need(i)?;
        if fact.shape.as_deref().and_then(dims::count).is_some_and(|n| n != 1) {
            return Err(format!("input {i} must be a scalar"));
        }
        Ok(fact.value.as_ref().and_then(scalar_value))
    };
    let dim = match (scalar(0)?, scalar(1)?, scalar(2)?) {
        (Some(start), Some(limit), Some(delta)) => Dim::Known(range_len(start, limit, delta)?),
        // 0, 1, … up to a named size.
        (Some(0.0), None, Some(1.0)) => c.partial_ints(1).map_or(Dim::Unknown, |v| Dim::from(&v[0])),
        _ => Dim::Unknown,
    };
    one(dtype, Some(vec![dim]))
}

/// The single element of a tensor as f64.
fn scalar_value(t: &Tensor) -> Option<f64> {
    match t.dtype() {
        DType::F64 => t.elements::<f64>()?.first().copied(),
        dtype if dtype.is_float() => t.to_f32s()?.first().map(|v| f64::from(*v)),
        _ => t.to_i64s()?.first().map(|v| *v as f64),
    }
}

/// The element type that an integer attribute names; `default` if the attribute is absent.
fn dtype_attribute(c: &Ctx, default: Option<DType>) -> Option<DType> {
    c.node.int("dtype").map_or(default, |v| DType::from_onnx(i32::try_from(v).ok()?))
}

pub(super) fn eye_like(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    one(dtype_attribute(c, x.dtype), c.ranked(0, 2)?.map(<[Dim]>::to_vec))
}

pub(super) fn random_like(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    one(dtype_attribute(c, x.dtype), x.shape.clone())
}

pub(super) fn random(c: &Ctx) -> Facts {
    let shape = c.node.ints("shape").ok_or("attribute shape is missing")?;
    let elements: Vec<PartialInt> = shape.iter().copied().map(PartialInt::Known).collect();
    one(dtype_attribute(c, Some(DType::F32)), Some(shape_from(&elements)?))
}

pub(super) fn one_hot(c: &Ctx) -> Facts {
    let (indices, values) = (c.need(0)?, c.need(2)?);
    c.need(1)?;
    if let Some(s) = c.ranked(2, 1)? {
        dims::same(&s[0], &Dim::Known(2))?;
    }
    let depth = match c.value(1).and_then(scalar_value) {
        Some(v) if v < 0.0 => return Err(format!("depth {v} is negative")),
        Some(v) => Dim::Known(v as usize),
        None => c.partial_ints(1).and_then(|v| v.first().map(Dim::from)).unwrap_or(Dim::Unknown),
    };
    let Some(s) = &indices.shape else { return one(values.dtype, None) };
    let axis = dims::axis(c.node.int_or("axis", -1), s.len() + 1)?;
    let mut out = s.clone();
    out.insert(axis, depth);
    one(values.dtype, Some(out))
}
