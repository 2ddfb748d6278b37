//! Safe layer over the vendor's library and the CUDA driver; all unsafe code of the crate.
//!
//! * `bridge`: the functions of the shim (shim/).
//! * `library`: the loaded libraries.
//! * `log`: their log records.
//! * `network`: compiles a model into a plan.
//! * `engine`: loads, refits and runs a plan.
//! * `cuda`: the driver: devices, memory, streams.
#![allow(unsafe_code)]

mod bridge;
pub(crate) mod cuda;
pub(crate) mod engine;
mod library;
pub(crate) mod log;
pub(crate) mod network;

pub(crate) use library::Library;

use bridge::DataType;
use cxx::UniquePtr;
use sdrun_abi::{DType, Error, ErrorCode};
use std::ffi::{CStr, c_char};

/// The error for an exception of the C++ side.
fn thrown(exception: cxx::Exception) -> Error {
    let words = exception.what();
    let code = if words.contains("bad_alloc") { ErrorCode::ResourceExhausted } else { ErrorCode::Internal };
    Error::new(code, format!("TensorRT-RTX failed with an exception: {words}"))
}

/// Text the CUDA driver owns; empty for a null pointer.
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
    let data_type = match dtype {
        DType::F32 => DataType::kFLOAT,
        DType::F16 => DataType::kHALF,
        DType::I8 => DataType::kINT8,
        DType::I32 => DataType::kINT32,
        DType::Bool => DataType::kBOOL,
        DType::U8 => DataType::kUINT8,
        DType::F8E4M3 => DataType::kFP8,
        DType::BF16 => DataType::kBF16,
        DType::I64 => DataType::kINT64,
        _ => return None,
    };
    Some(data_type.repr)
}

/// The element type of an `nvinfer1::DataType`.
pub(crate) fn dtype(data_type: i32) -> Option<DType> {
    DType::ALL.into_iter().find(|dtype| self::data_type(*dtype) == Some(data_type))
}

/// Memory of the library, never null.
pub(crate) struct HostMemory(UniquePtr<bridge::IHostMemory>);

// SAFETY: the memory block has one owner.
unsafe impl Send for HostMemory {}
// SAFETY: shared references only read.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// `None` for a null pointer.
    fn of(memory: UniquePtr<bridge::IHostMemory>) -> Option<Self> {
        (!memory.is_null()).then(|| HostMemory(memory))
    }
}

impl std::ops::Deref for HostMemory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        bridge::bytes_of(&self.0)
    }
}
