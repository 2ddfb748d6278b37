//! How values of the graph are stored in ggml tensors.
//!
//! ggml computes in f32 alone, so f32, f16 and bf16 values are stored as f32 (wider than the graph asks for, never
//! narrower). Integers, bool and f64 are stored as they are, for they only pass through kernels that copy and through
//! host evaluation. f8 values are refused.

use crate::ffi::{
    Type,
    simd::{Vectorized, vectorize},
};
use half::{f16, slice::HalfFloatSliceExt};
use sdrun_abi::DType;
use std::borrow::Cow;

/// The type values of `dtype` are stored in; `None` where they cannot be.
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

/// The bytes of a tensor of the graph as they are stored.
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

/// The bytes of a tensor of the graph out of stored ones. Weights may be stored in half precision.
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

/// The type of the graph that a floating-point storage type holds.
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

/// Elements that are widened and narrowed at a time: they stay in the first level cache.
const RUN: usize = 2048;

impl<'a> Floats<'a> {
    /// `dtype` is one of the three.
    pub(crate) fn new(dtype: DType, bytes: &'a [u8]) -> Self {
        debug_assert!(is_f32(dtype));
        Floats { dtype, bytes }
    }

    /// Elements `start..start + to.len()`, widened.
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

    /// Runs of `len` elements, the last of which may be shorter.
    pub(crate) fn chunks(self, len: usize) -> impl Iterator<Item = Floats<'a>> {
        self.bytes.chunks(len * self.dtype.size()).map(move |bytes| Floats { bytes, ..self })
    }

    /// All elements as bytes of a floating-point storage type.
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

/// f32 elements as bytes of a floating-point storage type.
#[cfg(test)]
pub(crate) fn to_bytes(values: &[f32], type_: Type) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * type_.size()];
    put(values, type_, &mut bytes);
    bytes
}

/// f32 elements, rounded to nearest even, as bytes of a floating-point storage type.
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

/// A function of each element.
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

/// Exact, and without branches so that loops of it vectorise: the exponent is moved to its place in f32 and rebiased
/// by a product, which makes normal numbers of subnormal ones.
#[inline(always)]
pub(crate) fn f16_to_f32(half: u16) -> f32 {
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    let half = u32::from(half);
    let magnitude = (half & 0x7fff) << 13;
    let special = if magnitude >= 0x7c00 << 13 { 0xff << 23 } else { 0 };
    f32::from_bits((f32::from_bits(magnitude) * REBIAS).to_bits() | special | (half & 0x8000) << 16)
}

/// The bits of the nearest bf16, of two the even one.
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
        // Around every bf16, ties included.
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
