//! Compares outputs with a reference.

mod layers;

pub use layers::{Divergence, Reduced, Run, Sides};

use crate::{HostTensor, Result, Tensors};
use sdrun_abi::{DType, Error as AbiError, Precision};
use serde::{Deserialize, Serialize};

/// How far an output is from its reference, computed in f64.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Output name.
    pub output: String,
    /// Largest absolute difference.
    pub max_abs_error: f64,
    /// Mean absolute difference.
    pub mean_abs_error: f64,
    /// Largest absolute value of the reference.
    pub max_abs_reference: f64,
    /// `max_abs_error / max_abs_reference`; the absolute error if the reference is all zero.
    pub relative_error: f64,
    /// Cosine of the angle between the two as vectors; 1 if both are zero.
    pub cosine: f64,
    /// Signal-to-noise ratio in dB; `None` if the two are equal.
    pub snr_db: Option<f64>,
    /// Peak signal-to-noise ratio in dB: the reference's range over the root of the mean squared error, as for pictures. `None` if
    /// the two are equal.
    #[serde(default)]
    pub psnr_db: Option<f64>,
    /// Values that are NaN or infinite here but finite in the reference.
    pub not_finite: usize,
    /// Values that are NaN or infinite in the reference and differ here.
    #[serde(default)]
    pub reference_not_finite: usize,
}

/// Tolerance for a precision: the worst output must satisfy both limits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tolerance {
    /// Maximum `relative_error`; `None` means no limit.
    pub relative_error: Option<f64>,
    /// Minimum cosine.
    pub cosine: f64,
}

impl Tolerance {
    /// fp32: relative error ≤ 1e-3 and cosine ≥ 0.99999; fp16: cosine ≥ 0.999; bf16: cosine ≥ 0.99;
    /// q8_0: cosine ≥ 0.998; q4_k: cosine ≥ 0.95.
    pub fn of(precision: Precision) -> Self {
        match precision {
            Precision::Fp32 => Tolerance { relative_error: Some(1e-3), cosine: 0.99999 },
            Precision::Fp16 => Tolerance { relative_error: None, cosine: 0.999 },
            Precision::Bf16 => Tolerance { relative_error: None, cosine: 0.99 },
            Precision::Q8_0 => Tolerance { relative_error: None, cosine: 0.998 },
            Precision::Q4K => Tolerance { relative_error: None, cosine: 0.95 },
        }
    }

    /// The tolerance of a precision, or that of the outputs' own type if it is coarser: a graph of f16 tensors
    /// computed in fp32 still rounds each of them to f16.
    pub fn for_outputs(precision: Precision, outputs: &Tensors) -> Self {
        let has = |dtype| outputs.values().any(|tensor| tensor.dtype() == dtype);
        Self::of(match precision {
            Precision::Bf16 | Precision::Q4K => precision,
            _ if has(DType::BF16) => Precision::Bf16,
            Precision::Fp32 if has(DType::F16) => Precision::Fp16,
            other => other,
        })
    }

    /// The tolerance for a graph that [quantizes](sdrun_graph::Graph::quantizes): relative error ≤ 0.1 and cosine ≥ 0.99, or
    /// this tolerance if it is wider. The smallest rounding difference can move a value at the border of two steps to
    /// the other step, and an 8-bit step is 1/255 of the range.
    pub fn quantized(self) -> Self {
        Tolerance { relative_error: self.relative_error.map(|e| e.max(0.1)), cosine: self.cosine.min(0.99) }
    }

    /// Whether an output is within tolerance.
    pub fn accepts(&self, c: &Comparison) -> bool {
        c.not_finite == 0
            && c.reference_not_finite == 0
            && c.cosine >= self.cosine
            && self.relative_error.is_none_or(|most| c.relative_error <= most)
    }
}

/// Compares outputs with those of a reference. Fails if names or shapes differ.
pub fn compare(outputs: &Tensors, reference: &Tensors) -> Result<Vec<Comparison>> {
    let names = |t: &Tensors| t.keys().cloned().collect::<Vec<_>>().join(", ");
    if !outputs.keys().eq(reference.keys()) {
        return Err(AbiError::invalid(format!(
            "the outputs are [{}], those of the reference [{}]",
            names(outputs),
            names(reference)
        ))
        .into());
    }
    outputs.iter().map(|(name, tensor)| compare_one(name, tensor, &reference[name])).collect()
}

