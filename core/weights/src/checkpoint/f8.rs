//! Weights with scales beside them, delivered as plain values.
//!
//! For the weight `X.weight` the factors are in `X.scale_weight` (ComfyUI's scaled checkpoints, marked by a key `scaled_fp8`),
//! `X.weight_scale` (compressed-tensors, NVIDIA ModelOpt, ComfyUI's mixed precision, marked by JSON in `X.comfy_quant` or in
//! the file's `_quantization_metadata`) or `X.weight_scale_inv` (DeepSeek, Qwen; a factor as well, despite its name): one
//! number, one for each row, or one for each block of rows and columns. ComfyUI multiplies weights in f16 and bf16 by their
//! factor too. Scales of activations serve eight-bit arithmetic and are ignored. Any other tensor beside an eight-bit weight may
//! change its meaning, so that weight is refused.

use super::{
    container::{Container, slice_rows},
    vocabulary::Vocabulary,
};
use crate::{convert, memory::zeroed};
use rayon::prelude::*;
use sdrun_abi::{DType, EncodedWeight, Error, Result, Weight};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
    sync::Arc,
};

/// Last parts of keys that hold a weight's factors.
const SCALES: [&str; 3] = ["scale_weight", "weight_scale", "weight_scale_inv"];
/// Last parts of keys that belong to quantised weights and do not change their values.
const HARMLESS: [&str; 7] =
    ["scale_input", "input_scale", "output_scale", "k_scale", "v_scale", "comfy_quant", "scaled_fp8"];
/// Second factors, of formats with two levels of scales.
const SECOND: [&str; 1] = ["weight_scale_2"];
/// Rows and columns of a block where the scales do not divide the weight evenly (DeepSeek, Qwen).
const SIDE: usize = 128;
/// Elements converted at a time.
const BLOCK: usize = 1 << 14;

/// Wraps a container if any of its weights need widening.
pub(super) fn widen(inner: Arc<dyn Container>) -> Result<Arc<dyn Container>> {
    let (mut companions, mut hidden, mut narrow) = (HashMap::new(), HashSet::new(), HashSet::new());
    for key in inner.keys() {
        let (module, last) = key.rsplit_once('.').unwrap_or(("", key));
        if is_narrow(inner.describe(key)) && last == "weight" {
            narrow.insert(module.to_string());
        }
        if SCALES.contains(&last) || SECOND.contains(&last) || HARMLESS.contains(&last) {
            hidden.insert(key.to_string());
        }
    }
    for key in inner.keys() {
        let (module, last) = key.rsplit_once('.').unwrap_or(("", key));
        let is_scale = SCALES.contains(&last) || SECOND.contains(&last);
        let is_known = matches!(last, "weight" | "bias") || HARMLESS.contains(&last);
        if is_scale || (narrow.contains(module) && !is_known) {
            companions.entry(weight_of(module)).or_insert_with(Vec::new).push(key.to_string());
        }
    }
    let has_codes = inner.keys().iter().any(|key| is_narrow(inner.describe(key)));
    if !has_codes && hidden.is_empty() {
        return Ok(inner);
    }
    let metadata = inner.metadata().get("_quantization_metadata");
    let metadata = metadata.and_then(|text| serde_json::from_str::<serde_json::Value>(text).ok());
    let layers = metadata.and_then(|json| json.get("layers")?.as_object().cloned()).unwrap_or_default();
    Ok(Arc::new(Widened { inner, companions, hidden, layers }))
}

fn is_narrow(described: Result<(DType, Vec<usize>)>) -> bool {
    matches!(described, Ok((DType::F8E4M3 | DType::F8E5M2, _)))
}

/// The key of a module's weight, without a dot for a file without modules.
fn weight_of(module: &str) -> String {
    if module.is_empty() { "weight".into() } else { format!("{module}.weight") }
}

#[derive(Debug)]
struct Widened {
    inner: Arc<dyn Container>,
    /// For each weight, the keys beside it that may change its values.
    companions: HashMap<String, Vec<String>>,
    hidden: HashSet<String>,
    /// ComfyUI's formats by module.
    layers: serde_json::Map<String, serde_json::Value>,
}

/// The factors of a weight, one for each block of `rows` times `columns`.
struct Scales {
    factors: Vec<f32>,
    rows: usize,
    columns: usize,
    /// Blocks side by side.
    across: usize,
}

