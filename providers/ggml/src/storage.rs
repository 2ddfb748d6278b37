//! How values of the graph are stored in ggml tensors.
//!
//! ggml computes in f32 alone, so f32, f16 and bf16 values are stored as f32 (wider than the graph asks for, never
//! narrower). Integers, bool and f64 are stored as they are, for they only pass through kernels that copy and through
//! host evaluation. f8 values are refused.

use crate::ffi::{Type, as_f32s};
use half::{bf16, f16, slice::HalfFloatSliceExt};
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
        DType::F16 | DType::BF16 => Cow::Owned(to_bytes(&widened(dtype, bytes), Type::F32)),
        _ if storage_type(dtype).is_none() => return Err(format!("{dtype} values are not supported")),
        _ => Cow::Borrowed(bytes),
    })
}

/// The bytes of a tensor of the graph out of stored ones. Weights may be stored in half precision.
pub(crate) fn from_storage(dtype: DType, stored: Type, bytes: &[u8]) -> Result<Vec<u8>, String> {
    let floats: Cow<'_, [u8]> = match stored {
        Type::F16 => convert(bytes, |b| f16::from_le_bytes(b).to_f32().to_le_bytes()),
        Type::Bf16 => convert(bytes, |b| bf16::from_le_bytes(b).to_f32().to_le_bytes()),
        _ => Cow::Borrowed(bytes),
    };
    Ok(match dtype {
        DType::F16 => convert(&floats, |b| f16::from_f32(f32::from_le_bytes(b)).to_le_bytes()).into_owned(),
        DType::BF16 => convert(&floats, |b| bf16::from_f32(f32::from_le_bytes(b)).to_le_bytes()).into_owned(),
        _ => floats.into_owned(),
    })
}

/// Elements of a floating-point tensor of the graph as f32; borrowed where they are, aligned.
pub(crate) fn to_f32s(dtype: DType, bytes: &[u8]) -> Option<Cow<'_, [f32]>> {
    fn collect<const SIZE: usize>(bytes: &[u8], f: impl Fn([u8; SIZE]) -> f32) -> Cow<'static, [f32]> {
        Cow::Owned(bytes.as_chunks().0.iter().map(|b| f(*b)).collect())
    }
    Some(match dtype {
        DType::F32 => as_f32s(bytes).map_or_else(|| collect(bytes, f32::from_le_bytes), Cow::Borrowed),
        DType::F16 | DType::BF16 => Cow::Owned(widened(dtype, bytes)),
        _ => return None,
    })
}

/// f16 or bf16 elements as f32, in blocks that the slice conversions of `half` take a vector at a time.
fn widened(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    const BLOCK: usize = 1024;
    let halves = bytes.as_chunks::<2>().0;
    let mut values = vec![0.0; halves.len()];
    let (mut f16s, mut bf16s) = ([f16::ZERO; BLOCK], [bf16::ZERO; BLOCK]);
    for (from, to) in halves.chunks(BLOCK).zip(values.chunks_mut(BLOCK)) {
        if dtype == DType::F16 {
            f16s.iter_mut().zip(from).for_each(|(half, b)| *half = f16::from_le_bytes(*b));
            f16s[..from.len()].convert_to_f32_slice(to);
        } else {
            bf16s.iter_mut().zip(from).for_each(|(half, b)| *half = bf16::from_le_bytes(*b));
            bf16s[..from.len()].convert_to_f32_slice(to);
        }
    }
    values
}

/// f32 elements as bytes of a floating-point storage type.
pub(crate) fn to_bytes(values: &[f32], type_: Type) -> Vec<u8> {
    fn collect<T: Copy, const SIZE: usize>(values: &[T], f: impl Fn(T) -> [u8; SIZE]) -> Vec<u8> {
        let mut bytes = vec![0; values.len() * SIZE];
        bytes.as_chunks_mut().0.iter_mut().zip(values).for_each(|(out, v)| *out = f(*v));
        bytes
    }
    match type_ {
        Type::F16 => {
            let mut half = vec![f16::ZERO; values.len()];
            half.convert_from_f32_slice(values);
            collect(&half, f16::to_le_bytes)
        }
        Type::Bf16 => {
            let mut half = vec![bf16::ZERO; values.len()];
            half.convert_from_f32_slice(values);
            collect(&half, bf16::to_le_bytes)
        }
        _ => collect(values, f32::to_le_bytes),
    }
}

fn convert<const FROM: usize, const TO: usize>(
    bytes: &[u8],
    f: impl Fn([u8; FROM]) -> [u8; TO],
) -> Cow<'static, [u8]> {
    let from = bytes.as_chunks::<FROM>().0;
    let mut out = vec![0; from.len() * TO];
    out.as_chunks_mut().0.iter_mut().zip(from).for_each(|(out, b)| *out = f(*b));
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
