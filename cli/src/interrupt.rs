//! Ctrl-C, SIGTERM and SIGHUP.

use crate::exit;
use std::{
    io::Write,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

/// How long work may continue after a cancel. Then the process ends, even if a provider is still running or a file is still being read.
const PATIENCE: Duration = Duration::from_millis(500);
/// The same for a command that saves its results first.
const PATIENCE_TO_SAVE: Duration = Duration::from_secs(10);

/// Whether the user pressed Ctrl-C or the command's own time is up, and whether the command then has something to save.
#[derive(Clone, Default)]
pub(crate) struct Interrupt {
    /// Set by the first Ctrl-C. A second one, or the end of patience, ends the process.
    pub(crate) cancelled: Arc<AtomicBool>,
    /// Whether the command has something to save after a cancel.
    pub(crate) saves: Arc<AtomicBool>,
    /// Why it was cancelled, if not by the user.
    pub(crate) expired: Arc<OnceLock<String>>,
}

impl Interrupt {
    /// Cancels the command because its time is up.
    pub(crate) fn expire(&self, why: String) {
        let told = format!("error: {why}\n");
        if self.expired.set(why).is_err() || self.cancelled.swap(true, SeqCst) {
            return;
        }
        std::thread::sleep(PATIENCE);
        let _ = std::io::stderr().write_all(told.as_bytes());
        std::process::exit(exit::EXPIRED.into());
    }
}

/// Listens to the signals.
pub(crate) fn listen(quiet: bool) -> Interrupt {
    let interrupt = Interrupt::default();
    let Interrupt { cancelled, saves, .. } = interrupt.clone();
    let installed = ctrlc::set_handler(move || {
        if cancelled.swap(true, SeqCst) {
            std::process::exit(exit::CANCELLED.into());
        }
        let saves = saves.load(SeqCst);
        if !quiet && saves {
            let _ = writeln!(std::io::stderr(), "cancelling; press Ctrl-C again to stop at once");
        }
        std::thread::spawn(move || {
            std::thread::sleep(if saves { PATIENCE_TO_SAVE } else { PATIENCE });
            let _ = writeln!(std::io::stderr(), "error: cancelled");
            std::process::exit(exit::CANCELLED.into());
        });
    });
    if let Err(e) = installed {
        tracing::warn!("Ctrl-C will end sdrun without cleaning up: {e}");
    }
    interrupt
}
