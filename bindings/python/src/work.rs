//! Long calls.

use pyo3::prelude::*;
use sdrun::{Observer, abi::Host};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::{self, RecvTimeoutError, Sender},
    },
    thread,
    time::Duration,
};

/// How long Ctrl-C may go unnoticed.
const POLL: Duration = Duration::from_millis(50);

/// Progress: what is done, and how many of how many.
pub(crate) type Progress = (String, u64, u64);

/// Runs `work` on another thread while other Python threads go on. `progress` is called on this thread with what `work` sends. An
/// exception of it, or Ctrl-C, cancels the work and is raised afterwards.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    work: impl FnOnce(&dyn Host, &Sender<Progress>) -> T + Send,
) -> PyResult<T> {
    let cancel = Arc::new(AtomicBool::new(false));
    let (tell, told) = mpsc::channel();
    py.detach(move || {
        thread::scope(|scope| {
            let cancelled = cancel.clone();
            let worker = scope.spawn(move || {
                let host = Observer::new(|_: &str, _, _| {}, cancelled);
                catch_unwind(AssertUnwindSafe(|| work(&host, &tell)))
            });
            let mut raised = None;
            loop {
                let step = told.recv_timeout(POLL);
                let ended = step == Err(RecvTimeoutError::Disconnected);
                let heard = Python::attach(|py| {
                    py.check_signals()?;
                    match (&progress, step) {
                        (Some(progress), Ok((what, done, total))) if raised.is_none() => {
                            progress.call1(py, (what, done, total)).map(drop)
                        }
                        _ => Ok(()),
                    }
                });
                if let Err(error) = heard {
                    cancel.store(true, Relaxed);
                    raised.get_or_insert(error);
                }
                if ended {
                    break;
                }
            }
            let done = worker.join().unwrap_or_else(Err);
            match (raised, done) {
                (Some(error), _) => Err(error),
                (None, Ok(done)) => Ok(done),
                (None, Err(_)) => {
                    Err(crate::failed(sdrun::abi::Error::internal("sdrun has a bug: it panicked").into()))
                }
            }
        })
    })
}
