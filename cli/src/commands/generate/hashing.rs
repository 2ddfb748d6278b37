//! Names and hashes of a model's files, found out beside the drawing: hashing a large file takes seconds.

use crate::{context::Context, progress::Task};
use sdrun::{Observer, Paths};
use sdrun_diffusion::{
    metadata::Record,
    pipeline::{Opened, Recipe},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{Scope, ScopedJoinHandle},
    time::Duration,
};

/// A thread that hashes files. Dropping this stops it.
pub(super) struct Hashing<'s> {
    thread: Option<ScopedJoinHandle<'s, Record>>,
    found: Record,
    stop: Arc<AtomicBool>,
}

impl<'s> Hashing<'s> {
    /// Starts it. Once the hashes are known, it says how the model differs from that of the picture `from`.
    pub(super) fn start(
        scope: &'s Scope<'s, '_>,
        recipe: &'s Recipe,
        opened: &'s Opened,
        paths: &'s Paths,
        from: Option<&'s Record>,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let host = Observer::new(|_: &str, _, _| {}, stop.clone());
        let thread = scope.spawn(move || {
            let found = recipe.record(opened, paths, &host);
            compare(from, &found);
            found
        });
        Hashing { thread: Some(thread), found: Record::of_sdrun(), stop }
    }

    /// The names and hashes. Waits for them; after a cancel, those that are missing stay unknown.
    pub(super) fn record(&mut self, task: &Task, context: &Context) -> &Record {
        if let Some(thread) = self.thread.take() {
            if !thread.is_finished() {
                task.rename("hashing the model for the picture's metadata");
            }
            while !thread.is_finished() {
                self.stop.store(context.cancelled(), Relaxed);
                std::thread::sleep(Duration::from_millis(10));
            }
            // A thread that panicked has found nothing.
            self.found = thread.join().unwrap_or_else(|_| Record::of_sdrun());
        }
        &self.found
    }
}

impl Drop for Hashing<'_> {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

/// Says how the model differs from that of a picture.
fn compare(from: Option<&Record>, files: &Record) {
    let (Some(old), Some(new)) = (from.and_then(|from| from.model.as_ref()), &files.model) else { return };
    if old.hash.is_some() && new.hash.is_some() && old.hash != new.hash {
        tracing::warn!(
            "the picture was made with the model {}, whose file differs from {}",
            old.name,
            new.name
        );
    }
}
