//! Hears what providers report.

use sdrun::abi::{Flow, Host, LogLevel};
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

/// Lines of the log to keep for each device.
const MOST_LINES: usize = 500;

/// A host that keeps the log, and that a check can cancel.
pub(crate) struct Listener<'a> {
    user: &'a dyn Host,
    cancel: AtomicBool,
    lines: Mutex<Vec<String>>,
}

impl<'a> Listener<'a> {
    /// Also passes everything to `user`, who can cancel as well.
    pub(crate) fn new(user: &'a dyn Host) -> Self {
        Listener { user, cancel: AtomicBool::new(false), lines: Mutex::default() }
    }

    /// Cancels what runs, or lets later calls run again.
    pub(crate) fn set_cancel(&self, cancel: bool) {
        self.cancel.store(cancel, Relaxed);
    }

    /// Whether the user wants to stop.
    pub(crate) fn stopped(&self) -> bool {
        self.user.cancelled()
    }

    /// Keeps a line.
    pub(crate) fn keep(&self, line: String) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() < MOST_LINES && lines.last() != Some(&line) {
            lines.push(line);
        }
    }

    /// Takes the lines.
    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.lines.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Host for Listener<'_> {
    fn log(&self, level: LogLevel, target: &str, message: &str) {
        let name = match level {
            LogLevel::Trace | LogLevel::Debug => return,
            LogLevel::Info => "info",
            LogLevel::Warn => "warning",
            LogLevel::Error => "error",
            LogLevel::PluginMisbehaving | LogLevel::HostMisbehaving => "fault",
        };
        self.keep(format!("{name}: {target}: {}", message.trim_end()));
    }
    fn progress(&self, phase: &str, step: u64, total: u64) -> Flow {
        let flow = self.user.progress(phase, step, total);
        if self.cancelled() { Flow::Cancel } else { flow }
    }
    fn cancelled(&self) -> bool {
        self.cancel.load(Relaxed) || self.user.cancelled()
    }
}
