//! Safe layer over the vendor's library and the CUDA driver; all unsafe code of the crate.
//!
//! * `raw`: the C functions of the shim (shim/).
//! * `library`: the loaded libraries.
//! * `log`: their log records.
//! * `network`: compiles a model into a plan.
//! * `engine`: loads, refits and runs a plan.
//! * `cuda`: the driver: devices, memory, streams.
#![allow(unsafe_code)]

pub(crate) mod cuda;
pub(crate) mod engine;
mod library;
pub(crate) mod log;
pub(crate) mod network;
mod raw;

pub(crate) use library::Library;

use sdrun_abi::{DType, Error, Result};
use std::ffi::{CStr, CString, c_char};

/// Converts a name for the library, which accepts no 0 characters.
fn c_name(name: &str) -> Result<CString> {
    CString::new(name)
        .map_err(|_| Error::invalid(format!("the name {name:?} holds a 0 character and cannot be used")))
}

/// Text the library owns; empty for a null pointer.
///
/// # Safety
/// `text` is null or a 0-terminated string that lives during the call.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's contract.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// `nvinfer1::DataType` of an element type; `None` if TensorRT does not have it.
pub(crate) fn data_type(dtype: DType) -> Option<i32> {
    Some(match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::I8 => 2,
        DType::I32 => 3,
        DType::Bool => 4,
        DType::U8 => 5,
        DType::F8E4M3 => 6,
        DType::BF16 => 7,
        DType::I64 => 8,
        _ => return None,
    })
}

/// The element type of an `nvinfer1::DataType`.
pub(crate) fn dtype(data_type: i32) -> Option<DType> {
    DType::ALL.into_iter().find(|dtype| self::data_type(*dtype) == Some(data_type))
}

/// The bytes of an `IHostMemory`.
pub(crate) struct HostMemory(*mut raw::HostMemory);

// SAFETY: the memory block has one owner.
unsafe impl Send for HostMemory {}
// SAFETY: shared references only read.
unsafe impl Sync for HostMemory {}

impl std::ops::Deref for HostMemory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the creator checked the pointer for null, and the block lives as long as `self`.
        unsafe {
            let data = raw::sd_memory_data(self.0).cast::<u8>();
            match data.is_null() {
                true => &[],
                false => std::slice::from_raw_parts(data, raw::sd_memory_size(self.0)),
            }
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: the library created it, and it is freed once.
        unsafe { raw::sd_memory_free(self.0) }
    }
}
