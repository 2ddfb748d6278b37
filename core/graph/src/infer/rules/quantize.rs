//! Quantisation.

use super::{Ctx, Fact, Facts, one};
use sdrun_abi::DType;

/// The type that the attribute `output_dtype` names, if set.
fn output_dtype(c: &Ctx) -> Option<i32> {
    c.node.int("output_dtype").and_then(|v| i32::try_from(v).ok()).filter(|v| *v != 0)
}

pub(super) fn quantize(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    c.need(1)?;
    let dtype = match (c.opt(2), output_dtype(c)) {
        (Some(zero_point), _) => zero_point.dtype,
        (None, Some(code)) => DType::from_onnx(code),
        (None, None) => Some(DType::U8),
    };
    one(dtype, x.shape.clone())
}

pub(super) fn dequantize(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let scale = c.need(1)?.dtype;
    c.common_dtype([0, 2])?;
    one(output_dtype(c).map_or(scale, DType::from_onnx), x.shape.clone())
}

pub(super) fn dynamic(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    Ok(vec![
        Fact::new(Some(DType::U8), x.shape.clone()),
        Fact::new(Some(DType::F32), Some(vec![])),
        Fact::new(Some(DType::U8), Some(vec![])),
    ])
}
