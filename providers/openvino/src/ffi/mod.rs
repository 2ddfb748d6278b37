//! A thin safe layer over OpenVINO's C API (`openvino-sys`, linked at run time). All unsafe code of this crate is
//! below this module. We do not use the safe crate `openvino` (0.11): it compiles without properties, so the library
//! chooses the precision; it cannot import blobs; and it copies every tensor.
//!
//! * [`load`] checks the library and fills the function table. Call it before anything else here.
//! * [`Core`], [`Model`], [`CompiledModel`], [`InferRequest`]: owned objects of the C API.
//!
//! Only successful calls create handles, and each handle is freed once, on drop. Every string that the library
//! returns is copied and freed immediately.
#![allow(unsafe_code)]

mod core;
mod model;
mod request;

pub(crate) use core::Core;
pub(crate) use model::{CompiledModel, Model};
pub(crate) use request::{InferRequest, Io};

use openvino_sys::{ov_status_e, ov_version_t};
use sdrun_abi::{Error, ErrorCode, Hint, Result};
use sdrun_provider_common::failure;
use std::{
    ffi::{CStr, CString, c_char},
    path::Path,
    ptr::NonNull,
};

/// Functions of the C API that this crate calls and older releases lack. Check for them first, because `openvino-sys`
/// panics when it calls a missing one.
const NEWEST_SYMBOLS: [&str; 2] = ["ov_core_compile_model_props", "ov_core_set_properties"];

/// The first release whose C library has [`NEWEST_SYMBOLS`].
const LEAST_VERSION: (u32, u32) = (2026, 4);

/// Loads the library `file` for the rest of the process and returns its version.
///
/// Reports a library that is missing, broken, too old or for another machine before `openvino-sys` touches it.
pub(crate) fn load(file: &Path) -> Result<String> {
    let library = sdrun_provider_common::open(file)?;
    let version = version(&library, file)?;
    let hint = || {
        Hint::AnyOf(vec![
            Hint::Install { runtime: "openvino".into() },
            "set SDRUN_OPENVINO_DIR to the folder of a newer one".into(),
        ])
    };
    let too_old = |why: String| {
        let (year, minor) = LEAST_VERSION;
        Error::precondition(format!(
            "OpenVINO {version} in {} is too old: {why}; this plugin needs {year}.{minor} or newer",
            file.display()
        ))
        .with_file(file)
        .with_hint(hint())
    };
    match release(&version) {
        Some(found) if found >= LEAST_VERSION => {}
        Some(_) => return Err(too_old("its C API cannot compile with properties".into())),
        None => return Err(too_old("its version cannot be read".into())),
    }
    for name in NEWEST_SYMBOLS {
        // SAFETY: the symbol is only looked up, never called through this type.
        if unsafe { library.get::<unsafe extern "C" fn()>(name) }.is_err() {
            return Err(too_old(format!("it lacks {name}")));
        }
    }
    openvino_sys::library::load_from(file).map_err(|why| {
        Error::precondition(format!("cannot use {}: {why}", file.display())).with_file(file)
    })?;
    // The function table refers to the library, so it must never be unloaded.
    std::mem::forget(library);
    Ok(version)
}

