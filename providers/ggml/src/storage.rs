//! The storage of values in ggml tensors.
//!
//! ggml computes in f32 only, so f32, f16 and bf16 values are stored as f32: never narrower than in the graph. Integers, bool and f64
//! are stored unchanged, because only copies, integer kernels and the reference implementation read them. f8 values are refused.

use crate::{
    ffi::Type,
    simd::{Vectorized, vectorize},
};
use half::{f16, slice::HalfFloatSliceExt};
use sdrun_abi::DType;
use std::borrow::Cow;

/// The storage type of values of `dtype`. `None` if they are not supported.
pub(crate) fn storage_type(dtype: DType) -> Option<Type> {
    use DType::*;
    Some(match dtype {
        F32 | F16 | BF16 => Type::F32,
        F64 => Type::F64,
        U8 | I8 | Bool => Type::I8,
        U16 | I16 => Type::I16,
        U32 | I32 => Type::I32,
        U64 | I64 => Type::I64,
        F8E4M3 | F8E5M2 => return None,
    })
}

/// Whether values of `dtype` are computed in f32.
pub(crate) fn is_f32(dtype: DType) -> bool {
    storage_type(dtype) == Some(Type::F32)
}

/// Converts the bytes of a tensor of the graph to its storage type.
pub(crate) fn into_storage(dtype: DType, bytes: &[u8]) -> Result<Cow<'_, [u8]>, String> {
    Ok(match dtype {
        DType::F16 | DType::BF16 => {
            let mut out = vec![0; bytes.len() * 2];
            Floats::new(dtype, bytes).copy_to(Type::F32, &mut out);
            Cow::Owned(out)
        }
        _ if storage_type(dtype).is_none() => return Err(format!("{dtype} values are not supported")),
        _ => Cow::Borrowed(bytes),
    })
}

/// Converts stored bytes back to a tensor of the graph. Weights may be stored in half precision.
pub(crate) fn from_storage(dtype: DType, stored: Type, bytes: &[u8]) -> Result<Vec<u8>, String> {
    let (from, to) = match (stored, dtype) {
        (Type::F32 | Type::F16 | Type::Bf16, DType::F32 | DType::F16 | DType::BF16) => {
            (float_dtype(stored), float_type(dtype))
        }
        _ => return Ok(bytes.to_vec()),
    };
    let mut out = vec![0; bytes.len() / stored.size() * dtype.size()];
    Floats::new(from, bytes).copy_to(to, &mut out);
    Ok(out)
}

/// The graph's type for a floating-point storage type.
pub(crate) fn float_dtype(type_: Type) -> DType {
    match type_ {
        Type::F16 => DType::F16,
        Type::Bf16 => DType::BF16,
        _ => DType::F32,
    }
}

fn float_type(dtype: DType) -> Type {
    match dtype {
        DType::F16 => Type::F16,
        DType::BF16 => Type::Bf16,
        _ => Type::F32,
    }
}

/// The elements of an f32, f16 or bf16 tensor of the graph, little-endian and at any address.
#[derive(Clone, Copy)]
pub(crate) struct Floats<'a> {
    dtype: DType,
    bytes: &'a [u8],
}

/// Elements that are converted together. They stay in the L1 cache.
const RUN: usize = 2048;

impl<'a> Floats<'a> {
    /// `dtype` must be one of the three.
    pub(crate) fn new(dtype: DType, bytes: &'a [u8]) -> Self {
        debug_assert!(is_f32(dtype));
        Floats { dtype, bytes }
    }

    /// Reads elements `start..start + to.len()` as f32.
    pub(crate) fn read(&self, start: usize, to: &mut [f32]) {
        let size = self.dtype.size();
        let from = &self.bytes[start * size..(start + to.len()) * size];
        match self.dtype {
            DType::F16 => {
                vectorize(Each { from: from.as_chunks().0, to, f: |b| f16_to_f32(u16::from_le_bytes(b)) })
            }
            DType::BF16 => vectorize(Each {
                from: from.as_chunks().0,
                to,
                f: |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16),
            }),
            _ => vectorize(Each { from: from.as_chunks().0, to, f: f32::from_le_bytes }),
        }
    }

    /// Divides the elements into runs of `len`. The last run may be shorter.
    pub(crate) fn chunks(self, len: usize) -> impl Iterator<Item = Floats<'a>> {
        self.bytes.chunks(len * self.dtype.size()).map(move |bytes| Floats { bytes, ..self })
    }

    /// Converts all elements to bytes of a floating-point storage type.
    pub(crate) fn copy_to(&self, type_: Type, out: &mut [u8]) {
        if float_dtype(type_) == self.dtype {
            return out.copy_from_slice(self.bytes);
        }
        let mut run = [0.0; RUN];
        for (i, out) in out.chunks_mut(RUN * type_.size()).enumerate() {
            let run = &mut run[..out.len() / type_.size()];
            self.read(i * RUN, run);
            put(run, type_, out);
        }
    }
}

