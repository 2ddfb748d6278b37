//! Converts floating-point types to and from f32, rounding once.

use crate::simd::{self, Block, Half};
use half::{bf16, f16};
use rayon::prelude::*;
use sdrun_abi::{DType, Error, Result};

/// Elements converted at a time: both sides fit the first-level cache.
pub(crate) const BLOCK: usize = 2048;

/// The type as one of 16 bits.
pub(crate) fn half_of(dtype: DType) -> Option<Half> {
    match dtype {
        DType::F16 => Some(Half::F16),
        DType::BF16 => Some(Half::BF16),
        _ => None,
    }
}

/// Whether values of this type can be converted.
pub(crate) fn is_convertible(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::F64)
}

/// Converts contiguous little-endian `data` between two different types of [`is_convertible`], rounding to
/// nearest, ties to even, once. A finite value too large for `to` is an error; infinities and NaNs are kept.
pub(crate) fn convert(data: &[u8], from: DType, to: DType) -> Result<Vec<u8>> {
    let mut out = vec![0; data.len() / from.size() * to.size()];
    convert_into(data, from, to, &mut out)?;
    Ok(out)
}

/// As [`convert`], into `out`, which has room for as many elements.
pub(crate) fn convert_into(data: &[u8], from: DType, to: DType, out: &mut [u8]) -> Result<()> {
    data.par_chunks(BLOCK * from.size()).zip(out.par_chunks_mut(BLOCK * to.size())).try_for_each(
        |(source, target)| {
            let mut block = [0f32; BLOCK];
            let values = &mut block[..source.len() / from.size()];
            let too_large = load(source, from, to, values).or_else(|| {
                let finite = store(values, to, target);
                let limit = overflow_limit(to);
                let value = values.iter().find(|v| v.is_finite() && v.abs() >= limit).filter(|_| !finite);
                value.map(|v| f64::from(*v))
            });
            if let Some(value) = too_large {
                let message = format!("the value {value:e} is out of {to}'s range");
                return Err(Error::new(sdrun_abi::ErrorCode::OutOfRange, message));
            }
            Ok(())
        },
    )
}

/// Smallest magnitude that rounds to infinity.
pub(crate) fn overflow_limit(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 65520.0,
        DType::BF16 => f32::from_bits(0x7f7f_8000),
        _ => f32::INFINITY,
    }
}

/// The largest magnitude; `None` where a value is not finite, or of another type than f32, f16 and bf16.
pub fn largest(data: &[u8], dtype: DType) -> Option<f32> {
    /// Bytes that a thread reads at a time.
    const PART: usize = 1 << 18;
    // Magnitudes of all three types are in the order of their bits.
    fn most<T: Copy + Ord + Default + Send + Sync>(data: &[u8], of: impl Fn(&[u8]) -> T + Send + Sync) -> T {
        data.par_chunks(PART).map(of).max().unwrap_or_default()
    }
    let halves = |part: &[u8]| {
        let bits = part.as_chunks().0.iter().map(|bytes| i16::from_le_bytes(*bytes) & 0x7fff);
        bits.fold(0, Ord::max)
    };
    let most = match dtype {
        DType::F16 => f16::from_bits(most(data, halves) as u16).to_f32(),
        DType::BF16 => bf16::from_bits(most(data, halves) as u16).to_f32(),
        DType::F32 => f32::from_bits(most(data, |part| {
            let bits = part.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes) & 0x7fff_ffff);
            bits.fold(0, Ord::max)
        })),
        _ => return None,
    };
    Some(most).filter(|most| most.is_finite())
}

/// Reads `from` elements into f32, to be written as `to`. Returns the first finite value that f32 cannot hold.
pub(crate) fn load(source: &[u8], from: DType, to: DType, values: &mut [f32]) -> Option<f64> {
    match from {
        DType::F64 => {
            for (v, bytes) in values.iter_mut().zip(source.as_chunks::<8>().0) {
                let x = f64::from_le_bytes(*bytes);
                *v = if to == DType::F32 { x as f32 } else { round_to_odd(x) };
                if v.is_infinite() && x.is_finite() {
                    return Some(x);
                }
            }
        }
        DType::F16 => simd::widen(Half::F16, source, values, Block::line(values.len())),
        DType::BF16 => simd::widen(Half::BF16, source, values, Block::line(values.len())),
        _ => {
            for (v, bytes) in values.iter_mut().zip(source.as_chunks::<4>().0) {
                *v = f32::from_le_bytes(*bytes);
            }
        }
    }
    None
}

/// Writes values as `dtype`, one of [`is_convertible`], rounding to nearest, ties to even. Returns false if a value
/// may have become infinite.
pub(crate) fn store(values: &[f32], dtype: DType, target: &mut [u8]) -> bool {
    match dtype {
        DType::F64 => {
            for (bytes, v) in target.as_chunks_mut::<8>().0.iter_mut().zip(values) {
                *bytes = f64::from(*v).to_le_bytes();
            }
        }
        DType::F16 => return simd::narrow(Half::F16, values, target, Block::line(values.len())),
        DType::BF16 => return simd::narrow(Half::BF16, values, target, Block::line(values.len())),
        _ => {
            for (bytes, v) in target.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *bytes = v.to_le_bytes();
            }
        }
    }
    true
}

