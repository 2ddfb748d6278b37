//! Keeps log records until a call ends. The library logs from any thread at any time, but a host accepts records only
//! during a call. The first error explains a failure; later ones are often consequences.

use sdrun_abi::{Host, LogLevel};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, PoisonError},
};

/// Further records are dropped.
const LIMIT: usize = 200;

static WAITING: Mutex<Vec<(LogLevel, String)>> = Mutex::new(Vec::new());

/// Stores a record. Severities are those of `ILogger::Severity`; records below a warning are dropped.
pub(super) fn receive(severity: i32, message: String) {
    let level = match severity {
        0 | 1 => LogLevel::Error,
        2 => LogLevel::Warn,
        _ => return,
    };
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() < LIMIT {
            waiting.push((level, message.trim_end().to_string()));
        }
    }));
}

/// Passes all stored records to the host and returns the first error among them.
pub(crate) fn deliver(host: &dyn Host) -> Option<String> {
    deliver_as(None, host)
}

/// The same, with this level in place of the records' own.
pub(crate) fn deliver_as(level: Option<LogLevel>, host: &dyn Host) -> Option<String> {
    let records = std::mem::take(&mut *WAITING.lock().unwrap_or_else(PoisonError::into_inner));
    let mut first = None;
    for (own, message) in records {
        if own == LogLevel::Error && first.is_none() {
            first = Some(message.clone());
        }
        host.log(level.unwrap_or(own), "tensorrt-rtx", &message);
    }
    first
}
