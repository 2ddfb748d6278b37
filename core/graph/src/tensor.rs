use crate::GraphError;
use bytes::Bytes;
use sdrun_abi::DType;
use std::fmt;

/// A host tensor: contiguous, row-major, little-endian. Cloning shares the bytes.
#[derive(Clone, PartialEq)]
pub struct Tensor {
    dtype: DType,
    shape: Vec<usize>,
    data: Bytes,
}

/// Types that can be elements of a [`Tensor`].
pub trait Element: Copy + PartialEq + fmt::Debug + Send + Sync + 'static {
    /// The element type's tag.
    const DTYPE: DType;
    /// Decodes little-endian bytes; the slice has exactly `DTYPE.size()` bytes.
    fn read(bytes: &[u8]) -> Self;
    /// Appends little-endian bytes.
    fn write(self, out: &mut Vec<u8>);
}

macro_rules! elements {
    ($($t:ty => $d:ident),* $(,)?) => {$(
        impl Element for $t {
            const DTYPE: DType = DType::$d;
            fn read(bytes: &[u8]) -> Self {
                let mut array = [0; size_of::<$t>()];
                array.copy_from_slice(bytes);
                <$t>::from_le_bytes(array)
            }
            fn write(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
elements!(f32 => F32, f64 => F64, half::f16 => F16, half::bf16 => BF16, u8 => U8, i8 => I8, u16 => U16, i16 => I16,
    u32 => U32, i32 => I32, u64 => U64, i64 => I64);

impl Element for bool {
    const DTYPE: DType = DType::Bool;
    fn read(bytes: &[u8]) -> Self {
        bytes[0] != 0
    }
    fn write(self, out: &mut Vec<u8>) {
        out.push(self as u8);
    }
}

impl Tensor {
    /// A tensor over raw bytes. Fails if the length does not match the type and shape.
    pub fn new(dtype: DType, shape: Vec<usize>, data: impl Into<Bytes>) -> Result<Self, GraphError> {
        let data = data.into();
        match dtype.bytes_of(&shape) {
            Some(n) if n == data.len() => Ok(Tensor { dtype, shape, data }),
            _ => Err(GraphError::Invalid(format!(
                "{} bytes do not match a {dtype} tensor of shape {shape:?}",
                data.len()
            ))),
        }
    }

    /// A tensor from elements. Fails if their number does not match the shape.
    pub fn from_elements<T: Element>(shape: Vec<usize>, elements: &[T]) -> Result<Self, GraphError> {
        let mut data = Vec::with_capacity(elements.len() * T::DTYPE.size());
        elements.iter().for_each(|e| e.write(&mut data));
        Self::new(T::DTYPE, shape, data)
    }

    /// A tensor with no dimensions.
    pub fn scalar<T: Element>(value: T) -> Self {
        let mut data = Vec::with_capacity(8);
        value.write(&mut data);
        Tensor { dtype: T::DTYPE, shape: Vec::new(), data: data.into() }
    }

    /// A one-dimensional i64 tensor, the type that ONNX uses for shapes and indices.
    pub fn from_i64s(values: &[i64]) -> Self {
        let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Tensor { dtype: DType::I64, shape: vec![values.len()], data: data.into() }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// Dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The bytes.
    pub fn data(&self) -> &Bytes {
        &self.data
    }

    /// The same bytes under another shape with the same number of elements.
    pub fn reshaped(&self, shape: Vec<usize>) -> Result<Self, GraphError> {
        Self::new(self.dtype, shape, self.data.clone())
    }

    /// The elements; `None` if they have another type.
    pub fn elements<T: Element>(&self) -> Option<Vec<T>> {
        (T::DTYPE == self.dtype).then(|| self.data.chunks_exact(self.dtype.size()).map(T::read).collect())
    }

    /// Integer or bool elements widened to i64; `None` for floating-point tensors and for u64 values out of range.
    pub fn to_i64s(&self) -> Option<Vec<i64>> {
        use DType::*;
        fn widen<T: Element + Into<i64>>(t: &Tensor) -> Option<Vec<i64>> {
            Some(t.elements::<T>()?.into_iter().map(Into::into).collect())
        }
        match self.dtype {
            I64 => self.elements::<i64>(),
            I32 => widen::<i32>(self),
            I16 => widen::<i16>(self),
            I8 => widen::<i8>(self),
            U8 => widen::<u8>(self),
            U16 => widen::<u16>(self),
            U32 => widen::<u32>(self),
            Bool => widen::<bool>(self),
            U64 => self.elements::<u64>()?.into_iter().map(|v| i64::try_from(v).ok()).collect(),
            _ => None,
        }
    }

    /// Whether the elements can be shapes, axes or other parts of the structure of a graph: at most a million. A hostile file may declare more.
    pub(crate) fn is_few(&self) -> bool {
        self.len() <= 1 << 20
    }

    /// As [`Self::to_i64s`]; `None` also if there are more than [a few](Self::is_few).
    pub(crate) fn to_few_i64s(&self) -> Option<Vec<i64>> {
        if self.is_few() { self.to_i64s() } else { None }
    }

    /// Floating-point elements as f32 (f64 is rounded); `None` for integers, bool and f8.
    pub fn to_f32s(&self) -> Option<Vec<f32>> {
        use DType::*;
        match self.dtype {
            F32 => self.elements::<f32>(),
            F64 => Some(self.elements::<f64>()?.into_iter().map(|v| v as f32).collect()),
            F16 => Some(self.elements::<half::f16>()?.into_iter().map(half::f16::to_f32).collect()),
            BF16 => Some(self.elements::<half::bf16>()?.into_iter().map(half::bf16::to_f32).collect()),
            _ => None,
        }
    }

    /// Converts a floating-point tensor to f32, f16 or bf16, rounding to nearest even. Finite values stay finite:
    /// values out of range become the largest finite number. `None` if either type is not one of these.
    pub fn to_float_type(&self, dtype: DType) -> Option<Self> {
        if self.dtype == dtype {
            return Some(self.clone());
        }
        let values = self.to_f32s()?;
        let within = |v: &f32, limit: f32| if v.is_finite() { v.clamp(-limit, limit) } else { *v };
        let tensor = match dtype {
            DType::F32 => Self::from_elements(self.shape.clone(), &values),
            DType::F16 => {
                let narrow = |v: &f32| half::f16::from_f32(within(v, half::f16::MAX.to_f32()));
                Self::from_elements(self.shape.clone(), &values.iter().map(narrow).collect::<Vec<_>>())
            }
            DType::BF16 => {
                let narrow = |v: &f32| half::bf16::from_f32(within(v, half::bf16::MAX.to_f32()));
                Self::from_elements(self.shape.clone(), &values.iter().map(narrow).collect::<Vec<_>>())
            }
            _ => return None,
        };
        tensor.ok()
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {:?}", self.dtype, self.shape)?;
        if self.len() <= 8 {
            if let Some(values) = self.to_i64s() {
                write!(f, " {values:?}")?;
            } else if let Some(values) = self.to_f32s() {
                write!(f, " {values:?}")?;
            }
        }
        f.write_str(")")
    }
}
