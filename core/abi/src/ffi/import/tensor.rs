//! A plugin's tensors that stay on their device.

use super::Table;
use crate::{
    DType, DeviceTensor, Error, OutputSpec, Result,
    ffi::{callbacks::*, raw::*},
};
use std::ffi::c_void;

/// The plugin's functions for device tensors.
pub(super) fn device_tensors(raw: &Table) -> Result<RawDeviceTensors> {
    raw.device_tensors.ok_or_else(|| {
        Error::unsupported("the plugin cannot keep tensors on its device")
            .with_hint("run it with tensors in main memory")
    })
}

pub(super) fn dims(shape: &[usize]) -> Vec<u64> {
    shape.iter().map(|d| *d as u64).collect()
}

pub(super) fn raw_tensor(dtype: DType, dims: &[u64], data: &[u8]) -> RawTensor {
    RawTensor {
        dtype: dtype as u32,
        reserved: 0,
        rank: dims.len(),
        dims: dims.as_ptr(),
        data: data.as_ptr(),
        len: data.len(),
    }
}

pub(super) struct PluginTensor {
    raw: &'static Table,
    table: RawDeviceTensors,
    pub(super) handle: *mut c_void,
    spec: OutputSpec,
}

// SAFETY: the ABI allows calls on a tensor from any thread.
unsafe impl Send for PluginTensor {}
// SAFETY: the ABI allows overlapping calls on a tensor.
unsafe impl Sync for PluginTensor {}

impl PluginTensor {
    /// The tensor, if it belongs to the same plugin.
    pub(super) fn of<'t>(tensor: &'t dyn DeviceTensor, raw: &'static Table) -> Result<&'t Self> {
        tensor.downcast_ref::<Self>().filter(|tensor| tensor.raw.origin == raw.origin).ok_or_else(|| {
            Error::invalid("a device tensor of another provider cannot be an input")
                .with_hint("copy it to main memory")
        })
    }

    /// # Safety
    /// A run returned `made`, and no other call has taken it.
    pub(super) unsafe fn from_raw(
        raw: &'static Table,
        table: RawDeviceTensors,
        made: &RawDeviceTensor,
    ) -> Result<Self> {
        if made.tensor.is_null() {
            return Err(Error::internal(
                "the plugin reports success without a tensor that should stay on the device",
            ));
        }
        // SAFETY: guaranteed by the caller; `dims` lives as long as the tensor.
        let shape = unsafe { shape_from_raw(made.dims, made.rank) };
        let spec = OutputSpec { dtype: DType::F32, shape };
        let mut tensor = PluginTensor { raw, table, handle: made.tensor, spec };
        tensor.spec.dtype = DType::from_onnx(made.dtype as i32).ok_or_else(|| {
            Error::internal(format!("a device tensor has the unknown dtype {}", made.dtype))
        })?;
        Ok(tensor)
    }
}

impl Drop for PluginTensor {
    fn drop(&mut self) {
        if let Some(destroy) = self.table.destroy {
            // SAFETY: a live tensor, destroyed once.
            unsafe { destroy(self.handle) }
        }
    }
}

impl DeviceTensor for PluginTensor {
    fn spec(&self) -> &OutputSpec {
        &self.spec
    }

    fn read(&self, bytes: &mut [u8]) -> Result<()> {
        let mut a =
            args!(TensorReadArgs { tensor: self.handle, bytes: bytes.as_mut_ptr(), len: bytes.len() });
        // SAFETY: see above.
        unsafe { error_from_raw(function!(self.table, read)(&mut a)) }
    }
}
