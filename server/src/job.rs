//! A piece of work, and what is known about it.

use crate::{fault::Fault, task::Task};
use sdrun_diffusion::{metadata::Record, pipeline::LoadedNetwork};
use serde::Serialize;
use std::{
    collections::VecDeque,
    hash::{BuildHasher, Hasher, RandomState},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};
use tokio::sync::watch;
use utoipa::ToSchema;

/// How far a job is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// It waits for the device.
    #[default]
    Queued,
    /// It is being drawn.
    Running,
    /// All pictures are there.
    Done,
    /// It stopped with an error.
    Failed,
    /// Somebody stopped it.
    Cancelled,
}

impl State {
    /// Whether nothing more will happen.
    pub(crate) fn is_last(self) -> bool {
        matches!(self, State::Done | State::Failed | State::Cancelled)
    }
}

/// What is known about a job.
#[derive(Clone, Debug, Default)]
pub(crate) struct Status {
    pub(crate) state: State,
    pub(crate) phase: String,
    /// Steps that are done, of all pictures.
    pub(crate) done: usize,
    pub(crate) total: usize,
    /// Pictures that the job shall make.
    pub(crate) count: usize,
    /// The step of the current picture, and its steps.
    pub(crate) step: (usize, usize),
    pub(crate) seconds_left: Option<f64>,
    /// The latest preview, a JPEG file, and its number.
    pub(crate) preview: Option<(u64, Arc<[u8]>)>,
    pub(crate) pictures: Vec<Arc<Drawn>>,
    pub(crate) networks: Vec<LoadedNetwork>,
    pub(crate) warnings: Vec<String>,
    pub(crate) fault: Option<Fault>,
    pub(crate) seconds: Option<f64>,
}

/// A finished picture.
#[derive(Debug)]
pub(crate) struct Drawn {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) media_type: &'static str,
    pub(crate) bytes: Vec<u8>,
    /// How it was made; `None` for an enlarged picture.
    pub(crate) record: Option<Record>,
    /// A1111's text of the settings.
    pub(crate) parameters: String,
}

/// A piece of work in a queue, being done or done.
pub(crate) struct Job {
    pub(crate) id: String,
    /// A client's own name for it.
    pub(crate) alias: Option<String>,
    /// The work, until it begins.
    task: Mutex<Option<Task>>,
    cancel: AtomicBool,
    skip: AtomicBool,
    status: watch::Sender<Status>,
    /// Whether its last state is there. Who waits for that is not woken at each step, which would disturb the drawing.
    ended: watch::Sender<bool>,
}

impl Job {
    pub(crate) fn new(task: Task, alias: Option<String>) -> Self {
        let status = Status { count: task.count(), ..Status::default() };
        Job {
            // The keys of the hasher are random.
            id: format!("{:016x}", RandomState::new().build_hasher().finish()),
            alias,
            task: Mutex::new(Some(task)),
            cancel: AtomicBool::new(false),
            skip: AtomicBool::new(false),
            status: watch::Sender::new(status),
            ended: watch::Sender::new(false),
        }
    }

    /// The work. The second call gets nothing.
    pub(crate) fn take(&self) -> Option<Task> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Stops it as soon as the provider can. One that waits never begins.
    pub(crate) fn cancel(&self) {
        self.cancel.store(true, Relaxed);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancel.load(Relaxed)
    }

    /// Leaves out the rest of the current picture.
    pub(crate) fn skip(&self) {
        self.skip.store(true, Relaxed);
    }

    pub(crate) fn is_skipped(&self) -> bool {
        self.skip.load(Relaxed)
    }

    /// The picture that was to be left out is over.
    pub(crate) fn skipped(&self) -> bool {
        self.skip.swap(false, Relaxed)
    }

    pub(crate) fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    pub(crate) fn state(&self) -> State {
        self.status.borrow().state
    }

    /// Hears of changes.
    pub(crate) fn watch(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Status)) {
        self.status.send_modify(change);
        if self.state().is_last() {
            self.ended.send_replace(true);
        }
    }

    /// Waits for its last state.
    pub(crate) async fn ended(&self) -> Status {
        // The sender lives as long as the job.
        let _ = self.ended.subscribe().wait_for(|ended| *ended).await;
        self.status()
    }

    /// Drops the pictures, which a client has got.
    pub(crate) fn forget_pictures(&self) {
        self.change(|status| {
            status.pictures.clear();
            status.preview = None;
        });
    }

    fn bytes(&self) -> usize {
        self.status.borrow().pictures.iter().map(|picture| picture.bytes.len()).sum()
    }
}

/// Jobs that clients may still ask for.
#[derive(Default)]
pub(crate) struct Jobs(Mutex<VecDeque<Arc<Job>>>);

/// The most ended jobs to remember, and the most bytes of their pictures.
const MOST_JOBS: usize = 200;
const MOST_BYTES: usize = 256 << 20;

impl Jobs {
    /// Adds a job, and forgets old ones that have ended.
    pub(crate) fn add(&self, job: Arc<Job>) {
        let mut jobs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.push_back(job);
        let ended = |job: &&Arc<Job>| job.state().is_last();
        let mut bytes: usize = jobs.iter().map(|job| job.bytes()).sum();
        let mut count = jobs.iter().filter(ended).count();
        while count > MOST_JOBS || bytes > MOST_BYTES {
            let Some(oldest) = jobs.iter().position(|job| ended(&job)) else { break };
            if let Some(job) = jobs.remove(oldest) {
                bytes -= job.bytes();
                count -= 1;
            }
        }
    }

    /// A job by its id, or by a client's own name for it.
    pub(crate) fn get(&self, id: &str) -> Option<Arc<Job>> {
        let jobs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = jobs.iter().rev().find(|job| job.id == id || job.alias.as_deref() == Some(id));
        found.cloned()
    }

    /// All of them, the newest first.
    pub(crate) fn all(&self) -> Vec<Arc<Job>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().rev().cloned().collect()
    }
}