fn compare_one(name: &str, tensor: &HostTensor, reference: &HostTensor) -> Result<Comparison> {
    if tensor.shape() != reference.shape() {
        return Err(AbiError::invalid(format!(
            "output {name:?} has shape {:?}, the reference {:?}",
            tensor.shape(),
            reference.shape()
        ))
        .into());
    }
    let (Some(a), Some(b)) = (tensor.values(), reference.values()) else {
        let dtype = tensor.dtype();
        return Err(AbiError::unsupported(format!("cannot compare output {name:?} of type {dtype}")).into());
    };
    let count = a.len() as f64;
    let (mut max, mut sum, mut peak, mut dot, mut aa, mut bb, mut noise) =
        (0f64, 0f64, 0f64, 0f64, 0f64, 0f64, 0f64);
    let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
    let (mut not_finite, mut reference_not_finite) = (0, 0);
    for (x, y) in a.zip(b) {
        if !y.is_finite() {
            // Non-finite values of the reference must match exactly.
            reference_not_finite += usize::from(!(x == y || (x.is_nan() && y.is_nan())));
            continue;
        }
        if !x.is_finite() {
            not_finite += 1;
            continue;
        }
        let d = (x - y).abs();
        max = max.max(d);
        sum += d;
        noise += d * d;
        peak = peak.max(y.abs());
        (low, high) = (low.min(y), high.max(y));
        dot += x * y;
        aa += x * x;
        bb += y * y;
    }
    let cosine =
        if aa == 0.0 && bb == 0.0 { 1.0 } else { dot / (aa.sqrt() * bb.sqrt()).max(f64::MIN_POSITIVE) };
    Ok(Comparison {
        output: name.to_string(),
        max_abs_error: max,
        mean_abs_error: sum / count.max(1.0),
        max_abs_reference: peak,
        relative_error: if peak > 0.0 { max / peak } else { max },
        cosine: cosine.min(1.0),
        snr_db: (noise > 0.0).then(|| 10.0 * (bb / noise).log10()),
        psnr_db: (noise > 0.0).then(|| 10.0 * ((high - low).powi(2) * count / noise).log10()),
        not_finite,
        reference_not_finite,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(values: &[f32]) -> Tensors {
        Tensors::from([("y".to_string(), HostTensor::from_f32(vec![values.len()], values).unwrap())])
    }

    #[test]
    fn figures_match_hand_computed_ones() {
        let c = &compare(&one(&[1.0, 2.0, -4.5]), &one(&[1.0, 2.0, -4.0])).unwrap()[0];
        assert_eq!((c.max_abs_error, c.max_abs_reference, c.relative_error), (0.5, 4.0, 0.125));
        assert!((c.mean_abs_error - 0.5 / 3.0).abs() < 1e-12);
        // cos = (1+4+18) / sqrt(25.25 * 21), SNR = 10 log10(21 / 0.25)
        assert!((c.cosine - 23.0 / (25.25f64 * 21.0).sqrt()).abs() < 1e-12);
        assert!((c.snr_db.unwrap() - 10.0 * 84f64.log10()).abs() < 1e-9);
    }

    #[test]
    fn the_tolerance_rejects_wrong_outputs() {
        let fp32 = Tolerance::of(Precision::Fp32);
        let judge = |a: &[f32], b: &[f32]| fp32.accepts(&compare(&one(a), &one(b)).unwrap()[0]);
        assert!(judge(&[1.0, 2.0], &[1.0, 2.0005]));
        assert!(!judge(&[1.0, 2.0], &[1.0, 2.01]));
        assert!(!judge(&[1.0, f32::NAN], &[1.0, 2.0]));
        assert!(!judge(&[0.0, 0.0], &[1.0, 2.0]));
        assert!(judge(&[f32::INFINITY, 1.0], &[f32::INFINITY, 1.0]));
        // The result names the side that is not finite.
        let sides = |a: &[f32], b: &[f32]| {
            let c = &compare(&one(a), &one(b)).unwrap()[0];
            (c.not_finite, c.reference_not_finite)
        };
        assert_eq!(sides(&[1.0, f32::NAN], &[1.0, 2.0]), (1, 0));
        assert_eq!(sides(&[1.0, 2.0], &[f32::NAN, 2.0]), (0, 1));
        assert_eq!(sides(&[f32::NAN, 2.0], &[f32::NAN, 2.0]), (0, 0));
        assert!(compare(&one(&[1.0]), &one(&[1.0, 2.0])).is_err());

        // Quantization explains a difference of about one step, but neither NaN nor a different result.
        let judge = |a: &[f32], b: &[f32]| fp32.quantized().accepts(&compare(&one(a), &one(b)).unwrap()[0]);
        assert!(judge(&[1.0, 2.0, -1.5], &[1.05, 2.0, -1.5]));
        assert!(!judge(&[1.0, 2.0, -1.5], &[1.3, 2.0, -1.5]));
        assert!(!judge(&[1.0, 2.0, f32::NAN], &[1.0, 2.0, -1.5]));
        let bf16 = Tolerance::of(Precision::Bf16);
        assert_eq!(bf16.quantized(), bf16, "already as wide");
    }
}
