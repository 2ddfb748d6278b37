//! Errors and buffers across the ABI, and objects that one side lends to the other for one call: hosts, weight
//! sources, output sinks. `with_…` lends a Rust value to C; the `Foreign…` types implement the Rust trait over a lent
//! C struct.

mod host;
mod sink;
mod source;

pub use host::{ForeignHost, with_host};
pub use sink::{ForeignSink, with_sink};
pub use source::{ForeignSource, with_source};

use super::{prefix, raw::*};
use crate::{DType, Error, ErrorCode, Hint, Result};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
};

/// Runs `body`; a panic becomes an `Internal` error that includes the panic's message.
pub fn contain<T>(what: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(|s| s.to_string())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".into());
        Err(Error::internal(format!("panic in {what}: {text}")))
    })
}

struct OwnedError {
    raw: RawError,
    error: Error,
    hint: Option<String>,
}

unsafe extern "C" fn release_error(raw: *mut RawError) {
    if !raw.is_null() {
        // SAFETY: `owner` is the box leaked by `error_to_raw`, released once.
        drop(unsafe { Box::from_raw((*raw).owner.cast::<OwnedError>()) });
    }
}

/// Null for `Ok`; otherwise an error that the receiver releases.
pub fn error_to_raw(result: Result<()>) -> *mut RawError {
    let Err(error) = result else { return ptr::null_mut() };
    let text = |s: &Option<String>| s.as_ref().map_or(RawStr::EMPTY, |s| RawStr::new(s.as_bytes()));
    let mut owned = Box::new(OwnedError {
        raw: RawError {
            struct_size: size_of::<RawError>() as u32,
            code: error.code as u32,
            message: RawStr::EMPTY,
            hint: RawStr::EMPTY,
            native_code: RawStr::EMPTY,
            file: RawStr::EMPTY,
            owner: ptr::null_mut(),
            release: Some(release_error),
        },
        hint: error.hint.as_ref().map(Hint::to_wire),
        error,
    });
    owned.raw.message = RawStr::new(owned.error.message.as_bytes());
    owned.raw.hint = text(&owned.hint);
    owned.raw.native_code = text(&owned.error.native_code);
    owned.raw.file = text(&owned.error.file);
    let leaked = Box::into_raw(owned);
    // SAFETY: `leaked` was just leaked; `release_error` takes it back through `owner`.
    unsafe {
        (*leaked).raw.owner = leaked.cast();
        &raw mut (*leaked).raw
    }
}

/// Takes ownership of the error that a call returned.
///
/// # Safety
/// `raw` is null or an error that has not been released yet.
pub unsafe fn error_from_raw(raw: *mut RawError) -> Result<()> {
    // SAFETY: guaranteed by the caller; the strings live until `release`.
    unsafe {
        let Some(e) = prefix::read(raw) else { return Ok(()) };
        let optional = |s: RawStr| (s.len > 0).then(|| s.text());
        let error = Error {
            code: ErrorCode::from_u32(e.code),
            message: e.message.text(),
            hint: optional(e.hint).map(Hint::of_wire),
            native_code: optional(e.native_code),
            file: optional(e.file),
        };
        if let Some(release) = e.release {
            release(raw);
        }
        Err(error)
    }
}

unsafe extern "C" fn release_buffer(raw: *mut RawBuffer) {
    // SAFETY: `owner` is the vector leaked by `buffer_to_raw`. The buffer is emptied, so a second release does
    // nothing.
    unsafe {
        if !raw.is_null() && !(*raw).owner.is_null() {
            drop(Box::from_raw((*raw).owner.cast::<Vec<u8>>()));
            raw.write(RawBuffer::EMPTY);
        }
    }
}

/// Passes ownership of `bytes` to the other side.
pub fn buffer_to_raw(bytes: Vec<u8>) -> RawBuffer {
    let leaked = Box::into_raw(Box::new(bytes));
    // SAFETY: just leaked.
    let (ptr, len) = unsafe { ((*leaked).as_ptr(), (*leaked).len()) };
    RawBuffer { ptr, len, owner: leaked.cast(), release: Some(release_buffer) }
}

/// Copies a buffer out and releases it.
///
/// # Safety
/// `raw` is empty, or the other side made it and nothing has released it.
pub unsafe fn buffer_from_raw(raw: &mut RawBuffer) -> Vec<u8> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let bytes = RawStr { ptr: raw.ptr, len: raw.len }.bytes().to_vec();
        if let Some(release) = raw.release {
            release(raw);
        }
        bytes
    }
}

/// The element type with this number of ONNX; `what` names its owner in the error.
pub(super) fn dtype_from_raw(dtype: u32, what: impl FnOnce() -> String) -> Result<DType> {
    DType::from_onnx(dtype as i32)
        .ok_or_else(|| Error::invalid(format!("{} has the unknown dtype {dtype}", what())))
}

/// # Safety
/// `dims` points to `rank` numbers, or `rank` is zero.
pub(super) unsafe fn shape_from_raw(dims: *const u64, rank: usize) -> Vec<usize> {
    if rank == 0 || dims.is_null() {
        return Vec::new();
    }
    // SAFETY: guaranteed by the caller.
    unsafe { std::slice::from_raw_parts(dims, rank) }.iter().map(|d| *d as usize).collect()
}
