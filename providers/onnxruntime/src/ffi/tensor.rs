use super::{check, handle, memory::CpuMemory};
use ort::sys;
use sdrun_abi::{DType, Error, Result};
use std::{
    ffi::c_void,
    marker::PhantomData,
    ptr::{self, NonNull},
};

/// An `OrtValue` that holds a tensor, either over memory lent for `'a` or over ONNX Runtime's own.
pub(super) struct Tensor<'a> {
    value: NonNull<sys::OrtValue>,
    _memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Tensor<'a> {
    /// A tensor over memory that ONNX Runtime only reads.
    pub(super) fn reading(dtype: DType, shape: &[usize], data: &'a [u8]) -> Result<Self> {
        // SAFETY: the tensor is used only as an input or an initializer, and those are not written.
        unsafe { Self::over(dtype, shape, data.as_ptr().cast_mut(), data.len()) }
    }

    /// A tensor over memory that ONNX Runtime fills.
    pub(super) fn writing(dtype: DType, shape: &[usize], data: &'a mut [u8]) -> Result<Self> {
        // SAFETY: the memory is lent exclusively for `'a`.
        unsafe { Self::over(dtype, shape, data.as_mut_ptr(), data.len()) }
    }

    /// # Safety
    /// `data` points to `len` bytes that are valid for `'a`, also for writing if the tensor is written.
    unsafe fn over(dtype: DType, shape: &[usize], data: *mut u8, len: usize) -> Result<Self> {
        if dtype.bytes_of(shape) != Some(len) {
            return Err(Error::invalid(format!("{len} bytes are not a {dtype} tensor of shape {shape:?}")));
        }
        let dims = shape
            .iter()
            .map(|d| i64::try_from(*d).map_err(|_| Error::invalid(format!("dimension {d} is too large"))))
            .collect::<Result<Vec<i64>>>()?;
        let (memory, mut value) = (CpuMemory::new()?, ptr::null_mut());
        // SAFETY: the out pointer is valid. The call copies the description of the memory. The caller guarantees the data.
        unsafe {
            let status = (ort::api().CreateTensorWithDataAsOrtValue)(
                memory.as_ptr(),
                data.cast::<c_void>(),
                len,
                dims.as_ptr(),
                dims.len(),
                element_type(dtype),
                &mut value,
            );
            check(status, "wrap a tensor")?;
            Ok(Tensor::from_raw(handle(value)?))
        }
    }

    /// # Safety
    /// `value` is a live `OrtValue` that holds a tensor. The result takes ownership of it.
    pub(super) unsafe fn from_raw(value: NonNull<sys::OrtValue>) -> Self {
        Tensor { value, _memory: PhantomData }
    }

    pub(super) fn as_ptr(&self) -> *mut sys::OrtValue {
        self.value.as_ptr()
    }

    pub(super) fn shape(&self) -> Result<Vec<usize>> {
        let api = ort::api();
        let (mut info, mut rank) = (ptr::null_mut(), 0);
        // SAFETY: the value is alive and a tensor; out pointers are valid; the description is released once.
        unsafe {
            check((api.GetTensorTypeAndShape)(self.as_ptr(), &mut info), "describe an output")?;
            let mut dims = Vec::new();
            let mut status = (api.GetDimensionsCount)(info, &mut rank);
            if status.0.is_null() {
                dims = vec![0i64; rank];
                status = (api.GetDimensions)(info, dims.as_mut_ptr(), rank);
            }
            (api.ReleaseTensorTypeAndShapeInfo)(info);
            check(status, "describe an output")?;
            Ok(dims.into_iter().map(|d| usize::try_from(d).unwrap_or(0)).collect())
        }
    }

    /// Copies the tensor into `buffer`, which must have exactly its length.
    pub(super) fn copy_to(&self, buffer: &mut [u8], name: &str) -> Result<()> {
        let api = ort::api();
        let (mut len, mut data) = (0, ptr::null_mut());
        // SAFETY: the value is alive and a tensor; out pointers are valid; it owns `len` bytes at `data`.
        unsafe {
            check((api.GetTensorSizeInBytes)(self.as_ptr(), &mut len), "tell the size of an output")?;
            if len != buffer.len() {
                return Err(Error::internal(format!(
                    "output `{name}` has {len} bytes, but its type and shape need {}",
                    buffer.len()
                )));
            }
            if len > 0 {
                check((api.GetTensorMutableData)(self.as_ptr(), &mut data), "deliver an output")?;
                ptr::copy_nonoverlapping(data.cast::<u8>().cast_const(), buffer.as_mut_ptr(), len);
            }
        }
        Ok(())
    }
}

impl Drop for Tensor<'_> {
    fn drop(&mut self) {
        // SAFETY: the value is released once, and that does not free lent memory.
        unsafe { (ort::api().ReleaseValue)(self.value.as_ptr()) }
    }
}

fn element_type(dtype: DType) -> sys::ONNXTensorElementDataType {
    use sys::ONNXTensorElementDataType::*;
    match dtype {
        DType::F32 => ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        DType::U8 => ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
        DType::I8 => ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
        DType::U16 => ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16,
        DType::I16 => ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16,
        DType::I32 => ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
        DType::I64 => ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
        DType::Bool => ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL,
        DType::F16 => ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
        DType::F64 => ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE,
        DType::U32 => ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32,
        DType::U64 => ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64,
        DType::BF16 => ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,
        DType::F8E4M3 => ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN,
        DType::F8E5M2 => ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E5M2,
    }
}
