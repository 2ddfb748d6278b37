//! Weights of eight bits with scales beside them, delivered as what they mean.
//!
//! A checkpoint in `F8_E4M3` or `F8_E5M2` may have, for the module `X` of a weight `X.weight`, a factor in f32:
//! `X.scale_weight` (ComfyUI's scaled checkpoints, marked by a key `scaled_fp8`) or `X.weight_scale` (its later
//! mixed-precision ones, marked by JSON in `X.comfy_quant`), one number or one per row. Scales of activations
//! (`X.scale_input`, `X.input_scale`) are for arithmetic in eight bits and are of no use here.

use super::container::{Container, slice_rows};
use crate::memory::zeroed;
use rayon::prelude::*;
use sdrun_abi::{DType, Error, Result, Weight};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
    sync::Arc,
};

/// Last parts of keys that hold the factor of a weight.
const SCALES: [&str; 2] = ["scale_weight", "weight_scale"];
/// Last parts of keys that belong to quantised weights and are not delivered.
const COMPANIONS: [&str; 7] = [
    "scale_weight",
    "weight_scale",
    "scale_input",
    "input_scale",
    "comfy_quant",
    "scaled_fp8",
    "weight_scale_2",
];
/// Elements converted at a time.
const BLOCK: usize = 1 << 14;

/// Wraps a container whose weights need widening; others stay as they are.
pub(super) fn widen(inner: Arc<dyn Container>) -> Result<Arc<dyn Container>> {
    let (mut scales, mut hidden, mut narrow) = (HashMap::new(), HashSet::new(), false);
    for key in inner.keys() {
        let (module, last) = key.rsplit_once('.').unwrap_or(("", key));
        narrow |= matches!(inner.describe(key), Ok((DType::F8E4M3 | DType::F8E5M2, _)));
        if !COMPANIONS.contains(&last) {
            continue;
        }
        hidden.insert(key.to_string());
        if SCALES.contains(&last) {
            scales.insert(format!("{module}.weight"), key.to_string());
        }
    }
    if !narrow && hidden.is_empty() {
        return Ok(inner);
    }
    Ok(Arc::new(Widened { inner, scales, hidden }))
}

#[derive(Debug)]
struct Widened {
    inner: Arc<dyn Container>,
    /// Weight to the key of its factor.
    scales: HashMap<String, String>,
    hidden: HashSet<String>,
}

impl Widened {
    /// What a tensor becomes: `None` where it stays as it is.
    fn target(&self, key: &str, dtype: DType) -> Result<Option<DType>> {
        let scale = self.scales.get(key);
        match dtype {
            // Both are exact in f16: E5M2 is its upper half, E4M3 has fewer bits in either part.
            DType::F8E4M3 | DType::F8E5M2 => Ok(Some(if scale.is_some() { DType::F32 } else { DType::F16 })),
            _ if scale.is_some() && !dtype.is_float() => {
                let format = self.format_of(key);
                Err(Error::unsupported(format!(
                    "tensor {key:?} is quantised as {format}, which we do not read"
                ))
                .with_hint("get the model in fp16, bf16, fp8 or GGUF"))
            }
            _ => Ok(None),
        }
    }

    /// What `X.comfy_quant` says, for a message.
    fn format_of(&self, key: &str) -> String {
        let stated = key.strip_suffix("weight").and_then(|module| {
            let marker = self.inner.read(&format!("{module}comfy_quant"), None).ok()?;
            let json: serde_json::Value = serde_json::from_slice(marker.data()).ok()?;
            Some(json.get("format")?.as_str()?.to_string())
        });
        stated.or_else(|| self.inner.stored(key).map(|(dtype, _)| dtype)).unwrap_or_default()
    }

    /// The factors of a weight: one, or as many as it has rows.
    fn factors(&self, key: &str, rows: usize) -> Result<Option<Vec<f32>>> {
        let Some(scale) = self.scales.get(key) else { return Ok(None) };
        let weight = self.inner.read(scale, None)?;
        let data = weight.data();
        let factors: Vec<f32> = match weight.dtype {
            DType::F32 => data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            DType::F16 => {
                data.as_chunks::<2>().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect()
            }
            DType::BF16 => {
                data.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()
            }
            other => return Err(Error::unsupported(format!("the scale {scale:?} is of type {other}"))),
        };
        if factors.len() != 1 && factors.len() != rows {
            let (count, shape) = (factors.len(), &weight.shape);
            return Err(Error::unsupported(format!(
                "the scale {scale:?} has {count} values in shape {shape:?}, neither one nor one for each of {rows} rows"
            )));
        }
        Ok(Some(factors))
    }
}

