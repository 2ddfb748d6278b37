//! Errors as values.

use sdrun::abi::{self, ErrorCode};
use std::{
    ffi::{CString, c_char},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
};

/// Why a call failed. Free it with `sdrun_failure_free`.
pub struct Failure {
    code: ErrorCode,
    message: CString,
    hint: Option<CString>,
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// A text for C. A zero inside would end it early, so it is left out.
pub(crate) fn text(text: impl Into<String>) -> CString {
    let text: String = text.into();
    CString::new(text.replace('\0', "")).unwrap_or_default()
}

impl Failure {
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>, hint: Option<abi::Hint>) -> Self {
        Failure { code, message: text(message), hint: hint.map(|hint| text(hint.to_string())) }
    }

    /// The same failure, with what it is about before the sentence.
    pub(crate) fn of(self, what: &str) -> Self {
        let message = text(format!("{what}: {}", self.message.to_string_lossy()));
        Failure { message, ..self }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidArgument, message, None)
    }
}

impl From<sdrun::Error> for Failure {
    fn from(error: sdrun::Error) -> Self {
        Self::new(error.code(), error.to_string(), error.hint())
    }
}

impl From<abi::Error> for Failure {
    fn from(error: abi::Error) -> Self {
        sdrun::Error::from(error).into()
    }
}

impl From<sdrun_diffusion::pipeline::Error> for Failure {
    fn from(error: sdrun_diffusion::pipeline::Error) -> Self {
        Self::new(error.code(), error.to_string(), error.hint())
    }
}

/// Does `work`. Returns null, or why it failed. A panic is a failure, too: it must not reach C.
pub(crate) fn caught(work: impl FnOnce() -> Result<()>) -> *mut Failure {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => ptr::null_mut(),
        Ok(Err(failure)) => Box::into_raw(Box::new(failure)),
        Err(_) => {
            let bug = Failure::new(ErrorCode::Internal, "sdrun has a bug: it panicked", None);
            Box::into_raw(Box::new(bug))
        }
    }
}

/// The failure's kind, one of `SDRUN_CANCELLED` to `SDRUN_DATA_LOSS`.
///
/// # Safety
/// `failure` comes from this library and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_failure_code(failure: *const Failure) -> u32 {
    // SAFETY: as the function's contract says; null is `None`.
    unsafe { failure.as_ref() }.map_or(0, |failure| failure.code as u32)
}

/// One sentence: what failed, where and why. It lives as long as the failure.
///
/// # Safety
/// As `sdrun_failure_code`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_failure_message(failure: *const Failure) -> *const c_char {
    // SAFETY: as the function's contract says; null is `None`.
    unsafe { failure.as_ref() }.map_or(ptr::null(), |failure| failure.message.as_ptr())
}

/// What to do about it; null if there is no advice. It lives as long as the failure.
///
/// # Safety
/// As `sdrun_failure_code`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_failure_hint(failure: *const Failure) -> *const c_char {
    // SAFETY: as the function's contract says; null is `None`.
    let hint = unsafe { failure.as_ref() }.and_then(|failure| failure.hint.as_ref());
    hint.map_or(ptr::null(), |hint| hint.as_ptr())
}

/// Frees a failure. Null is allowed.
///
/// # Safety
/// As `sdrun_failure_code`; nobody uses it or its texts afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_failure_free(failure: *mut Failure) {
    // SAFETY: as the function's contract says.
    unsafe { crate::given::free(failure) };
}
