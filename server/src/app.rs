//! What all requests share.

use crate::{
    api::sdapi::Settings,
    fault::Fault,
    job::{Job, Jobs, Status},
    library::Library,
    metrics::Metrics,
    queue::Queue,
    task::Task,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The state of the server.
pub(crate) struct App {
    pub(crate) library: Arc<Library>,
    metrics: Arc<Metrics>,
    queues: Vec<Queue>,
    pub(crate) jobs: Jobs,
    options: Mutex<Settings>,
    pub(crate) key: Option<String>,
    pub(crate) origins: Vec<String>,
}

/// Cancels a job when dropped: the client has gone away. A job that has ended does not mind.
struct CancelOnDrop<'a>(&'a App, Arc<Job>);

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        self.0.cancel(&self.1);
    }
}

impl App {
    pub(crate) fn new(
        library: Arc<Library>,
        lanes: usize,
        key: Option<String>,
        origins: Vec<String>,
    ) -> Self {
        App {
            library,
            metrics: Arc::default(),
            queues: (0..lanes.max(1)).map(|_| Queue::default()).collect(),
            jobs: Jobs::default(),
            options: Mutex::default(),
            key,
            origins,
        }
    }

    pub(crate) fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    pub(crate) fn queues(&self) -> &[Queue] {
        &self.queues
    }

    /// The settings that clients of A1111's API share.
    pub(crate) fn options(&self) -> MutexGuard<'_, Settings> {
        self.options.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The model that requests without a name get.
    pub(crate) fn model(&self) -> String {
        self.options().model().map_or_else(|| self.library.default_model(), str::to_string)
    }

    /// Puts a task into the shortest queue.
    ///
    /// # Errors
    /// 429 if it is full.
    pub(crate) fn submit(&self, task: Task, alias: Option<String>) -> Result<Arc<Job>, Fault> {
        let job = Arc::new(Job::new(task, alias));
        let shortest = self.queues.iter().min_by_key(|queue| queue.len());
        let queue = shortest.ok_or_else(|| Fault::internal("there is no device"))?;
        queue.push(job.clone())?;
        self.jobs.add(job.clone());
        Ok(job)
    }

    /// Does a task and waits for its end. If the client goes away, the job is cancelled.
    ///
    /// # Errors
    /// 429 if the queue is full.
    pub(crate) async fn run(&self, task: Task, alias: Option<String>) -> Result<Status, Fault> {
        let (job, status) = self.finish(task, alias).await?;
        job.forget_pictures();
        Ok(status)
    }

    /// The same, and the job keeps its pictures for later requests.
    ///
    /// # Errors
    /// 429 if the queue is full.
    pub(crate) async fn finish(
        &self,
        task: Task,
        alias: Option<String>,
    ) -> Result<(Arc<Job>, Status), Fault> {
        let job = self.submit(task, alias)?;
        let _waiting = CancelOnDrop(self, job.clone());
        let status = job.ended().await;
        Ok((job, status))
    }

    /// Frees the memory of networks that are kept, on each device after its jobs.
    ///
    /// # Errors
    /// 429 if a queue is full.
    pub(crate) fn unload(&self) -> Result<(), Fault> {
        self.queues.iter().try_for_each(|queue| queue.push(Arc::new(Job::new(Task::Unload, None))))
    }

    /// Stops a job. One that waits ends at once.
    pub(crate) fn cancel(&self, job: &Job) {
        job.cancel();
        self.queues.iter().for_each(|queue| queue.remove(&job.id));
    }

    /// A job that is being done.
    pub(crate) fn current(&self) -> Option<Arc<Job>> {
        self.queues.iter().find_map(Queue::current)
    }

    /// How many jobs come before this one.
    pub(crate) fn position(&self, id: &str) -> Option<usize> {
        self.queues.iter().find_map(|queue| queue.position(id))
    }

    /// The numbers for Prometheus.
    pub(crate) fn numbers(&self) -> String {
        let waiting = self.queues.iter().map(Queue::waiting).sum();
        let running = self.queues.iter().filter(|queue| queue.current().is_some()).count();
        self.metrics.text(waiting, running)
    }
}
