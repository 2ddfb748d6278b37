//! The Rust types that elements are computed in, and conversions to and from them.
//!
//! f16, bf16, f8 and f32 are computed in f32, f64 in f64 and all integers in i128. Integers wrap when they are
//! stored, which gives the same result as wrapping arithmetic in their own type.

use super::call::{Fault, bad_dtype};
use super::f8;
use crate::{Element, Tensor};
use half::{bf16, f16};
use sdrun_abi::DType;

/// A type to compute in.
pub(super) trait Num: Copy + PartialOrd + Default + Send + Sync + 'static {
    const ONE: Self;
    const IS_FLOAT: bool;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// Integers truncate towards zero; `None` if undefined (integer division by zero).
    fn div(self, other: Self) -> Option<Self>;
    /// Remainder with the sign of the dividend; `None` if undefined.
    fn rem(self, other: Self) -> Option<Self>;
    fn abs(self) -> Self;
    /// Floats round; integers truncate.
    fn from_f64(v: f64) -> Self;
    fn to_f64(self) -> f64;
    /// Loads the elements of a tensor that is computed in this type.
    fn load(tensor: &Tensor) -> Option<Vec<Self>>;
    /// Creates a tensor of a type that is computed in this one.
    fn store(dtype: DType, shape: Vec<usize>, values: &[Self]) -> Result<Tensor, Fault>;
    fn is_nan(self) -> bool {
        self.partial_cmp(&self).is_none()
    }
    /// The larger of two; NaN wins.
    fn larger(self, other: Self) -> Self {
        if other > self || other.is_nan() { other } else { self }
    }
    /// The smaller of two; NaN wins.
    fn smaller(self, other: Self) -> Self {
        if other < self || other.is_nan() { other } else { self }
    }
}

impl Num for i128 {
    const ONE: Self = 1;
    const IS_FLOAT: bool = false;
    fn add(self, other: Self) -> Self {
        self.wrapping_add(other)
    }
    fn sub(self, other: Self) -> Self {
        self.wrapping_sub(other)
    }
    fn mul(self, other: Self) -> Self {
        self.wrapping_mul(other)
    }
    fn div(self, other: Self) -> Option<Self> {
        (other != 0).then(|| self.wrapping_div(other))
    }
    fn rem(self, other: Self) -> Option<Self> {
        (other != 0).then(|| self.wrapping_rem(other))
    }
    fn abs(self) -> Self {
        self.wrapping_abs()
    }
    fn from_f64(v: f64) -> Self {
        v as i128
    }
    fn to_f64(self) -> f64 {
        self as f64
    }
    fn load(t: &Tensor) -> Option<Vec<Self>> {
        match t.dtype() {
            DType::U64 => Some(t.elements::<u64>()?.into_iter().map(i128::from).collect()),
            _ => Some(t.to_i64s()?.into_iter().map(i128::from).collect()),
        }
    }
    fn store(dtype: DType, shape: Vec<usize>, values: &[Self]) -> Result<Tensor, Fault> {
        use DType::*;
        Ok(match dtype {
            U8 => elements(shape, values, |v| v as u8)?,
            I8 => elements(shape, values, |v| v as i8)?,
            U16 => elements(shape, values, |v| v as u16)?,
            I16 => elements(shape, values, |v| v as i16)?,
            U32 => elements(shape, values, |v| v as u32)?,
            I32 => elements(shape, values, |v| v as i32)?,
            U64 => elements(shape, values, |v| v as u64)?,
            I64 => elements(shape, values, |v| v as i64)?,
            Bool => elements(shape, values, |v| v != 0)?,
            F32 => elements(shape, values, |v| v as f32)?,
            F64 => elements(shape, values, |v| v as f64)?,
            F16 | BF16 | F8E4M3 | F8E5M2 => {
                f32::store(dtype, shape, &values.iter().map(|v| *v as f32).collect::<Vec<_>>())?
            }
        })
    }
}

macro_rules! floats {
    ($($t:ty, $load:expr);*) => {$(
        impl Num for $t {
            const ONE: Self = 1.0;
            const IS_FLOAT: bool = true;
            fn add(self, other: Self) -> Self {
                self + other
            }
            fn sub(self, other: Self) -> Self {
                self - other
            }
            fn mul(self, other: Self) -> Self {
                self * other
            }
            fn div(self, other: Self) -> Option<Self> {
                Some(self / other)
            }
            fn rem(self, other: Self) -> Option<Self> {
                Some(self % other)
            }
            fn abs(self) -> Self {
                <$t>::abs(self)
            }
            fn from_f64(v: f64) -> Self {
                v as $t
            }
            fn to_f64(self) -> f64 {
                self as f64
            }
            fn load(t: &Tensor) -> Option<Vec<Self>> {
                $load(t)
            }
            fn store(dtype: DType, shape: Vec<usize>, values: &[Self]) -> Result<Tensor, Fault> {
                let narrow = |v| to_odd(f64::from(v));
                Ok(match dtype {
                    DType::F32 => elements(shape, values, |v| v as f32)?,
                    DType::F64 => elements(shape, values, f64::from)?,
                    DType::F16 => elements(shape, values, |v| f16::from_f32(narrow(v)))?,
                    DType::BF16 => elements(shape, values, |v| bf16::from_f32(narrow(v)))?,
                    DType::F8E4M3 => bytes(dtype, shape, values, |v| f8::e4m3_from_f32(narrow(v), true))?,
                    DType::F8E5M2 => bytes(dtype, shape, values, |v| f8::e5m2_from_f32(narrow(v), true))?,
                    DType::Bool => elements(shape, values, |v| v != 0.0)?,
                    dtype => return Err(bad_dtype(dtype)),
                })
            }
        }
    )*};
}
floats!(f32, load_f32; f64, Tensor::elements::<f64>);

