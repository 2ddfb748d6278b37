//! Long calls.

use pyo3::{prelude::*, types::PyBytes};
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

/// What a call reports while it runs.
pub(crate) enum Told {
    /// What is done, and how many of how many.
    Step(String, u64, u64),
    /// Width, height and RGB bytes of an unfinished picture.
    Preview(u32, u32, Vec<u8>),
    /// A sentence.
    Warning(String),
}

/// Runs `work` on another thread while other Python threads go on. `hear` is called on this thread with what `work` tells: a kind and
/// its values. An exception of it, or Ctrl-C, cancels the work and is raised afterwards.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    hear: Option<Py<PyAny>>,
    work: impl FnOnce(&dyn Host, &Sender<Told>) -> T + Send,
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
                let news = told.recv_timeout(POLL);
                let ended = matches!(news, Err(RecvTimeoutError::Disconnected));
                let heard = Python::attach(|py| {
                    py.check_signals()?;
                    match (&hear, news) {
                        (Some(hear), Ok(news)) if raised.is_none() => news.tell(py, hear),
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

impl Told {
    fn tell(self, py: Python<'_>, hear: &Py<PyAny>) -> PyResult<()> {
        match self {
            Told::Step(what, done, total) => hear.call1(py, ("step", what, done, total)),
            Told::Preview(width, height, bytes) => {
                hear.call1(py, ("preview", width, height, PyBytes::new(py, &bytes)))
            }
            Told::Warning(sentence) => hear.call1(py, ("warning", sentence)),
        }
        .map(drop)
    }
}