impl Container for Widened {
    fn keys(&self) -> Vec<&str> {
        self.inner.keys().into_iter().filter(|key| !self.hidden.contains(*key)).collect()
    }
    fn stored(&self, key: &str) -> Option<(String, Vec<usize>)> {
        self.inner.stored(key)
    }
    fn describe(&self, key: &str) -> Result<(DType, Vec<usize>)> {
        let (dtype, shape) = self.inner.describe(key)?;
        Ok((self.target(key, dtype)?.unwrap_or(dtype), shape))
    }
    fn read(&self, key: &str, rows: Option<Range<usize>>) -> Result<Weight<'_>> {
        let whole = self.inner.read(key, None)?;
        let (from, all) = (whole.dtype, whole.shape.first().copied().unwrap_or(1));
        let Some(to) = self.target(key, from)? else {
            return match rows {
                Some(rows) => slice_rows(whole, rows),
                None => Ok(whole),
            };
        };
        let factors = self.factors(key, all)?;
        let rows = rows.unwrap_or(0..all);
        let source = if whole.shape.is_empty() { whole } else { slice_rows(whole, rows.clone())? };
        let factors = match factors {
            Some(list) if list.len() > 1 => list.get(rows).map(<[f32]>::to_vec).unwrap_or_default(),
            Some(list) => list,
            None => Vec::new(),
        };
        let mut data = zeroed(source.data().len().saturating_mul(to.size()))?;
        let per_factor = source.data().len().checked_div(factors.len()).unwrap_or(0).max(1);
        let table = values(from);
        data.par_chunks_mut(BLOCK * to.size()).zip(source.data().par_chunks(BLOCK)).enumerate().for_each(
            |(block, (target, source))| {
                if to == DType::F16 {
                    for (bytes, code) in target.as_chunks_mut::<2>().0.iter_mut().zip(source) {
                        *bytes = half::f16::from_f32(table[usize::from(*code)]).to_le_bytes();
                    }
                    return;
                }
                let start = block * BLOCK;
                for (i, (bytes, code)) in target.as_chunks_mut::<4>().0.iter_mut().zip(source).enumerate() {
                    let factor = factors.get((start + i) / per_factor).copied().unwrap_or(1.0);
                    *bytes = (table[usize::from(*code)] * factor).to_le_bytes();
                }
            },
        );
        Weight::new(to, source.shape.clone(), data)
    }
    fn metadata(&self) -> &BTreeMap<String, String> {
        self.inner.metadata()
    }
}

/// The value of each of the 256 codes (Micikevicius et al., "FP8 Formats for Deep Learning", 2022). E4M3 here is
/// the variant without infinities (`float8_e4m3fn`), as everywhere in this field.
fn values(dtype: DType) -> [f32; 256] {
    let (mantissa, bias) = if dtype == DType::F8E4M3 { (3, 7) } else { (2, 15) };
    std::array::from_fn(|code| {
        let magnitude = (code & 0x7f) as i32;
        let (exponent, fraction) = (magnitude >> mantissa, magnitude & ((1 << mantissa) - 1));
        let step = |e: i32| f32::powi(2.0, e - bias - mantissa);
        let value = match (dtype, exponent, fraction) {
            (DType::F8E4M3, 15, 7) => f32::NAN,
            (DType::F8E5M2, 31, 0) => f32::INFINITY,
            (DType::F8E5M2, 31, _) => f32::NAN,
            (_, 0, _) => fraction as f32 * step(1),
            _ => (fraction + (1 << mantissa)) as f32 * step(exponent),
        };
        if code >= 0x80 { -value } else { value }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_the_values_of_the_formats() {
        let e4m3 = values(DType::F8E4M3);
        assert_eq!((e4m3[0x00], e4m3[0x38], e4m3[0x7e], e4m3[0xbc]), (0.0, 1.0, 448.0, -1.5));
        assert_eq!((e4m3[0x01], e4m3[0x07], e4m3[0x08]), (1.0 / 512.0, 7.0 / 512.0, 1.0 / 64.0));
        assert!(e4m3[0x7f].is_nan() && e4m3[0xff].is_nan() && e4m3[0x80].is_sign_negative());
        // E5M2 is the upper byte of an f16.
        for (code, value) in values(DType::F8E5M2).into_iter().enumerate() {
            let half = half::f16::from_bits((code as u16) << 8).to_f32();
            assert!(value == half || (value.is_nan() && half.is_nan()), "{code}: {value} {half}");
        }
        for table in [values(DType::F8E4M3), values(DType::F8E5M2)] {
            for value in table.into_iter().filter(|value| !value.is_nan()) {
                assert_eq!(half::f16::from_f32(value).to_f32(), value, "exact in f16");
            }
        }
    }
}
