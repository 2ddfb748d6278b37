//! The host's half of a worker, shared by its provider, engines and sessions, from start to end.

use super::{
    Limits, WorkerConfig,
    process::{Event, Process},
    protocol::{Dropped, ToWorker, send},
    sandbox::Sandbox,
    shm::{Folders, Region},
};
use sdrun_abi::{Error, Result};
use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    process::{ChildStdin, Command},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::{Receiver, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

/// How long a killed process may take to disappear. One that hangs in a driver may never do so.
pub(super) const DEATH: Duration = Duration::from_secs(2);
/// How long a worker may take to exit when asked.
const GOODBYE: Duration = Duration::from_secs(2);

/// The purpose of a call, for messages and for the time limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Phase {
    Start,
    Init,
    Query,
    Assess,
    Build,
    Load,
    Serialize,
    Session,
    Refit,
    Run,
    Memory,
}

impl Phase {
    pub(super) fn words(self) -> &'static str {
        match self {
            Phase::Start => "loading the plugin",
            Phase::Init => "initialising the runtime",
            Phase::Query => "asking about devices",
            Phase::Assess => "assessing a graph",
            Phase::Build => "building an engine",
            Phase::Load => "loading an engine",
            Phase::Serialize => "serializing an engine",
            Phase::Session => "creating a session",
            Phase::Refit => "changing weights",
            Phase::Run => "running",
            Phase::Memory => "measuring memory",
        }
    }
    pub(super) fn limit(self, limits: &Limits) -> Option<Duration> {
        match self {
            Phase::Start | Phase::Init | Phase::Query | Phase::Memory => limits.init,
            Phase::Assess | Phase::Build | Phase::Load | Phase::Serialize => limits.build,
            Phase::Session | Phase::Refit => limits.session,
            Phase::Run => limits.run,
        }
    }
}

/// A worker, shared by its provider, engines and sessions. Dropping the last of them kills and reaps it.
pub(super) struct Worker {
    /// Id of the provider; the plugin's file name until the id is known.
    pub(super) provider: String,
    pub(super) process: Arc<Process>,
    pub(super) limits: Limits,
    /// Folders for temporary files and for links, if it is confined.
    pub(super) own: Option<(PathBuf, PathBuf)>,
    link: Mutex<Link>,
    /// Objects to destroy when the pipe is free.
    dropped: Mutex<Dropped>,
    pub(super) closing: AtomicBool,
}

/// The pipe to the worker and its state; locked during a call.
pub(super) struct Link {
    pub(super) pipe: ChildStdin,
    pub(super) buffer: Vec<u8>,
    pub(super) events: Receiver<Event>,
    /// Used by every run; replaced by a larger one when too small.
    pub(super) input: Option<Region>,
    pub(super) output: Option<Region>,
    /// Removed after the regions are unmapped, because Windows cannot remove a mapped file.
    pub(super) folders: Folders,
    pub(super) calls: u64,
    pub(super) failures: u64,
    pub(super) weight_files: bool,
    /// What the worker may do.
    pub(super) sandbox: Option<Sandbox>,
    /// Files with weights, and whether it may read them.
    reachable: HashMap<PathBuf, bool>,
    /// Why the worker no longer responds.
    pub(super) gone: Option<String>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Worker {
    /// Starts the process of a worker. Also returns the mark line that shows how far its stderr has been read.
    pub(super) fn spawn(config: WorkerConfig) -> Result<(Self, String)> {
        for (what, path) in [("worker", &config.worker), ("plugin", &config.plugin)] {
            if !path.is_absolute() {
                return Err(Error::invalid(format!(
                    "the path of the {what}, {}, is not absolute",
                    path.display()
                )));
            }
            if !path.is_file() {
                let error = Error::not_found(format!("there is no {what} at {}", path.display()));
                return Err(error.with_file(path));
            }
        }
        let mut folders = Folders::open(&config.scratch)?;
        let mut sandbox = config.sandbox;
        let own = sandbox.as_mut().map(|sandbox| folders.allow(sandbox)).transpose()?;
        if let Some(sandbox) = &mut sandbox {
            sandbox.readable.extend(dunce::canonicalize(&config.plugin));
        }
        let program = config.loader.first().map_or(config.worker.as_os_str(), |loader| loader.as_os_str());
        let mut command = Command::new(program);
        if let Some((_, arguments)) = config.loader.split_first() {
            command.args(arguments).arg(&config.worker);
        }
        command.arg(&config.plugin);
        if cfg!(target_os = "linux") {
            command.env(TUNABLES, with_large_pages(std::env::var(TUNABLES).ok()));
        }
        command.envs(config.env.iter().map(|(name, value)| (name, value)));
        let mark = mark();
        let (process, pipe, events) = Process::start(command, mark.clone()).map_err(|e| {
            Error::io("start the worker", program, &e)
                .with_hint("the file must be an executable for this machine")
        })?;
        let worker = Worker {
            provider: config.plugin.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            process,
            limits: config.limits,
            own,
            link: Mutex::new(Link {
                pipe,
                buffer: Vec::new(),
                events,
                folders,
                input: None,
                output: None,
                calls: 0,
                failures: 0,
                weight_files: false,
                sandbox,
                reachable: HashMap::new(),
                gone: None,
            }),
            dropped: Mutex::default(),
            closing: AtomicBool::new(false),
        };
        Ok((worker, mark))
    }

    /// The link for a call; waits for the one under way in another thread.
    pub(super) fn link(&self) -> Result<MutexGuard<'_, Link>> {
        let mut link = lock(&self.link);
        if let Some(why) = &link.gone {
            return Err(Error::precondition(format!(
                "the worker of provider {} is gone: it {why}",
                self.provider
            ))
            .with_hint("open the provider again to start a new worker"));
        }
        self.destroy_dropped(&mut link);
        Ok(link)
    }

