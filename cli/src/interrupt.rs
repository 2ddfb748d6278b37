//! Ctrl-C and SIGTERM.

use crate::exit;
use std::{
    io::Write,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

/// How long work may continue after a cancel. Then the process ends, even if a provider has not stopped.
const PATIENCE: Duration = Duration::from_secs(10);

/// The flag that the first Ctrl-C sets. A second one, or [`PATIENCE`], ends the process at once.
pub(crate) fn flag(quiet: bool) -> Arc<AtomicBool> {
    let cancel = Arc::new(AtomicBool::new(false));
    let seen = cancel.clone();
    let installed = ctrlc::set_handler(move || {
        if seen.swap(true, SeqCst) {
            std::process::exit(exit::CANCELLED.into());
        }
        if !quiet {
            let _ = writeln!(std::io::stderr(), "cancelling; press Ctrl-C again to stop at once");
        }
        std::thread::spawn(|| {
            std::thread::sleep(PATIENCE);
            std::process::exit(exit::CANCELLED.into());
        });
    });
    if let Err(e) = installed {
        tracing::warn!("Ctrl-C will end sdrun without cleaning up: {e}");
    }
    cancel
}