/// Converts f32 elements to bytes of a floating-point storage type.
#[cfg(test)]
pub(crate) fn to_bytes(values: &[f32], type_: Type) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * type_.size()];
    put(values, type_, &mut bytes);
    bytes
}

/// Converts f32 elements, rounded to nearest even, to bytes of a floating-point storage type.
pub(crate) fn put(values: &[f32], type_: Type, out: &mut [u8]) {
    match type_ {
        Type::F16 => {
            let mut half = [f16::ZERO; 256];
            for (values, out) in values.chunks(256).zip(out.chunks_mut(512)) {
                let half = &mut half[..values.len()];
                half.convert_from_f32_slice(values);
                let out = out.as_chunks_mut().0;
                vectorize(Each { from: half, to: out, f: f16::to_le_bytes });
            }
        }
        Type::Bf16 => vectorize(Each {
            from: values,
            to: out.as_chunks_mut().0,
            f: |v: f32| f32_to_bf16(v).to_le_bytes(),
        }),
        _ => vectorize(Each { from: values, to: out.as_chunks_mut().0, f: f32::to_le_bytes }),
    }
}

/// Applies a function to each element.
struct Each<'a, A, B, F> {
    from: &'a [A],
    to: &'a mut [B],
    f: F,
}

impl<A: Copy, B, F: Fn(A) -> B> Vectorized for Each<'_, A, B, F> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        self.to.iter_mut().zip(self.from).for_each(|(to, from)| *to = (self.f)(*from));
    }
}

/// Widens an f16 exactly, without branches, so that loops vectorize. It moves the exponent to its place in f32 and rebiases it by a
/// product, which also normalizes subnormal numbers.
#[inline(always)]
pub(crate) fn f16_to_f32(half: u16) -> f32 {
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    let half = u32::from(half);
    let magnitude = (half & 0x7fff) << 13;
    let special = if magnitude >= 0x7c00 << 13 { 0xff << 23 } else { 0 };
    f32::from_bits((f32::from_bits(magnitude) * REBIAS).to_bits() | special | (half & 0x8000) << 16)
}

/// The bits of the nearest bf16, with ties to even.
#[inline(always)]
pub(crate) fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    if value.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn half_precision_goes_through_f32_unchanged() {
        let values: Vec<u8> =
            [0x3c00u16, 0xc000, 0x7bff, 0x0001, 0x7c00].iter().flat_map(|v| v.to_le_bytes()).collect();
        for dtype in [DType::F16, DType::BF16] {
            let stored = into_storage(dtype, &values).unwrap();
            assert_eq!(stored.len(), values.len() * 2);
            assert_eq!(from_storage(dtype, Type::F32, &stored).unwrap(), values);
        }
        assert!(into_storage(DType::F8E4M3, &[0]).is_err());
    }

    #[test]
    fn conversions_are_those_of_the_standard() {
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        let mut wide = vec![0.0; 1 << 16];
        Floats::new(DType::F16, &bytes).read(0, &mut wide);
        assert!((0..=u16::MAX).zip(&wide).all(|(bits, v)| same(*v, f16::from_bits(bits).to_f32())));
        assert_eq!(
            to_bytes(&[1.0, 65519.0, 65520.0, -1e-8], Type::F16),
            [
                f16::ONE.to_le_bytes(),
                f16::MAX.to_le_bytes(),
                f16::INFINITY.to_le_bytes(),
                f16::NEG_ZERO.to_le_bytes()
            ]
            .concat()
        );
        Floats::new(DType::BF16, &bytes).read(0, &mut wide);
        assert!((0..=u16::MAX).zip(&wide).all(|(bits, v)| same(*v, bf16::from_bits(bits).to_f32())));
        // Values around bf16 numbers, including ties.
        for bits in (0..=u16::MAX).step_by(7).map(|b| u32::from(b) << 16) {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(bits | low);
                let (ours, theirs) = (f32_to_bf16(value), bf16::from_f32(value));
                assert!(
                    ours == theirs.to_bits() || value.is_nan() && bf16::from_bits(ours).is_nan(),
                    "{value}"
                );
            }
        }
    }
}
