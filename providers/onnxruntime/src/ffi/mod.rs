//! A thin safe layer over ONNX Runtime's C API. The crate `ort` loads the library, holds the environment and turns
//! statuses into errors. This module creates sessions and tensors itself, because they work on lent memory. All
//! unsafe code of this crate is below this module.
#![allow(unsafe_code)]

mod compile;
mod devices;
mod kept;
mod memory;
mod session;
mod tensor;

pub(crate) use compile::{compatibility, compile};
pub(crate) use devices::{Assigned, EpDevice, built_in, register};
pub(crate) use session::{OrtSession, Settings};

use ort::{environment::Environment, logging::LogLevel, sys};
use sdrun_abi::{Error, ErrorCode, Hint, Result};
use sdrun_provider_common::failure;
use std::{
    ffi::{CStr, CString},
    path::Path,
    ptr::NonNull,
    sync::Arc,
};

/// `ort`'s API version equals the minor number of the first release that supports it.
const LEAST_VERSION: (u32, u32) = (1, ort::MINOR_VERSION);

/// The switch that keeps ONNX Runtime from reporting to its makers. Its API has one too, but outside Windows 1.31 writes an identifier
/// into the user's home and reports the process before a host can call that (microsoft/onnxruntime#27379).
const NO_TELEMETRY: &str = "ORT_DISABLE_TELEMETRY";

/// Functions of ONNX Runtime that warn of each node on the CPU.
const OF_FALLBACK: [&str; 2] = ["VerifyEachNodeIsAssignedToAnEp", "GetCpuPreferredNodes"];

/// Loads the library `file` for the rest of the process; returns its version and the environment.
///
/// If a library cannot be loaded, `ort` deadlocks in some cases (pykeio/ort#579) and panics in others. So everything
/// that can go wrong is checked before calling it.
pub(crate) fn load(file: &Path) -> Result<(String, Environment)> {
    if std::env::var_os(NO_TELEMETRY).is_none() {
        // SAFETY: Rust code takes the environment's lock. Foreign code may read the environment meanwhile; this happens once in the life
        // of the process, and in a worker before any other library starts threads.
        unsafe { std::env::set_var(NO_TELEMETRY, "1") };
    }
    let library = sdrun_provider_common::open(file)?;
    let version = probe(&library, file)?;
    let environment = ort::init_from(file)
        .map_err(|why| Error::precondition(format!("cannot use {}: {why}", file.display())).with_file(file))?
        .with_name("sdrun")
        .with_telemetry(false)
        .with_logger(Arc::new(|level, _category: &str, _id: &str, location: &str, message: &str| {
            // What a device leaves to the CPU is judged and told by `fallback`.
            if !OF_FALLBACK.iter().any(|function| location.contains(function)) {
                crate::log::record(level, message);
            }
        }))
        .build()
        .map_err(|e| from_ort(e, "start"))?;
    environment.set_log_level(LogLevel::Warning);
    // The API table refers to the library, so it must never be unloaded.
    std::mem::forget(library);
    Ok((version, environment))
}