impl Widened {
    /// The type a tensor is widened to; `None` where it is delivered unchanged.
    fn target(&self, key: &str, dtype: DType) -> Result<Option<DType>> {
        let is_code = matches!(dtype, DType::F8E4M3 | DType::F8E5M2);
        let scale = self.scale(key)?;
        if !is_code && scale.is_none() {
            return Ok(None);
        }
        let format = self.format_of(key);
        let is_plain = !matches!(&format, Some((name, rotated)) if *rotated || !name.starts_with("float8_e"));
        if !dtype.is_float() || (is_code && !is_plain) {
            let stored = || self.inner.stored(key).map(|(dtype, _)| dtype);
            let format = format.map(|(name, _)| name).or_else(stored).unwrap_or_default();
            return Err(refused(key, &format!("is quantised as {format}")));
        }
        // Codes are exact in f16: E5M2 is its upper half, E4M3 has fewer bits in either part.
        Ok(Some(if scale.is_some() { DType::F32 } else { DType::F16 }))
    }

    /// The key of a weight's factors. `Unimplemented` where other tensors beside it may change its values.
    fn scale(&self, key: &str) -> Result<Option<&str>> {
        match self.companions.get(key).map(Vec::as_slice) {
            None => Ok(None),
            Some([scale]) if SCALES.iter().any(|last| is_last(scale, last)) => Ok(Some(scale)),
            Some(found) => Err(refused(key, &format!("is scaled by {}", found.join(" and ")))),
        }
    }

    /// The format that `X.comfy_quant` or the metadata states, and whether the weight was rotated.
    fn format_of(&self, key: &str) -> Option<(String, bool)> {
        let module = key.strip_suffix("weight")?;
        let marker = self.inner.read(&format!("{module}comfy_quant"), None).ok();
        let marker =
            marker.and_then(|marker| serde_json::from_slice::<serde_json::Value>(marker.data()).ok());
        let module = module.trim_end_matches('.');
        let is_layer =
            |name: &str| module.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        let stated = || self.layers.iter().find(|(name, _)| is_layer(name)).map(|(_, json)| json.clone());
        let json = marker.or_else(stated)?;
        let parameters = json.get("params").unwrap_or(&json);
        let rotated = [&json, parameters].iter().any(|o| o.get("convrot").is_some_and(|v| *v == true));
        Some((json.get("format")?.as_str()?.to_string(), rotated))
    }

    /// The factors of a weight of this shape.
    fn scales(&self, key: &str, shape: &[usize]) -> Result<Option<Scales>> {
        let Some(scale) = self.scale(key)? else { return Ok(None) };
        let weight = self.inner.read(scale, None)?;
        if !matches!(weight.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(refused(key, &format!("has a scale {scale:?} of type {}", weight.dtype)));
        }
        let mut factors = vec![0f32; weight.data().len() / weight.dtype.size()];
        convert::load(weight.data(), weight.dtype, DType::F32, &mut factors);
        let Some((rows, columns, across)) = blocks(shape, &weight.shape) else {
            let scales = &weight.shape;
            return Err(refused(
                key,
                &format!("has shape {shape:?}, and its scale {scale:?} has {scales:?}"),
            ));
        };
        Ok(Some(Scales { factors, rows, columns, across }))
    }
}

fn is_last(key: &str, last: &str) -> bool {
    key.rsplit('.').next() == Some(last)
}

fn refused(key: &str, why: &str) -> Error {
    Error::unsupported(format!("tensor {key:?} {why}, which sdrun does not read"))
        .with_hint("get the model in fp16, bf16, fp8 with plain scales, or GGUF")
}