/// Year and minor number of a version such as `2026.4.1-22982-e213a147257-releases/2026/4`.
fn release(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split(['.', '-']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Reads a library's version without the function table of `openvino-sys`, whose own check panics if it cannot parse
/// the version.
fn version(library: &libloading::Library, file: &Path) -> Result<String> {
    type GetVersion = unsafe extern "C" fn(*mut ov_version_t) -> i32;
    type FreeVersion = unsafe extern "C" fn(*mut ov_version_t);
    // SAFETY: both symbols have these signatures in every release of the C API (ov_core.h); the status is an enum
    // over int.
    let (get, free) = unsafe {
        (library.get::<GetVersion>("ov_get_openvino_version"), library.get::<FreeVersion>("ov_version_free"))
    };
    let (Ok(get), Ok(free)) = (get, free) else {
        return Err(Error::new(
            ErrorCode::DataLoss,
            format!("{} is not OpenVINO's C library: it lacks ov_get_openvino_version", file.display()),
        )
        .with_file(file)
        .with_hint("point SDRUN_OPENVINO_DIR at the folder that holds libopenvino_c"));
    };
    let mut version = ov_version_t { buildNumber: std::ptr::null(), description: std::ptr::null() };
    // SAFETY: the out structure is valid, and it is freed only if the call filled it.
    unsafe {
        let status = get(&mut version);
        if status != 0 || version.buildNumber.is_null() {
            return Err(Error::internal(format!(
                "{} does not report its version (status {status})",
                file.display()
            )));
        }
        let text = CStr::from_ptr(version.buildNumber).to_string_lossy().into_owned();
        free(&mut version);
        Ok(text)
    }
}

/// `Ok` for success, else an error with the vendor's message. Read the message at once: a later success does not
/// clear it, and a later failure replaces it.
fn check(status: ov_status_e, doing: &str) -> Result<()> {
    if status == ov_status_e::OK {
        return Ok(());
    }
    // SAFETY: returns null or a new string.
    let words = unsafe { take_string(openvino_sys::ov_get_last_err_msg()) }.map(|text| tidy(&text));
    let words = words.filter(|text| !text.is_empty()).unwrap_or_else(|| "no reason given".into());
    let code = match status {
        ov_status_e::NOT_IMPLEMENTED | ov_status_e::NOT_IMPLEMENT_C_METHOD => ErrorCode::Unimplemented,
        ov_status_e::NOT_FOUND => ErrorCode::NotFound,
        ov_status_e::PARAMETER_MISMATCH | ov_status_e::INVALID_C_PARAM => ErrorCode::InvalidArgument,
        ov_status_e::INFER_CANCELLED => ErrorCode::Cancelled,
        _ => ErrorCode::Internal,
    };
    Err(failure(code, format!("OpenVINO cannot {doing}: {words}"))
        .with_native(format!("{status:?} ({})", status as i32)))
}

/// Wraps a handle that a successful call returned.
fn handle<T>(pointer: *mut T) -> Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(|| Error::internal("OpenVINO returned a null handle with success"))
}

/// The vendor's message on one line, without the source locations.
fn tidy(words: &str) -> String {
    let lines =
        words.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("Exception from "));
    lines.collect::<Vec<_>>().join("; ")
}

/// Copies and frees a string that the library allocated.
///
/// # Safety
/// `text` is null or a string of the C API that has not been freed.
unsafe fn take_string(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller guarantees it.
    unsafe {
        let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
        openvino_sys::ov_free(text);
        Some(copy)
    }
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::invalid(format!("{text:?} contains a NUL character")))
}

/// A path in the C API's encoding: the system's bytes, or UTF-8 on Windows.
fn c_path(path: &Path) -> Result<CString> {
    #[cfg(unix)]
    let bytes = std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()).to_vec();
    #[cfg(not(unix))]
    let bytes = path
        .to_str()
        .ok_or_else(|| Error::invalid(format!("the path {} is not valid Unicode", path.display())))?
        .as_bytes()
        .to_vec();
    CString::new(bytes)
        .map_err(|_| Error::invalid(format!("the path {} contains a NUL character", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read_and_compared() {
        assert_eq!(release("2026.4.1-22982-e213a147257-releases/2026/4"), Some((2026, 4)));
        assert!(release("2027.0.0-1-x").unwrap() >= LEAST_VERSION);
        assert!(release("2026.3.0-21234-x").unwrap() < LEAST_VERSION);
        assert_eq!(release("custom-build"), None);
        assert_eq!(release(""), None);
    }

    #[test]
    fn vendor_words_become_one_line() {
        let words = "Exception from src/inference/src/cpp/core.cpp:93:\n Check 'x' failed\n\nWrong value\n";
        assert_eq!(tidy(words), "Check 'x' failed; Wrong value");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn another_library_is_not_taken_for_openvino() {
        // Any intact shared library that this process has already loaded.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps
            .lines()
            .filter_map(|line| line.split_whitespace().last())
            .find(|path| path.contains("/libc.so") || path.contains("/libc-"))
            .unwrap();
        let error = load(Path::new(libc)).unwrap_err();
        assert_eq!(error.code, ErrorCode::DataLoss);
        assert!(error.message.contains("ov_get_openvino_version"), "{error}");
    }
}
