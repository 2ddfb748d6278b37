use crate::{Provider, Result};
use sdrun_abi::{AlignedBuffer, DType, Error, OutputSink, OutputSpec, TensorView};
use std::{borrow::Borrow, collections::BTreeMap, fmt, sync::Arc};

/// An owned tensor in host memory: contiguous, row-major, little-endian, aligned to 64 bytes.
pub struct HostTensor {
    dtype: DType,
    shape: Vec<usize>,
    data: AlignedBuffer,
}

/// Tensors by name: the inputs and outputs of a run.
pub type Tensors = BTreeMap<String, HostTensor>;

/// Compares type, shape and bits: unlike for numbers, NaN equals itself, and the two zeros differ.
impl PartialEq for HostTensor {
    fn eq(&self, other: &Self) -> bool {
        self.dtype() == other.dtype() && self.shape() == other.shape() && self.bytes() == other.bytes()
    }
}

impl Eq for HostTensor {}

impl HostTensor {
    /// A zeroed tensor. Fails with `InvalidArgument` if the size overflows, with `ResourceExhausted` if there is no memory for it.
    pub fn zeros(dtype: DType, shape: Vec<usize>) -> Result<Self> {
        let bytes = dtype
            .bytes_of(&shape)
            .ok_or_else(|| Error::invalid(format!("a {dtype} tensor of shape {shape:?} is too large")))?;
        Ok(HostTensor { dtype, shape, data: AlignedBuffer::new(bytes)? })
    }

    /// Copies raw little-endian bytes. Fails with `InvalidArgument` if their number does not match.
    pub fn from_bytes(dtype: DType, shape: Vec<usize>, bytes: &[u8]) -> Result<Self> {
        let mut tensor = Self::zeros(dtype, shape)?;
        if tensor.data.len() != bytes.len() {
            return Err(Error::invalid(format!(
                "{} bytes do not match a {dtype} tensor of shape {:?} ({} bytes)",
                bytes.len(),
                tensor.shape,
                tensor.data.len()
            ))
            .into());
        }
        tensor.data.copy_from_slice(bytes);
        Ok(tensor)
    }

    /// A copy of f32 values.
    pub fn from_f32(shape: Vec<usize>, values: &[f32]) -> Result<Self> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::from_bytes(DType::F32, shape, &bytes)
    }

    /// A copy of i64 values.
    pub fn from_i64(shape: Vec<usize>, values: &[i64]) -> Result<Self> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::from_bytes(DType::I64, shape, &bytes)
    }

    /// Values converted to `dtype`, rounded once; integers truncate.
    ///
    /// # Errors
    /// As [`zeros`](Self::zeros); `InvalidArgument` if there are fewer or more values than elements; `Unimplemented` for f8.
    pub fn from_f64(
        dtype: DType,
        shape: Vec<usize>,
        values: impl IntoIterator<Item = impl Borrow<f64>>,
    ) -> Result<Self> {
        use DType::*;
        let mut tensor = Self::zeros(dtype, shape)?;
        let mut places = tensor.data.chunks_exact_mut(dtype.size());
        for value in values {
            let v = *value.borrow();
            let Some(place) = places.next() else { return Err(miscounted(dtype, &tensor.shape)) };
            match dtype {
                F64 => place.copy_from_slice(&v.to_le_bytes()),
                F32 => place.copy_from_slice(&(v as f32).to_le_bytes()),
                F16 => place.copy_from_slice(&half::f16::from_f64(v).to_le_bytes()),
                BF16 => place.copy_from_slice(&half::bf16::from_f64(v).to_le_bytes()),
                I64 => place.copy_from_slice(&(v as i64).to_le_bytes()),
                I32 => place.copy_from_slice(&(v as i32).to_le_bytes()),
                I16 => place.copy_from_slice(&(v as i16).to_le_bytes()),
                I8 => place.copy_from_slice(&(v as i8).to_le_bytes()),
                U64 => place.copy_from_slice(&(v as u64).to_le_bytes()),
                U32 => place.copy_from_slice(&(v as u32).to_le_bytes()),
                U16 => place.copy_from_slice(&(v as u16).to_le_bytes()),
                U8 => place.copy_from_slice(&(v as u8).to_le_bytes()),
                Bool => place.fill(u8::from(v != 0.0)),
                F8E4M3 | F8E5M2 => {
                    return Err(Error::unsupported(format!("cannot create {dtype} values")).into());
                }
            }
        }
        if places.next().is_some() {
            return Err(miscounted(dtype, &tensor.shape));
        }
        Ok(tensor)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// Dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.data
    }
    /// The bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.data
    }
    /// Borrows the tensor.
    pub fn view(&self) -> TensorView<'_> {
        TensorView { dtype: self.dtype, shape: &self.shape, data: &self.data }
    }

    /// Elements as f64, for any type except f8 (`None`). Integers of 64 bits are rounded.
    pub fn values(&self) -> Option<impl ExactSizeIterator<Item = f64> + Clone + '_> {
        use DType::*;
        /// The little-endian number that a slice of its size holds.
        macro_rules! read {
            ($of:ty) => {
                |bytes: &[u8]| <$of>::from_le_bytes(bytes.try_into().unwrap_or_default()) as f64
            };
        }
        let read: fn(&[u8]) -> f64 = match self.dtype {
            F64 => read!(f64),
            F32 => read!(f32),
            F16 => |bytes| half::f16::from_le_bytes(bytes.try_into().unwrap_or_default()).to_f64(),
            BF16 => |bytes| half::bf16::from_le_bytes(bytes.try_into().unwrap_or_default()).to_f64(),
            I64 => read!(i64),
            I32 => read!(i32),
            I16 => read!(i16),
            I8 => read!(i8),
            U64 => read!(u64),
            U32 => read!(u32),
            U16 => read!(u16),
            U8 => read!(u8),
            Bool => |bytes| f64::from(u8::from(bytes != [0u8].as_slice())),
            F8E4M3 | F8E5M2 => return None,
        };
        Some(self.data.chunks_exact(self.dtype.size()).map(read))
    }
    /// The same as a vector.
    pub fn to_f64(&self) -> Option<Vec<f64>> {
        self.values().map(Iterator::collect)
    }
}