/// Rows and columns of a block, and how many are side by side, by the shapes of a weight and of its scales.
fn blocks(weight: &[usize], scales: &[usize]) -> Option<(usize, usize, usize)> {
    let rows = weight.first().copied().unwrap_or(1);
    let columns: usize = weight.iter().skip(1).product();
    let count: usize = scales.iter().product();
    let (whole_rows, whole_columns) = (rows.max(1), columns.max(1));
    match scales {
        _ if count == 1 => Some((whole_rows, whole_columns, 1)),
        [first, rest @ ..] if *first == rows && rest.iter().all(|n| *n == 1) => Some((1, whole_columns, 1)),
        [down, across] if weight.len() == 2 && count > 0 => {
            if *down == rows.div_ceil(SIDE) && *across == columns.div_ceil(SIDE) {
                return Some((SIDE, SIDE, *across));
            }
            let even =
                rows.is_multiple_of(*down) && columns.is_multiple_of(*across) && rows > 0 && columns > 0;
            even.then(|| (rows / down, columns / across, *across))
        }
        _ => None,
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
        let scales = self.scales(key, &whole.shape)?;
        let rows = rows.unwrap_or(0..all);
        let first = rows.start;
        let source = if whole.shape.is_empty() { whole } else { slice_rows(whole, rows)? };
        let size = from.size();
        let mut data = zeroed((source.data().len() / size).saturating_mul(to.size()))?;
        let table = matches!(from, DType::F8E4M3 | DType::F8E5M2).then(|| values(from));
        let columns = source.shape.iter().skip(1).product::<usize>().max(1);
        data.par_chunks_mut(BLOCK * to.size())
            .zip(source.data().par_chunks(BLOCK * size))
            .enumerate()
            .for_each(|(block, (target, source))| {
                let mut decoded = vec![0f32; source.len() / size];
                match &table {
                    Some(table) => {
                        decoded
                            .iter_mut()
                            .zip(source)
                            .for_each(|(value, code)| *value = table[usize::from(*code)]);
                    }
                    // Every one of these is a value of f32, but for those of f64 that are too large.
                    None => drop(convert::load(source, from, DType::F32, &mut decoded)),
                }
                if let Some(scales) = &scales {
                    for (i, value) in decoded.iter_mut().enumerate() {
                        let at = block * BLOCK + i;
                        let (row, column) = (first + at / columns, at % columns);
                        let place = row / scales.rows * scales.across + column / scales.columns;
                        *value *= scales.factors.get(place).copied().unwrap_or(f32::NAN);
                    }
                }
                convert::store(&decoded, to, target);
            });
        Weight::new(to, source.shape.clone(), data)
    }
    fn encoded(
        &self,
        key: &str,
        rows: Option<Range<usize>>,
        encodings: &[&str],
    ) -> Result<Option<EncodedWeight<'_>>> {
        let (dtype, _) = self.inner.describe(key)?;
        if self.target(key, dtype)?.is_some() { Ok(None) } else { self.inner.encoded(key, rows, encodings) }
    }
    fn vocabulary(&self) -> Option<Vocabulary> {
        self.inner.vocabulary()
    }
    fn metadata(&self) -> &BTreeMap<String, String> {
        self.inner.metadata()
    }
}

