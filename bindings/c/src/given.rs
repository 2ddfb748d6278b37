//! Reads what C passes. Every function here takes pointers that are null or valid, as the header demands.

use crate::failure::{Failure, Result};
use std::{
    ffi::{CStr, c_char},
    path::PathBuf,
    ptr, slice,
};

/// A struct of options whose first field is its size. All of its bytes may be zero: that is the default of every option.
///
/// # Safety
/// The type is `repr(C)`, begins with a `usize` that is its size, and zero bytes are a valid value of it.
pub(crate) unsafe trait Versioned: Copy {}

/// The options at `given`, which a program compiled with an older or newer header may have made smaller or larger. Null is the default.
///
/// # Safety
/// `given` is null or points to as many bytes as its first field says.
pub(crate) unsafe fn options<T: Versioned>(given: *const T) -> Result<T> {
    // SAFETY: zero bytes are a valid value, as the trait demands.
    let mut options: T = unsafe { std::mem::zeroed() };
    if given.is_null() {
        return Ok(options);
    }
    // SAFETY: the first field is the size, as the trait demands.
    let size = unsafe { given.cast::<usize>().read() };
    if size < size_of::<usize>() {
        return Err(Failure::invalid("a struct of options has no size: set `struct_size` to its sizeof"));
    }
    let size = size.min(size_of::<T>());
    // SAFETY: both sides have at least `size` bytes, and any prefix followed by zeros is a valid value.
    unsafe { ptr::copy_nonoverlapping(given.cast::<u8>(), (&raw mut options).cast::<u8>(), size) };
    Ok(options)
}

/// A text; null is `None`.
///
/// # Safety
/// `text` is null or ends with a zero byte.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: it ends with a zero byte, as the caller promises.
    let text = unsafe { CStr::from_ptr(text) };
    let utf8 = text.to_str().map_err(|_| {
        Failure::invalid(format!("the text {:?} is not UTF-8", text.to_string_lossy().into_owned()))
    })?;
    Ok(Some(utf8))
}

/// A path; null and empty are `None`.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn path(path: *const c_char) -> Result<Option<PathBuf>> {
    // SAFETY: as the caller promises.
    let text = unsafe { text(path)? };
    Ok(text.filter(|text| !text.is_empty()).map(PathBuf::from))
}

/// `count` values; null is none.
///
/// # Safety
/// `values` is null or points to `count` values.
pub(crate) unsafe fn array<'a, T>(values: *const T, count: usize) -> &'a [T] {
    if values.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: as the caller promises.
    unsafe { slice::from_raw_parts(values, count) }
}

/// Paths.
///
/// # Safety
/// `paths` is null or points to `count` texts.
pub(crate) unsafe fn paths(paths: *const *const c_char, count: usize) -> Result<Vec<PathBuf>> {
    // SAFETY: as the caller promises.
    let paths = unsafe { array(paths, count) };
    // SAFETY: as the caller promises.
    let all: Result<Vec<Option<PathBuf>>> = paths.iter().map(|it| unsafe { path(*it) }).collect();
    all?.into_iter().map(|path| path.ok_or_else(|| Failure::invalid("a path in a list is null"))).collect()
}

/// An object of this library.
///
/// # Safety
/// `object` is null or comes from this library and was not freed.
pub(crate) unsafe fn object<'a, T>(object: *const T) -> Result<&'a T> {
    // SAFETY: as the caller promises.
    unsafe { object.as_ref() }.ok_or_else(|| Failure::invalid("an object is null"))
}

/// Where a result goes.
///
/// # Safety
/// `out` is null or can be written.
pub(crate) unsafe fn out<'a, T>(out: *mut *mut T) -> Result<&'a mut *mut T> {
    // SAFETY: as the caller promises.
    let out = unsafe { out.as_mut() }.ok_or_else(|| Failure::invalid("the place for the result is null"))?;
    *out = ptr::null_mut();
    Ok(out)
}

/// Writes what fits into a struct of results, whose first field is its size.
///
/// # Safety
/// `to` is null or points to as many bytes as its first field says.
pub(crate) unsafe fn fill<T: Versioned>(to: *mut T, value: &T) -> Result<()> {
    if to.is_null() {
        return Err(Failure::invalid("the place for the result is null"));
    }
    // SAFETY: the first field is the size, as the trait demands.
    let size = unsafe { to.cast::<usize>().read() };
    let head = size_of::<usize>();
    if size < head {
        return Err(Failure::invalid("a struct of results has no size: set `struct_size` to its sizeof"));
    }
    let rest = size.min(size_of::<T>()) - head;
    let from = ptr::from_ref(value).cast::<u8>();
    // SAFETY: both sides have `head + rest` bytes. The size stays what the caller set.
    unsafe { ptr::copy_nonoverlapping(from.add(head), to.cast::<u8>().add(head), rest) };
    Ok(())
}

/// Frees an object; null is allowed.
///
/// # Safety
/// `object` is null or comes from `Box::into_raw`, and nobody uses it afterwards.
pub(crate) unsafe fn free<T>(object: *mut T) {
    if !object.is_null() {
        // SAFETY: as the caller promises.
        drop(unsafe { Box::from_raw(object) });
    }
}
