//! `--time-limit` for what the command does itself. The limits of calls into a provider are the library's.

use sdrun::worker;
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// How often the watch is read.
const TICK: Duration = Duration::from_millis(50);
/// What a command does outside of tasks.
const BETWEEN_TASKS: &str = "reading or writing files";

/// What the command does, and for how long without progress. The time in which a provider's process works does not count.
#[derive(Clone)]
pub(crate) struct Watch(Arc<Mutex<Work>>);

struct Work {
    what: String,
    since: Instant,
    /// How long the command had waited for providers by then.
    waited: Duration,
}

impl Work {
    fn begin(what: &str) -> Self {
        Work { what: what.to_owned(), since: Instant::now(), waited: worker::waited() }
    }
}

impl Watch {
    pub(crate) fn new() -> Self {
        Watch(Arc::new(Mutex::new(Work::begin(BETWEEN_TASKS))))
    }

    /// A piece of work begins, or is a step further.
    pub(crate) fn begin(&self, what: &str) {
        *self.work() = Work::begin(what);
    }

    /// The work goes on under another name.
    pub(crate) fn rename(&self, what: &str) {
        what.clone_into(&mut self.work().what);
    }

    /// A piece of work ends.
    pub(crate) fn end(&self) {
        self.begin(BETWEEN_TASKS);
    }

    /// Calls `expired` with the name of the first piece of work that takes longer than this.
    pub(crate) fn limit(&self, limit: Duration, expired: impl FnOnce(&str) + Send + 'static) {
        let watch = self.clone();
        thread::spawn(move || {
            loop {
                thread::sleep(TICK);
                let work = watch.work();
                let waited = worker::waited().saturating_sub(work.waited);
                if work.since.elapsed().saturating_sub(waited) > limit {
                    let what = work.what.clone();
                    drop(work);
                    return expired(&what);
                }
            }
        });
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn only_work_without_progress_expires() {
        let limit = 4 * TICK;
        let (expired, told) = mpsc::channel();
        let watch = Watch::new();
        watch.limit(limit, move |what| expired.send(what.to_owned()).unwrap());
        for _ in 0..10 {
            watch.begin("moving");
            thread::sleep(TICK);
        }
        watch.begin("standing");
        watch.rename("standing still");
        let at = Instant::now();
        assert_eq!(told.recv().unwrap(), "standing still");
        assert!(at.elapsed() >= limit - TICK, "{:?}", at.elapsed());
    }
}