/// The value of each of the 256 codes (Micikevicius et al., "FP8 Formats for Deep Learning", 2022). E4M3 here is
/// the variant without infinities (`float8_e4m3fn`).
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

    /// A file: tensors, and metadata.
    #[derive(Debug, Default)]
    struct File(BTreeMap<String, (DType, Vec<usize>, Vec<u8>)>, BTreeMap<String, String>);

    impl File {
        fn with(mut self, key: &str, dtype: DType, shape: &[usize], data: Vec<u8>) -> Self {
            self.0.insert(key.into(), (dtype, shape.to_vec(), data));
            self
        }
        fn floats(self, key: &str, shape: &[usize], values: impl IntoIterator<Item = f32>) -> Self {
            let data = values.into_iter().flat_map(f32::to_le_bytes).collect();
            self.with(key, DType::F32, shape, data)
        }
        /// `a.weight` of codes.
        fn codes(shape: &[usize]) -> Self {
            let count: usize = shape.iter().product();
            let codes = (0..count).map(|i| (i * 37 % 120) as u8).collect();
            File::default().with("a.weight", DType::F8E4M3, shape, codes)
        }
        fn open(self) -> Arc<dyn Container> {
            widen(Arc::new(self)).unwrap()
        }
    }

    impl Container for File {
        fn keys(&self) -> Vec<&str> {
            self.0.keys().map(String::as_str).collect()
        }
        fn stored(&self, key: &str) -> Option<(String, Vec<usize>)> {
            self.0.get(key).map(|(dtype, shape, _)| (dtype.to_string(), shape.clone()))
        }
        fn describe(&self, key: &str) -> Result<(DType, Vec<usize>)> {
            let found = self.0.get(key).ok_or_else(|| Error::not_found(key))?;
            Ok((found.0, found.1.clone()))
        }
        fn read(&self, key: &str, rows: Option<Range<usize>>) -> Result<Weight<'_>> {
            let (dtype, shape, data) = self.0.get(key).ok_or_else(|| Error::not_found(key))?;
            let weight = Weight::new(*dtype, shape.clone(), &data[..])?;
            rows.map_or(Ok(weight), |rows| slice_rows(Weight::new(*dtype, shape.clone(), &data[..])?, rows))
        }
        fn metadata(&self) -> &BTreeMap<String, String> {
            &self.1
        }
    }

    fn f32s(weight: &Weight<'_>) -> Vec<f32> {
        assert_eq!(weight.dtype, DType::F32);
        weight.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    #[test]
    fn scales_are_for_tensors_rows_and_blocks() {
        let e4m3 = values(DType::F8E4M3);
        for (shape, scales, side) in [
            // DeepSeek's blocks, whole and cut off at the edges.
            ([256, 384], [2, 3], [128, 128]),
            ([300, 140], [3, 2], [128, 128]),
            ([6, 5], [1, 1], [128, 128]),
            // Other blocks, groups in rows, rows.
            ([64, 96], [2, 3], [32, 32]),
            ([4, 96], [4, 3], [1, 32]),
            ([6, 5], [6, 1], [1, 5]),
        ] {
            for name in ["weight_scale_inv", "weight_scale", "scale_weight"] {
                let factor = |i: usize| 0.37 + i as f32;
                let file = File::codes(&shape).floats(
                    &format!("a.{name}"),
                    &scales,
                    (0..scales[0] * scales[1]).map(factor),
                );
                let file = file.floats("a.input_scale", &[], [9.0]).open();
                assert_eq!(file.keys(), ["a.weight"]);
                let expected: Vec<f32> = (0..shape[0] * shape[1])
                    .map(|i| {
                        let (row, column) = (i / shape[1], i % shape[1]);
                        e4m3[i * 37 % 120] * factor(row / side[0] * scales[1] + column / side[1])
                    })
                    .collect();
                assert_eq!(f32s(&file.read("a.weight", None).unwrap()), expected, "{shape:?} {name}");
                let last = file.read("a.weight", Some(3..shape[0])).unwrap();
                assert_eq!(f32s(&last), expected[3 * shape[1]..]);
            }
        }
    }

    #[test]
    fn halves_are_scaled_too() {
        let halves: Vec<u8> =
            [1.5f32, -2.0].iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
        let wide: Vec<u8> =
            [1.5f32, -2.0].iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
        for (dtype, data) in [(DType::F16, halves), (DType::BF16, wide)] {
            let file =
                File::default().with("a.weight", dtype, &[2, 1], data).floats("a.scale_weight", &[], [3.0]);
            let file = file.open();
            assert_eq!(file.describe("a.weight").unwrap().0, DType::F32);
            assert_eq!(f32s(&file.read("a.weight", None).unwrap()), [4.5, -6.0]);
        }
    }

    #[test]
    fn what_may_change_a_weight_and_is_not_known_is_refused() {
        let codes = || File::codes(&[6, 5]);
        let scaled = || codes().floats("a.weight_scale", &[], [2.0]);
        let marked = |json: &str| scaled().with("a.comfy_quant", DType::U8, &[json.len()], json.into());
        let mut metadata = scaled();
        let layers = r#"{"format_version": "1.0", "layers": {"a": {"format": "mxfp8"}}}"#;
        metadata.1.insert("_quantization_metadata".into(), layers.into());
        for (file, words) in [
            (
                scaled().floats("a.weight_scale_2", &[], [2.0]),
                "scaled by a.weight_scale and a.weight_scale_2",
            ),
            (codes().floats("a.weight_zero_point", &[], [2.0]), "scaled by a.weight_zero_point"),
            (scaled().floats("a.scale_weight", &[], [2.0]), "scaled by a.scale_weight and a.weight_scale"),
            (codes().floats("a.weight_scale", &[4, 3], [1.0; 12]), "has shape [6, 5]"),
            (codes().with("a.weight_scale", DType::U8, &[6, 1], vec![1; 6]), "of type u8"),
            (marked(r#"{"format": "mxfp8"}"#), "quantised as mxfp8"),
            (marked(r#"{"format": "float8_e4m3fn", "convrot": true}"#), "quantised as float8_e4m3fn"),
            (metadata, "quantised as mxfp8"),
        ] {
            let file = file.open();
            for error in [file.describe("a.weight").err(), file.read("a.weight", None).err()] {
                let message = error.map(|error| error.message);
                let is_shape = words.starts_with("has shape") || words.starts_with("of type");
                assert!(
                    message.is_none() && is_shape || message.unwrap_or_default().contains(words),
                    "{words}"
                );
            }
            assert!(file.read("a.weight", None).is_err(), "{words}");
        }
        let plain = marked(r#"{"format": "float8_e4m3fn", "full_precision_matrix_mult": true}"#).open();
        assert_eq!(f32s(&plain.read("a.weight", None).unwrap())[1], values(DType::F8E4M3)[37] * 2.0);
    }

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