    /// Destroys an object, which `which` puts on a list, now or after the current call. Never waits.
    pub(super) fn discard(&self, which: impl FnOnce(&mut Dropped)) {
        which(&mut lock(&self.dropped));
        if let Some(mut link) = self.free_link() {
            self.destroy_dropped(&mut link);
        }
    }

    /// Whether a call is in progress.
    pub(super) fn is_busy(&self) -> bool {
        self.free_link().is_none()
    }

    /// The link, unless a call is in progress.
    fn free_link(&self) -> Option<MutexGuard<'_, Link>> {
        match self.link.try_lock() {
            Ok(link) => Some(link),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(super) fn destroy_dropped(&self, link: &mut Link) {
        let dropped = std::mem::take(&mut *lock(&self.dropped));
        if link.gone.is_none() && dropped != Dropped::default() {
            // An unreachable worker shows up in the next call.
            let _ = link.send(&ToWorker::Drop(dropped));
        }
    }

    /// Asks the worker to exit, and kills it if it does not.
    pub(super) fn close(&self) {
        let until = Instant::now() + GOODBYE;
        self.closing.store(true, Relaxed);
        let mut link = self.free_link();
        while link.is_none() && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
            link = self.free_link();
        }
        if let Some(link) = &mut link
            && link.gone.is_none()
        {
            link.gone = Some("was closed".into());
            let _ = link.send(&ToWorker::Shutdown);
        }
        if self.process.wait(until.saturating_duration_since(Instant::now())).is_none() {
            self.process.kill();
            self.process.wait(DEATH);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.process.kill();
        // Nothing queued for the worker matters any more.
        let link = self.link.get_mut().unwrap_or_else(PoisonError::into_inner);
        link.events = sync_channel(0).1;
        self.process.wait(DEATH);
    }
}

impl Link {
    pub(super) fn send(&mut self, message: &ToWorker) -> io::Result<()> {
        send(&mut self.pipe, &mut self.buffer, message)
    }

    /// Whether the worker can read a file itself.
    pub(super) fn can_read(&mut self, file: &Path) -> bool {
        if !self.weight_files {
            return false;
        }
        let Some(sandbox) = &self.sandbox else { return true };
        if let Some(known) = self.reachable.get(file) {
            return *known;
        }
        let real = dunce::canonicalize(file);
        let reachable = real.is_ok_and(|real| sandbox.readable.iter().any(|place| real.starts_with(place)));
        if !reachable {
            tracing::debug!(
                "the worker gets copies of the weights in {}, which it may not read",
                file.display()
            );
        }
        self.reachable.insert(file.to_path_buf(), reachable);
        reachable
    }
}

/// A line that nothing else writes.
fn mark() -> String {
    use std::hash::{BuildHasher, RandomState};
    format!("sdrun-mark-{:016x}", RandomState::new().hash_one(std::process::id()))
}

/// Variable with the settings of glibc's allocator.
const TUNABLES: &str = "GLIBC_TUNABLES";

/// Adds the setting for huge pages to `given`, unless `given` already decides that. It needs glibc 2.35; older
/// versions ignore it. Runtimes that compile a graph fill gigabytes of new memory, page by page.
fn with_large_pages(given: Option<String>) -> String {
    const NAME: &str = "glibc.malloc.hugetlb";
    match given.filter(|given| !given.is_empty()) {
        None => format!("{NAME}=1"),
        Some(given) if given.contains(NAME) => given,
        Some(given) => format!("{given}:{NAME}=1"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_requested_unless_the_user_decides() {
        let with = |given: &str| with_large_pages(Some(given.into()));
        assert_eq!(with_large_pages(None), "glibc.malloc.hugetlb=1");
        assert_eq!(with(""), "glibc.malloc.hugetlb=1");
        assert_eq!(with("glibc.malloc.check=3"), "glibc.malloc.check=3:glibc.malloc.hugetlb=1");
        assert_eq!(with("glibc.malloc.hugetlb=0"), "glibc.malloc.hugetlb=0");
    }
}
