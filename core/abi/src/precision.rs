use crate::{Error, Hint};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Element type of a tensor. The numbers are those of ONNX's `TensorProto.DataType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u32)]
#[allow(missing_docs)]
pub enum DType {
    F32 = 1,
    U8 = 2,
    I8 = 3,
    U16 = 4,
    I16 = 5,
    I32 = 6,
    I64 = 7,
    Bool = 9,
    F16 = 10,
    F64 = 11,
    U32 = 12,
    U64 = 13,
    BF16 = 16,
    F8E4M3 = 17,
    F8E5M2 = 19,
}

impl DType {
    /// All element types, ordered by number.
    pub const ALL: [DType; 15] = {
        use DType::*;
        [F32, U8, I8, U16, I16, I32, I64, Bool, F16, F64, U32, U64, BF16, F8E4M3, F8E5M2]
    };
    /// The type with this ONNX number.
    pub fn from_onnx(code: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|t| *t as i32 == code)
    }
    /// Bytes of one element.
    pub fn size(self) -> usize {
        use DType::*;
        match self {
            U8 | I8 | Bool | F8E4M3 | F8E5M2 => 1,
            U16 | I16 | F16 | BF16 => 2,
            F32 | I32 | U32 => 4,
            F64 | I64 | U64 => 8,
        }
    }
    /// Whether it is a floating-point type.
    pub fn is_float(self) -> bool {
        use DType::*;
        matches!(self, F32 | F16 | F64 | BF16 | F8E4M3 | F8E5M2)
    }
    /// Whether weights of the type `other` become this type without an error or a rounding: it is the same type, or f32, which has all
    /// numbers of f16 and bf16.
    pub fn holds(self, other: DType) -> bool {
        use DType::*;
        self == other || (self == F32 && matches!(other, F16 | BF16))
    }
    /// Lower-case name: `f32`, `i64`, `bool`, …
    pub fn name(self) -> &'static str {
        use DType::*;
        match self {
            F32 => "f32",
            U8 => "u8",
            I8 => "i8",
            U16 => "u16",
            I16 => "i16",
            I32 => "i32",
            I64 => "i64",
            Bool => "bool",
            F16 => "f16",
            F64 => "f64",
            U32 => "u32",
            U64 => "u64",
            BF16 => "bf16",
            F8E4M3 => "f8e4m3",
            F8E5M2 => "f8e5m2",
        }
    }
    /// Size in bytes of a contiguous tensor of this type; `None` on overflow.
    pub fn bytes_of(self, shape: &[usize]) -> Option<usize> {
        shape.iter().try_fold(self.size(), |n, d| n.checked_mul(*d))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The arithmetic of an engine and the format of its stored weights. Always explicit, never a library's default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Precision {
    Fp32,
    Fp16,
    Bf16,
    /// Large matrices and filters in ggml's 8-bit blocks. The provider documents the precision of their
    /// multiplication.
    #[serde(rename = "q8_0")]
    Q8_0,
    /// As `Q8_0`, in ggml's 4-bit blocks.
    #[serde(rename = "q4_k")]
    Q4K,
}

impl Precision {
    /// All precisions.
    pub const ALL: [Precision; 5] =
        [Precision::Fp32, Precision::Fp16, Precision::Bf16, Precision::Q8_0, Precision::Q4K];

    /// The element type of floating-point tensors; `None` if weights are quantized.
    pub fn float_type(self) -> Option<DType> {
        match self {
            Precision::Fp32 => Some(DType::F32),
            Precision::Fp16 => Some(DType::F16),
            Precision::Bf16 => Some(DType::BF16),
            Precision::Q8_0 | Precision::Q4K => None,
        }
    }

    /// Fails with `Unimplemented` if it is not among the precisions that `who` offers.
    pub fn check_offered(self, offered: &[Precision], who: &str) -> Result<(), Error> {
        if offered.contains(&self) {
            return Ok(());
        }
        Err(Error::unsupported(format!("{who} does not compute in {self}"))
            .with_hint(Hint::UsePrecision(offered.to_vec())))
    }

    /// The name used on command lines and in files.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Fp32 => "fp32",
            Precision::Fp16 => "fp16",
            Precision::Bf16 => "bf16",
            Precision::Q8_0 => "q8_0",
            Precision::Q4K => "q4_k",
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Precision {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "fp32" | "f32" => Ok(Precision::Fp32),
            "fp16" | "f16" => Ok(Precision::Fp16),
            "bf16" => Ok(Precision::Bf16),
            "q8_0" => Ok(Precision::Q8_0),
            "q4_k" | "q4_K" => Ok(Precision::Q4K),
            _ => Err(format!(
                "unknown precision `{s}`: use {}",
                Precision::ALL.map(Precision::name).join(", ")
            )),
        }
    }
}
