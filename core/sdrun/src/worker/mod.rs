//! Isolation: runs a provider in its own process, behind the same traits as one in this process.
//!
//! A runtime that aborts, hangs or needs another dynamic loader affects only its worker. The host gets an
//! [`Error`](sdrun_abi::Error) with the runtime's last output. Calls are small messages over the worker's stdin and
//! stdout (`protocol`). Tensors are in shared memory that both sides keep mapped between runs (`shm`). On Linux, workers are
//! confined if their runtime supports it: they reach only the files they need, no network and no other programs (`sandbox`).
//!
//! | file | what it does |
//! |---|---|
//! | `find` | finds the `sdrun-worker` executable |
//! | `loader` | runtimes that bring their own C library |
//! | `process`, `stderr` | starts, watches, kills and reaps a worker; keeps what it wrote |
//! | `sandbox` | what a worker may do |
//! | `link`, `exchange` | host: a worker's lifetime; one call, with its time limit and the worker's requests |
//! | `proxy` | host: the traits over them |
//! | `pipe` | worker: its end of the pipes |
//! | `serve`, `callbacks` | worker: runs calls on the plugin; implements the host traits that the plugin calls |

mod callbacks;
mod exchange;
mod find;
mod link;
mod loader;
mod pipe;
mod process;
mod protocol;
mod proxy;
mod sandbox;
mod serve;
mod shm;
mod stderr;
mod sync;

pub use exchange::waited;
pub use find::find_worker;
pub use loader::loader_of;
pub(crate) use process::was_killed;
pub use proxy::WorkerProvider;
pub(crate) use sandbox::driver_folders;
pub use sandbox::{Confinement, Sandbox};
pub use serve::worker_main;

use std::{ffi::OsString, path::PathBuf, time::Duration};

/// Reads messages as a host and as a worker do, up to the first that is damaged. For tests with made-up bytes.
#[doc(hidden)]
pub fn read_messages(bytes: &[u8]) {
    use protocol::{FromWorker, ToWorker, receive};
    let mut buffer = Vec::new();
    let mut rest = bytes;
    while let Ok(Some(_)) = receive::<FromWorker>(&mut rest, &mut buffer) {}
    rest = bytes;
    while let Ok(Some(_)) = receive::<ToWorker>(&mut rest, &mut buffer) {}
}

/// How to start a worker.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// The `sdrun-worker` executable, absolute; see [`find_worker`].
    pub worker: PathBuf,
    /// Command prefix, for example another dynamic loader:
    /// `["/opt/x/ld-linux-x86-64.so.2", "--library-path", "/opt/x/lib"]`. Empty starts the worker directly.
    pub loader: Vec<OsString>,
    /// Environment variables added to the host's.
    pub env: Vec<(OsString, OsString)>,
    /// The plugin library to load, absolute.
    pub plugin: PathBuf,
    /// Time limits of its calls.
    pub limits: Limits,
    /// A folder that only this user can write to. It holds shared memory if there is no `/dev/shm` or not enough room
    /// in it.
    pub scratch: PathBuf,
    /// What it may do; all that the user may, if `None`. The folders of temporary files and shared memory are added.
    pub sandbox: Option<Sandbox>,
}

/// How long calls may take before the worker is killed and the call fails with `DeadlineExceeded`. Time spent in the
/// host's own callbacks (weight sources, progress) does not count. `None` waits forever.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Start, including loading the plugin; `init`, `devices`, `capabilities`, `check`, `memory`.
    pub init: Option<Duration>,
    /// `build`, `load`, `serialize`.
    pub build: Option<Duration>,
    /// `session`, `refit`.
    pub session: Option<Duration>,
    /// `run`.
    pub run: Option<Duration>,
    /// How long a call may continue after cancellation. Then the worker is killed and the call fails with
    /// `Cancelled`.
    pub cancel: Option<Duration>,
}

impl Limits {
    /// The same limit for every call.
    pub fn all(each: Duration) -> Self {
        let each = Some(each);
        Limits { init: each, build: each, session: each, run: each, cancel: each }
    }
}