/// An f64 as the f32 next to it whose last bit is odd, unless f32 holds it exactly. Rounding that to a type
/// with at least two bits less gives what rounding the f64 directly would (Boldo and Melquiond, "Emulation of
/// FMA and correctly rounded sums", 2008).
fn round_to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    let bits = nearest.to_bits();
    if f64::from(nearest) == x || nearest.is_nan() || x.is_infinite() || bits & 1 == 1 {
        return nearest;
    }
    let towards_zero = f64::from(nearest).abs() > x.abs();
    f32::from_bits(if towards_zero { bits - 1 } else { bits + 1 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use DType::*;
    use proptest::prelude::*;

    fn bytes_of<const N: usize, T>(values: &[T], bytes: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
        values.iter().flat_map(bytes).collect()
    }
    fn f16s(data: &[u8]) -> Vec<f16> {
        data.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b)).collect()
    }

    /// Rounding by comparison with both neighbours: slow and plain.
    fn nearest_f16(x: f64) -> f16 {
        let all = (0..=0x7bffu16).map(f16::from_bits);
        let magnitude = all.min_by(|a, b| {
            let (da, db) = ((f64::from(*a) - x.abs()).abs(), (f64::from(*b) - x.abs()).abs());
            da.total_cmp(&db).then((a.to_bits() & 1).cmp(&(b.to_bits() & 1)))
        });
        let bits = magnitude.unwrap().to_bits() | if x.is_sign_negative() { 0x8000 } else { 0 };
        f16::from_bits(bits)
    }

    #[test]
    fn the_largest_magnitude_is_found_among_finite_values() {
        for count in [0, 1, 7, 300_000] {
            let mut values: Vec<f32> = (0..count).map(|i| (i % 1000) as f32 / 500.0 - 1.0).collect();
            if let Some(last) = values.last_mut() {
                *last = -3.5;
            }
            for dtype in [F32, F16, BF16] {
                let bytes = |values: &[f32]| match dtype {
                    F32 => bytes_of(values, |v| v.to_le_bytes()),
                    F16 => bytes_of(values, |v| f16::from_f32(*v).to_le_bytes()),
                    _ => bytes_of(values, |v| bf16::from_f32(*v).to_le_bytes()),
                };
                assert_eq!(largest(&bytes(&values), dtype), Some(if count == 0 { 0.0 } else { 3.5 }));
                for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let odd = [&values[..], &[odd], &values].concat();
                    assert_eq!(largest(&bytes(&odd), dtype), None);
                }
            }
        }
        assert_eq!(largest(&[0; 16], F64), None);
    }

    #[test]
    fn f64_rounds_once() {
        // A hair above the middle between 1 and the next f16: rounding by way of f32 lands on the tie.
        let hair_above = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        let cases = [
            hair_above,
            -hair_above,
            1.0 + 2f64.powi(-11),
            2f64.powi(-25) * 1.0000000001,
            2f64.powi(-25),
            65519.99,
        ];
        let out = convert(&bytes_of(&cases, |x| x.to_le_bytes()), F64, F16).unwrap();
        let expected: Vec<f16> = cases.iter().map(|x| nearest_f16(*x)).collect();
        assert_eq!(f16s(&out), expected);
        assert_eq!(expected[0].to_bits(), 0x3c01);
        assert_eq!(expected[2].to_bits(), 0x3c00);

        let bf = convert(&(1.0 + 2f64.powi(-8) + 2f64.powi(-45)).to_le_bytes(), F64, BF16).unwrap();
        assert_eq!(bf, bf16::from_bits(0x3f81).to_le_bytes());
    }

    #[test]
    fn every_half_survives_the_way_through_f32_and_f64() {
        for (half, infinity) in [(F16, f16::INFINITY.to_bits()), (BF16, bf16::INFINITY.to_bits())] {
            let all: Vec<u16> = (0..=u16::MAX).filter(|bits| bits & 0x7fff <= infinity).collect();
            let data = bytes_of(&all, |v| v.to_le_bytes());
            for wide in [F32, F64] {
                let there = convert(&data, half, wide).unwrap();
                assert_eq!(convert(&there, wide, half).unwrap(), data, "{half} {wide}");
            }
        }
    }

    #[test]
    fn overflow_is_an_error_and_infinity_is_not() {
        for (value, to) in [(65520.0, F16), (-1e300, F32), (1e300, F16), (-3.4e38, BF16)] {
            let error = convert(&f64::to_le_bytes(value), F64, to).unwrap_err();
            assert!(error.message.contains(&format!("out of {to}'s range")), "{error}");
        }
        let error = convert(&65520f32.to_le_bytes(), F32, F16).unwrap_err();
        assert_eq!(error.message, "the value 6.552e4 is out of f16's range");
        assert!(convert(&65519.9f32.to_le_bytes(), F32, F16).is_ok());
        let infinite = bytes_of(&[f32::INFINITY, f32::NEG_INFINITY], |v| v.to_le_bytes());
        assert_eq!(f16s(&convert(&infinite, F32, F16).unwrap()), [f16::INFINITY, f16::NEG_INFINITY]);
        assert!(f16s(&convert(&f64::NAN.to_le_bytes(), F64, F16).unwrap())[0].is_nan());
    }

    #[test]
    fn blocks_join_without_a_seam() {
        let values: Vec<f32> = (0..3 * BLOCK + 5).map(|i| i as f32 / 7.0).collect();
        let out = convert(&bytes_of(&values, |v| v.to_le_bytes()), F32, F16).unwrap();
        assert_eq!(f16s(&out), values.iter().map(|v| f16::from_f32(*v)).collect::<Vec<_>>());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn f64_to_f16_is_correctly_rounded(x in -70000f64..70000.0, shift in 0i32..40) {
            let x = x * 2f64.powi(-shift);
            prop_assume!(x.abs() < 65520.0);
            let out = convert(&x.to_le_bytes(), F64, F16).unwrap();
            prop_assert_eq!(f16s(&out)[0].to_bits(), nearest_f16(x).to_bits());
        }
    }
}
