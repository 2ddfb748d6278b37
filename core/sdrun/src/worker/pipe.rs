//! The worker's end of the pipes to its host.

use super::{
    protocol::{FromWorker, ToWorker, send},
    sync::{AtomicU64, Mutex, MutexGuard, Receiver},
};
use sdrun_abi::Error;
use std::{
    fs::File,
    io::{self, Write},
    sync::{PoisonError, atomic::Ordering::SeqCst},
};

/// Exits at once because the host is gone. Runs none of the vendor's exit code, which could hang.
pub(super) fn vanish() -> ! {
    #[cfg(unix)]
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    std::process::abort()
}

/// The worker's end of the pipes.
pub(super) struct Pipe {
    out: Mutex<(File, Vec<u8>)>,
    /// Held from a question to its answer.
    answers: Mutex<Receiver<ToWorker>>,
    /// The call under way, and the last one that the host cancelled.
    call: AtomicU64,
    cancelled: AtomicU64,
    mark: String,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pipe {
    /// Sends into `out`; `answers` delivers what the host answers. `mark` is the line that [`mark`](Pipe::mark) writes.
    pub(super) fn new(out: File, answers: Receiver<ToWorker>, mark: String) -> Self {
        Pipe {
            out: Mutex::new((out, Vec::new())),
            answers: Mutex::new(answers),
            call: AtomicU64::new(0),
            cancelled: AtomicU64::new(0),
            mark,
        }
    }

    /// Call `number` begins.
    pub(super) fn begin(&self, number: u64) {
        self.call.store(number, SeqCst);
    }

    /// The host has cancelled call `number`.
    pub(super) fn cancel(&self, number: u64) {
        self.cancelled.store(number, SeqCst);
    }

    pub(super) fn send(&self, message: &FromWorker) {
        let mut out = lock(&self.out);
        let (pipe, buffer) = &mut *out;
        match send(pipe, buffer, message) {
            Ok(()) => {}
            // Too long: nothing was sent, and the host waits.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                let error = Error::internal(format!("the provider's answer does not fit: {e}"));
                if send(pipe, buffer, &FromWorker::Failed(error)).is_err() {
                    vanish();
                }
            }
            Err(_) => vanish(),
        }
    }

    /// Asks the host. Questions of several threads queue up.
    pub(super) fn ask(&self, question: &FromWorker) -> ToWorker {
        let answers = lock(&self.answers);
        self.send(question);
        answers.recv().unwrap_or_else(|_| vanish())
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(SeqCst) == self.call.load(SeqCst)
    }

    /// Tells the host that everything this process wrote on stderr so far has arrived.
    pub(super) fn mark(&self) {
        let _ = writeln!(io::stderr(), "\n{}", self.mark);
    }
}