fn load_f32(t: &Tensor) -> Option<Vec<f32>> {
    match t.dtype() {
        DType::F64 => None,
        DType::F8E4M3 => Some(t.data().iter().map(|b| f8::e4m3_to_f32(*b)).collect()),
        DType::F8E5M2 => Some(t.data().iter().map(|b| f8::e5m2_to_f32(*b)).collect()),
        _ => t.to_f32s(),
    }
}

fn elements<A: Copy, E: Element>(
    shape: Vec<usize>,
    values: &[A],
    f: impl Fn(A) -> E,
) -> Result<Tensor, Fault> {
    let mut data = Vec::with_capacity(values.len() * E::DTYPE.size());
    values.iter().for_each(|v| f(*v).write(&mut data));
    Ok(Tensor::new(E::DTYPE, shape, data)?)
}

fn bytes<A: Copy>(
    dtype: DType,
    shape: Vec<usize>,
    values: &[A],
    f: impl Fn(A) -> u8,
) -> Result<Tensor, Fault> {
    Ok(Tensor::new(dtype, shape, values.iter().map(|v| f(*v)).collect::<Vec<u8>>())?)
}

/// Loads the elements of `tensor` in the type they are computed in.
pub(super) fn load<T: Num>(tensor: &Tensor) -> Result<Vec<T>, Fault> {
    T::load(tensor)
        .ok_or_else(|| Fault::Invalid(format!("element type {} is not valid here", tensor.dtype())))
}

/// Creates a tensor of type `dtype` from elements in the type they are computed in. Floats round once, to nearest
/// even; integers keep their low bits.
pub(super) fn store<T: Num>(dtype: DType, shape: Vec<usize>, values: &[T]) -> Result<Tensor, Fault> {
    T::store(dtype, shape, values)
}

/// Loads elements of any type as f64.
pub(super) fn load_as_f64(tensor: &Tensor) -> Result<Vec<f64>, Fault> {
    with_any!(tensor.dtype(), T => Ok(load::<T>(tensor)?.into_iter().map(|v| v.to_f64()).collect()))
}

/// Smallest and largest value of an integer type.
pub(super) fn limits(dtype: DType) -> Option<(i128, i128)> {
    use DType::*;
    Some(match dtype {
        Bool => (0, 1),
        U8 | U16 | U32 | U64 => (0, (1 << (8 * dtype.size())) - 1),
        I8 | I16 | I32 | I64 => (-1 << (8 * dtype.size() - 1), (1 << (8 * dtype.size() - 1)) - 1),
        _ => return None,
    })
}

/// Converts to integers of type `dtype`: truncates and clamps to the range. NaN becomes zero.
pub(super) fn saturate(
    dtype: DType,
    shape: Vec<usize>,
    values: impl Iterator<Item = f64>,
) -> Result<Tensor, Fault> {
    let (low, high) = limits(dtype).ok_or_else(|| bad_dtype(dtype))?;
    let values: Vec<i128> = values.map(|v| (v as i128).clamp(low, high)).collect();
    store(dtype, shape, &values)
}

/// Converts `v` to f32 with rounding to odd: an inexact result has its last bit set. A further rounding to a narrower
/// type then gives the same result as rounding `v` directly.
pub(super) fn to_odd(v: f64) -> f32 {
    let near = v as f32;
    if f64::from(near) == v || !near.is_finite() {
        return near;
    }
    let towards_zero = if f64::from(near.abs()) > v.abs() { near.to_bits() - 1 } else { near.to_bits() };
    f32::from_bits(towards_zero | 1)
}

/// Expands to `$body`, with `$T` as the type that floating-point elements of `$dtype` are computed in.
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            sdrun_abi::DType::F64 => {
                type $T = f64;
                $body
            }
            dtype if dtype.is_float() => {
                type $T = f32;
                $body
            }
            dtype => Err($crate::eval::call::bad_dtype(dtype)),
        }
    };
}

/// Expands to `$body`, with `$T` as the type that elements of `$dtype` are computed in; bool is 0 and 1.
macro_rules! with_any {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            sdrun_abi::DType::F64 => {
                type $T = f64;
                $body
            }
            dtype if dtype.is_float() => {
                type $T = f32;
                $body
            }
            _ => {
                type $T = i128;
                $body
            }
        }
    };
}

/// As `with_any`, but refuses bool.
macro_rules! with_number {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            sdrun_abi::DType::Bool => Err($crate::eval::call::bad_dtype(sdrun_abi::DType::Bool)),
            dtype => $crate::eval::number::with_any!(dtype, $T => $body),
        }
    };
}

/// Expands to `$body`, with the constant `$N` as the element size of `$dtype`, for code that moves bytes.
macro_rules! with_size {
    ($dtype:expr, $N:ident => $body:expr) => {
        match $dtype.size() {
            1 => {
                const $N: usize = 1;
                $body
            }
            2 => {
                const $N: usize = 2;
                $body
            }
            4 => {
                const $N: usize = 4;
                $body
            }
            _ => {
                const $N: usize = 8;
                $body
            }
        }
    };
}

pub(super) use {with_any, with_float, with_number, with_size};
