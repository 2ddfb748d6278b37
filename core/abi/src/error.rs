use crate::Hint;
use serde::{Deserialize, Serialize};

/// Kind of an [`Error`]: the canonical status codes of Abseil, with the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u32)]
pub enum ErrorCode {
    /// The caller asked to cancel.
    Cancelled = 1,
    /// An argument is wrong regardless of the state of the system.
    InvalidArgument = 3,
    /// A time limit ran out.
    DeadlineExceeded = 4,
    /// A named thing (file, weight, device) does not exist.
    NotFound = 5,
    /// The thing to create already exists.
    AlreadyExists = 6,
    /// The system denies access.
    PermissionDenied = 7,
    /// Out of memory, disk or another quota.
    ResourceExhausted = 8,
    /// The system is not in the state the call needs (for example: runtime not installed, plugin poisoned).
    FailedPrecondition = 9,
    /// Aborted because of a conflict.
    Aborted = 10,
    /// Outside the valid range.
    OutOfRange = 11,
    /// The operation, operator or option is not supported.
    Unimplemented = 12,
    /// A bug, in sdrun or in the vendor's code.
    Internal = 13,
    /// The process that ran the provider is gone: the vendor's runtime crashed, or something killed it.
    Unavailable = 14,
    /// A file is corrupt or truncated.
    DataLoss = 15,
    /// No better code fits. Unrecognized codes are also read as this.
    #[serde(other)]
    Unknown = 2,
}

impl ErrorCode {
    /// The code with this number; [`ErrorCode::Unknown`] for any other number.
    pub fn from_u32(code: u32) -> Self {
        use ErrorCode::*;
        [
            Cancelled,
            Unknown,
            InvalidArgument,
            DeadlineExceeded,
            NotFound,
            AlreadyExists,
            PermissionDenied,
            ResourceExhausted,
            FailedPrecondition,
            Aborted,
            OutOfRange,
            Unimplemented,
            Internal,
            Unavailable,
            DataLoss,
        ]
        .into_iter()
        .find(|known| *known as u32 == code)
        .unwrap_or(Unknown)
    }
}

/// A failure on either side of the ABI: a plain value, built without touching any vendor library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// Kind of failure.
    pub code: ErrorCode,
    /// One sentence: what, where, why.
    pub message: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<Hint>,
    /// The vendor's own error code or status, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub native_code: Option<String>,
    /// The file at fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// Result with the ABI's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error with this code and message.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Error { code, message: message.into(), hint: None, native_code: None, file: None }
    }
    /// [`ErrorCode::InvalidArgument`].
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidArgument, message)
    }
    /// [`ErrorCode::Unimplemented`].
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Unimplemented, message)
    }
    /// [`ErrorCode::DataLoss`], for a file with wrong contents. `why` continues the sentence that begins with its path.
    pub fn damaged(file: &std::path::Path, why: impl std::fmt::Display) -> Self {
        Self::new(ErrorCode::DataLoss, format!("{} {why}", file.display())).with_file(file)
    }
    /// [`ErrorCode::Internal`].
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Internal, message)
    }
    /// [`ErrorCode::FailedPrecondition`].
    pub fn precondition(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::FailedPrecondition, message)
    }
    /// [`ErrorCode::NotFound`].
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::NotFound, message)
    }
    /// Adds a hint: what to do about it.
    pub fn with_hint(mut self, hint: impl Into<Hint>) -> Self {
        self.hint = Some(hint.into());
        self
    }
    /// Adds the vendor's own error code.
    pub fn with_native(mut self, code: impl Into<String>) -> Self {
        self.native_code = Some(code.into());
        self
    }
    /// Adds the file at fault.
    pub fn with_file(mut self, file: impl AsRef<std::path::Path>) -> Self {
        self.file = Some(file.as_ref().display().to_string());
        self
    }
    /// The error for an I/O failure on `file`; `doing` completes "cannot …".
    pub fn io(doing: &str, file: impl AsRef<std::path::Path>, error: &std::io::Error) -> Self {
        use std::io::ErrorKind::*;
        let code = match error.kind() {
            NotFound => ErrorCode::NotFound,
            PermissionDenied | ReadOnlyFilesystem => ErrorCode::PermissionDenied,
            NotADirectory | IsADirectory | InvalidFilename | AlreadyExists => ErrorCode::InvalidArgument,
            StorageFull | QuotaExceeded | OutOfMemory | FileTooLarge => ErrorCode::ResourceExhausted,
            UnexpectedEof => ErrorCode::DataLoss,
            // The disk fails (EIO; ERROR_CRC).
            _ if error.raw_os_error() == Some(if cfg!(windows) { 23 } else { 5 }) => ErrorCode::DataLoss,
            _ => ErrorCode::Unknown,
        };
        Self::new(code, format!("cannot {doing} {}: {error}", file.as_ref().display())).with_file(file)
    }
}