/// Reads the version from the library itself and checks that it supports the API version of this crate.
fn probe(library: &libloading::Library, file: &Path) -> Result<String> {
    type GetApiBase = unsafe extern "system" fn() -> *const sys::OrtApiBase;
    // SAFETY: every release of ONNX Runtime exports this symbol with this signature (onnxruntime_c_api.h).
    let Ok(get) = (unsafe { library.get::<GetApiBase>("OrtGetApiBase") }) else {
        return Err(Error::new(
            ErrorCode::DataLoss,
            format!("{} is not ONNX Runtime: it lacks OrtGetApiBase", file.display()),
        )
        .with_file(file)
        .with_hint("point SDRUN_ONNXRUNTIME_DIR at the folder that holds libonnxruntime"));
    };
    // SAFETY: the call takes no arguments and returns null or a table with static lifetime.
    let Some(base) = (unsafe { get().as_ref() }) else {
        return Err(Error::internal(format!("{} offers no API", file.display())).with_file(file));
    };
    // SAFETY: the table's first two entries have not changed since version 1.0; the text is static.
    let (version, has_api) = unsafe {
        let text = (base.GetVersionString)();
        let version = match text.is_null() {
            true => String::new(),
            false => CStr::from_ptr(text).to_string_lossy().into_owned(),
        };
        // An older release prints a line to stderr if asked for a newer API, so ask only new releases.
        let new_enough = release(&version).is_some_and(|found| found >= LEAST_VERSION);
        (version, new_enough && !(base.GetApi)(sys::ORT_API_VERSION).is_null())
    };
    if !has_api {
        let (major, minor) = LEAST_VERSION;
        return Err(Error::precondition(format!(
            "ONNX Runtime {version:?} in {} is too old: this plugin needs {major}.{minor} or newer",
            file.display()
        ))
        .with_file(file)
        .with_hint(Hint::AnyOf(vec![
            Hint::Install { runtime: "onnxruntime".into() },
            "set SDRUN_ONNXRUNTIME_DIR to the folder of a newer one".into(),
        ])));
    }
    Ok(version)
}

/// Major and minor number of a version such as `1.31.1`.
fn release(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// `Ok` for success, else an error with the vendor's message.
fn check(status: sys::OrtStatusPtr, doing: &str) -> Result<()> {
    // SAFETY: an API call has just returned the status, and it is taken over once.
    unsafe { ort::Error::result_from_status(status) }.map_err(|e| from_ort(e, doing))
}

/// A text in the form that the C API takes.
fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::invalid(format!("{text:?} contains a NUL character")))
}

/// Wraps a handle that a successful call returned.
fn handle<T>(pointer: *mut T) -> Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(|| Error::internal("ONNX Runtime returned a null handle with success"))
}

fn from_ort(error: ort::Error, doing: &str) -> Error {
    use ort::ErrorCode as Ort;
    // The host has already read and checked the graph. So an operator or attribute that ONNX Runtime rejects is one
    // that it lacks.
    let unknown_operator = error.message().contains("No Op registered for");
    // WebGPU has no other way to say that a GPU has no f16.
    let unknown_type = error.message().contains("requires f16 but the device does not support it");
    let code = match error.code() {
        _ if unknown_operator || unknown_type => ErrorCode::Unimplemented,
        Ort::NotImplemented | Ort::InvalidGraph => ErrorCode::Unimplemented,
        Ort::InvalidArgument | Ort::InvalidProtobuf => ErrorCode::InvalidArgument,
        Ort::NoSuchFile | Ort::NotFound => ErrorCode::NotFound,
        Ort::ModelLoadCanceled => ErrorCode::Cancelled,
        _ => ErrorCode::Internal,
    };
    let words =
        error.message().lines().map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join("; ");
    let error = failure(code, format!("ONNX Runtime cannot {doing}: {words}"))
        .with_native(format!("{:?}", error.code()));
    if unknown_type { error.with_hint("build in fp32") } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read_and_compared() {
        assert_eq!(release("1.31.1"), Some((1, 31)));
        assert!(release("1.23.2").unwrap() < LEAST_VERSION);
        assert!(release("2.0.0").unwrap() > LEAST_VERSION);
        assert_eq!(release("nightly"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn another_library_is_not_taken_for_onnx_runtime() {
        // Any intact shared library that this process has already loaded.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps
            .lines()
            .filter_map(|line| line.split_whitespace().last())
            .find(|path| path.contains("/libc.so") || path.contains("/libc-"))
            .unwrap();
        let error = load(Path::new(libc)).err().unwrap();
        assert_eq!(error.code, ErrorCode::DataLoss);
        assert!(error.message.contains("OrtGetApiBase"), "{error}");
    }
}