/// The error for another number of values than a tensor has elements.
fn miscounted(dtype: DType, shape: &[usize]) -> crate::Error {
    Error::invalid(format!("a {dtype} tensor of shape {shape:?} has another number of values")).into()
}

impl fmt::Debug for HostTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostTensor({} {:?})", self.dtype, self.shape)
    }
}

/// A tensor in device memory. [`Session::run_on_device`](crate::Session::run_on_device) leaves it there for later
/// runs of any session on the same device of the same [`Provider`]. Its values never change. Clones share it;
/// dropping the last one frees the memory.
#[derive(Clone)]
pub struct DeviceTensor {
    pub(crate) inner: Arc<dyn sdrun_abi::DeviceTensor>,
    pub(crate) provider: Provider,
}

/// Device tensors by name.
pub type DeviceTensors = BTreeMap<String, DeviceTensor>;

impl DeviceTensor {
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.inner.spec().dtype
    }
    /// Dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.inner.spec().shape
    }
    /// Copies it to main memory.
    pub fn to_host(&self) -> Result<HostTensor> {
        let mut tensor = HostTensor::zeros(self.dtype(), self.shape().to_vec())?;
        self.inner.read(tensor.bytes_mut()).map_err(crate::Error::of(self.provider.id()))?;
        Ok(tensor)
    }
}

impl fmt::Debug for DeviceTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceTensor({} {:?} of {})", self.dtype(), self.shape(), self.provider.id())
    }
}

/// Collects the outputs of a run. Reuses buffers between runs while shapes stay the same.
#[derive(Default)]
pub(crate) struct Outputs {
    pub(crate) tensors: Vec<HostTensor>,
}

impl OutputSink for Outputs {
    fn allocate(&mut self, outputs: &[OutputSpec]) -> sdrun_abi::Result<Vec<&mut [u8]>> {
        let fits = self.tensors.len() == outputs.len()
            && self.tensors.iter().zip(outputs).all(|(t, o)| t.dtype == o.dtype && t.shape == o.shape);
        if !fits {
            self.tensors.clear();
            for o in outputs {
                let zeros = HostTensor::zeros(o.dtype, o.shape.clone());
                self.tensors.push(zeros.map_err(|e| Error::invalid(e.to_string()))?);
            }
        }
        Ok(self.tensors.iter_mut().map(|t| &mut *t.data).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_every_type_are_read_back() {
        use DType::*;
        let values = [0.0, 1.0, 100.0];
        for dtype in [F64, F32, F16, BF16, I64, I32, I16, I8, U64, U32, U16, U8] {
            let tensor = HostTensor::from_f64(dtype, vec![3], values).unwrap();
            assert_eq!(tensor.to_f64().unwrap(), values, "{dtype}");
        }
        let bools = HostTensor::from_f64(Bool, vec![3], values).unwrap();
        assert_eq!(bools.to_f64().unwrap(), [0.0, 1.0, 1.0]);
        assert!(HostTensor::zeros(F8E4M3, vec![3]).unwrap().values().is_none());
        for shape in [vec![2], vec![4], vec![]] {
            assert!(
                HostTensor::from_f64(F32, shape, values)
                    .unwrap_err()
                    .to_string()
                    .contains("number of values")
            );
        }
    }
}
