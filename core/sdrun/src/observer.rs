use sdrun_abi::{Flow, Host, LogLevel};
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

/// A [`Host`] that writes provider logs to `tracing` and never cancels.
pub struct TracingHost;

impl Host for TracingHost {
    fn log(&self, level: LogLevel, target: &str, message: &str) {
        match level {
            LogLevel::Trace => tracing::trace!("{target}: {message}"),
            LogLevel::Debug => tracing::debug!("{target}: {message}"),
            LogLevel::Info => tracing::info!("{target}: {message}"),
            LogLevel::Warn => tracing::warn!("{target}: {message}"),
            LogLevel::Error => tracing::error!("{target}: {message}"),
            LogLevel::PluginMisbehaving => tracing::error!("{target}: plugin misbehaves: {message}"),
            LogLevel::HostMisbehaving => tracing::error!("{target}: host misbehaves: {message}"),
        }
    }
    fn progress(&self, _: &str, _: u64, _: u64) -> Flow {
        Flow::Continue
    }
    fn cancelled(&self) -> bool {
        false
    }
}

/// A [`Host`] that logs like [`TracingHost`], passes progress to a closure and can be cancelled from another thread.
pub struct Observer<F: Fn(&str, u64, u64) + Sync> {
    progress: F,
    cancel: Arc<AtomicBool>,
}

impl<F: Fn(&str, u64, u64) + Sync> Observer<F> {
    /// `progress` receives phase, step and total (0 = unknown). Setting `cancel` stops the work as soon as the
    /// provider can.
    pub fn new(progress: F, cancel: Arc<AtomicBool>) -> Self {
        Observer { progress, cancel }
    }
}

impl<F: Fn(&str, u64, u64) + Sync> Host for Observer<F> {
    fn log(&self, level: LogLevel, target: &str, message: &str) {
        TracingHost.log(level, target, message);
    }
    fn progress(&self, phase: &str, step: u64, total: u64) -> Flow {
        (self.progress)(phase, step, total);
        if self.cancelled() { Flow::Cancel } else { Flow::Continue }
    }
    fn cancelled(&self) -> bool {
        self.cancel.load(Relaxed)
    }
}
