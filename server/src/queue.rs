//! Jobs that wait for a device.

use crate::{
    fault::Fault,
    job::{Job, State},
    sync::{Condvar, Mutex, MutexGuard},
};
use axum::http::StatusCode;
use std::{
    collections::VecDeque,
    sync::{Arc, PoisonError},
};

/// The jobs of one device. A thread draws them one after the other.
#[derive(Default)]
pub(crate) struct Queue {
    state: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Arc<Job>>,
    current: Option<Arc<Job>>,
    closed: bool,
}

/// The most jobs that wait for a device.
const MOST_WAITING: usize = 32;

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // Each change is complete, so a panic elsewhere leaves the queue whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a job.
    ///
    /// # Errors
    /// 429 if the queue is full, 503 after [`close`](Self::close).
    pub(crate) fn push(&self, job: Arc<Job>) -> Result<(), Fault> {
        let mut waiting = self.lock();
        if waiting.closed {
            return Err(Fault::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", "the server is stopping"));
        }
        if waiting.jobs.len() >= MOST_WAITING {
            let message = format!("{MOST_WAITING} jobs wait already: try again later");
            return Err(Fault::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message));
        }
        waiting.jobs.push_back(job);
        self.changed.notify_one();
        Ok(())
    }

    /// The next job, as soon as there is one. `None` after [`close`](Self::close).
    pub(crate) fn next(&self) -> Option<Arc<Job>> {
        let mut waiting = self.lock();
        waiting.current = None;
        loop {
            while let Some(job) = waiting.jobs.pop_front() {
                if job.is_cancelled() || waiting.closed {
                    job.change(|status| status.state = State::Cancelled);
                } else {
                    waiting.current = Some(job.clone());
                    return Some(job);
                }
            }
            if waiting.closed {
                return None;
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The job that is being done.
    pub(crate) fn current(&self) -> Option<Arc<Job>> {
        self.lock().current.clone()
    }

    /// Jobs that are waiting or being done.
    pub(crate) fn len(&self) -> usize {
        let waiting = self.lock();
        waiting.jobs.len() + usize::from(waiting.current.is_some())
    }

    /// Jobs that are waiting.
    pub(crate) fn waiting(&self) -> usize {
        self.lock().jobs.len()
    }

    /// How many jobs come before this one; `None` if it does not wait here.
    pub(crate) fn position(&self, id: &str) -> Option<usize> {
        let waiting = self.lock();
        let place = waiting.jobs.iter().position(|job| job.id == id)?;
        Some(place + usize::from(waiting.current.is_some()))
    }

    /// Takes a cancelled job out, so that it ends at once.
    pub(crate) fn remove(&self, id: &str) {
        let mut waiting = self.lock();
        if let Some(place) = waiting.jobs.iter().position(|job| job.id == id)
            && let Some(job) = waiting.jobs.remove(place)
        {
            job.change(|status| status.state = State::Cancelled);
        }
    }

    /// Takes no more jobs, and cancels those that are there.
    pub(crate) fn close(&self) {
        let mut waiting = self.lock();
        waiting.closed = true;
        if let Some(job) = &waiting.current {
            job.cancel();
        }
        self.changed.notify_all();
    }
}
