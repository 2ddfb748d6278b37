//! The queue of jobs in many orders of its threads, which shuttle chooses at random.

#![allow(clippy::unwrap_used)]

mod sync {
    pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};
}

mod fault {
    use axum::http::StatusCode;

    /// Why a job is not taken.
    #[derive(Debug, PartialEq)]
    pub(crate) struct Fault(pub(crate) StatusCode);

    impl Fault {
        pub(crate) fn new(status: StatusCode, _: &str, _: impl Into<String>) -> Self {
            Fault(status)
        }
    }
}

mod job {
    use shuttle::sync::{
        Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    };

    #[derive(Clone, Copy, Debug, Default, PartialEq)]
    pub(crate) enum State {
        #[default]
        Queued,
        Done,
        Cancelled,
    }

    #[derive(Default)]
    pub(crate) struct Status {
        pub(crate) state: State,
    }

    /// A job without work.
    #[derive(Default)]
    pub(crate) struct Job {
        pub(crate) id: String,
        cancel: AtomicBool,
        status: Mutex<Status>,
    }

    impl Job {
        pub(crate) fn new(id: impl Into<String>) -> Self {
            Job { id: id.into(), ..Self::default() }
        }
        pub(crate) fn cancel(&self) {
            self.cancel.store(true, SeqCst);
        }
        pub(crate) fn is_cancelled(&self) -> bool {
            self.cancel.load(SeqCst)
        }
        pub(crate) fn state(&self) -> State {
            self.status.lock().unwrap().state
        }
        /// It ends once.
        pub(crate) fn change(&self, change: impl FnOnce(&mut Status)) {
            let mut status = self.status.lock().unwrap();
            assert_eq!(status.state, State::Queued, "{} ends twice", self.id);
            change(&mut status);
        }
    }
}

#[allow(dead_code)]
#[path = "../src/queue.rs"]
mod queue;

use axum::http::StatusCode;
use fault::Fault;
use job::{Job, State};
use queue::Queue;
use shuttle::thread;
use std::sync::Arc;

/// Clients add and cancel jobs while a device draws and the server stops. Each job ends once, or is not taken, and the device's thread ends.
#[test]
fn each_job_ends_once() {
    let run = || {
        let queue = Arc::new(Queue::default());
        let here = queue.clone();
        let device = thread::spawn(move || {
            while let Some(job) = here.next() {
                // As the device's thread does.
                let end = if job.is_cancelled() { State::Cancelled } else { State::Done };
                job.change(|status| status.state = end);
            }
        });
        let client = |name: char| {
            let queue = queue.clone();
            thread::spawn(move || {
                let jobs = [0, 1, 2].map(|number| Arc::new(Job::new(format!("{name}{number}"))));
                let taken: Vec<Arc<Job>> = jobs
                    .into_iter()
                    .filter(|job| match queue.push(job.clone()) {
                        Ok(()) => true,
                        Err(fault) => {
                            assert_eq!(fault, Fault(StatusCode::SERVICE_UNAVAILABLE));
                            false
                        }
                    })
                    .collect();
                if let Some(job) = taken.get(1) {
                    job.cancel();
                    queue.remove(&job.id);
                }
                taken
            })
        };
        let clients = ['a', 'b'].map(client);
        let here = queue.clone();
        let stop = thread::spawn(move || here.close());
        let taken: Vec<Arc<Job>> = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
        stop.join().unwrap();
        device.join().unwrap();
        for job in &taken {
            assert_ne!(job.state(), State::Queued, "{} is forgotten", job.id);
        }
        assert_eq!((queue.len(), queue.waiting()), (0, 0));
        assert_eq!(queue.push(Arc::new(Job::default())), Err(Fault(StatusCode::SERVICE_UNAVAILABLE)));
    };
    shuttle::check_random(run, 3_000);
}
