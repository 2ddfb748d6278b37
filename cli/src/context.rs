//! What every command needs: the registry, output and cancellation.

use crate::{
    cli::Global,
    config::Config,
    exit::cannot_write,
    files, format,
    interrupt::{self, Interrupt},
    progress::{Bars, Task},
};
use sdrun::{Confine, Discovery, Paths, Registry, abi};
use serde::Serialize;
use std::{
    io::{self, ErrorKind, IsTerminal, Write},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::{filter::Targets, layer::SubscriberExt, util::SubscriberInitExt};

/// Where JSON goes.
enum Json {
    No,
    Stdout,
    File(PathBuf),
}

/// The state of one run of the program.
pub(crate) struct Context {
    json: Json,
    /// Whether JSON on stdout has a line for each document.
    lines: AtomicBool,
    quiet: bool,
    provider_path: Vec<PathBuf>,
    pub(crate) config: Config,
    interrupt: Interrupt,
    bars: Bars,
}

impl Context {
    /// Reads the config file and starts logging. If the config file or the log filter is wrong, returns the error and a context
    /// with defaults, which can show the error.
    pub(crate) fn new(global: Global) -> (Self, Result<(), abi::Error>) {
        let bars = Bars::new(!global.quiet && io::stderr().is_terminal());
        let (config, mut fault) = match Config::load() {
            Ok(config) => (config, Ok(())),
            Err(error) => (Config::default(), Err(error)),
        };
        let filter = global.log_filter(config.log.as_deref()).unwrap_or_else(|error| {
            fault = Err(error);
            Targets::new().with_default(LevelFilter::WARN)
        });
        let colour = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
        let lines = tracing_subscriber::fmt::layer()
            .with_writer(bars.clone())
            .with_ansi(colour)
            .with_target(false)
            .without_time();
        tracing_subscriber::registry().with(lines).with(filter).init();
        let context = Self::with(global, config, bars);
        (context, fault)
    }

    fn with(global: Global, config: Config, bars: Bars) -> Self {
        Context {
            json: match global.json {
                None => Json::No,
                Some(None) => Json::Stdout,
                Some(Some(file)) => Json::File(file),
            },
            lines: AtomicBool::new(false),
            quiet: global.quiet,
            provider_path: global.provider_path,
            config,
            interrupt: interrupt::listen(global.quiet),
            bars,
        }
    }

    /// The providers of this machine. Loads no code.
    pub(crate) fn registry(&self) -> sdrun::Result<Registry> {
        self.registry_for(Vec::new())
    }

    /// The same, for models in these folders. The files that a command has opened need not be named.
    pub(crate) fn registry_for(&self, models: Vec<PathBuf>) -> sdrun::Result<Registry> {
        Registry::discover_with(&Discovery {
            provider_paths: self.provider_path.clone(),
            paths: Some(self.paths()?),
            order: self.config.providers.clone(),
            confine: Confine { models, off: self.config.sandbox == Some(false) },
        })
    }

    /// The user's folders.
    pub(crate) fn paths(&self) -> sdrun::Result<Paths> {
        let folders = &self.config.folders;
        Paths::for_user(folders.data.as_deref(), folders.cache.as_deref())
    }

    /// Whether Ctrl-C was pressed.
    pub(crate) fn cancelled(&self) -> bool {
        self.interrupt.cancelled.load(Relaxed)
    }

    /// Why the command must end, if its own time is up.
    pub(crate) fn expired(&self) -> Option<&str> {
        self.interrupt.expired.get().map(String::as_str)
    }

    /// From now on, a piece of the command's own work must not take longer than this.
    pub(crate) fn limit(&self, limit: Option<Duration>) {
        let Some(limit) = limit else { return };
        let interrupt = self.interrupt.clone();
        self.bars.watch.limit(limit, move |what| {
            let what = format::clean(what);
            interrupt.expire(format!(
                "{what} took longer than the limit of {limit:?}, without the provider's part"
            ));
        });
    }

    /// Waits up to a second for a Ctrl-C that may already have killed a child process on the same terminal.
    pub(crate) fn let_interrupt_arrive(&self) {
        for _ in 0..100 {
            if self.cancelled() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The flag behind [`cancelled`](Self::cancelled).
    pub(crate) fn cancel_flag(&self) -> Arc<AtomicBool> {
        self.interrupt.cancelled.clone()
    }

    /// Gives the command time to save its results when it is cancelled.
    pub(crate) fn saves_when_cancelled(&self) {
        self.interrupt.saves.store(true, Relaxed);
    }

    /// Returns an error if Ctrl-C was pressed. Commands call this between steps.
    pub(crate) fn go_on(&self) -> abi::Result<()> {
        if self.cancelled() { Err(abi::Error::new(abi::ErrorCode::Cancelled, "cancelled")) } else { Ok(()) }
    }

    /// Starts a progress bar for a piece of work. Dropping the task removes it.
    pub(crate) fn task(&self, what: &str) -> Task {
        self.bars.task(what)
    }

    /// Shows a result as JSON, as text, or as both if the JSON goes to a file.
    pub(crate) fn present(
        &self,
        value: &impl Serialize,
        text: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> anyhow::Result<()> {
        if !matches!(self.json, Json::No) {
            self.json_only(value)?;
        }
        if matches!(self.json, Json::Stdout) { Ok(()) } else { self.print(text) }
    }

    /// From now on, JSON on stdout has a line for each document: events, and at last a result or an error.
    pub(crate) fn begin_lines(&self) {
        self.lines.store(matches!(self.json, Json::Stdout), Relaxed);
    }

    /// Whether it has.
    pub(crate) fn has_lines(&self) -> bool {
        self.lines.load(Relaxed)
    }

    /// Prints an event as a line of JSON, after [`begin_lines`](Self::begin_lines) and with `--json`.
    pub(crate) fn event(&self, event: &impl Serialize) -> anyhow::Result<()> {
        if self.has_lines() { self.json_only(event) } else { Ok(()) }
    }

    /// Prints `value` as JSON with `--json`.
    pub(crate) fn json_only(&self, value: &impl Serialize) -> anyhow::Result<()> {
        let mut json = match self.json {
            Json::No => return Ok(()),
            Json::Stdout if self.has_lines() => serde_json::to_vec(value)?,
            _ => serde_json::to_vec_pretty(value)?,
        };
        json.push(b'\n');
        match &self.json {
            Json::File(path) => files::write(path, |out| out.write_all(&json)),
            _ => self.print(|out| out.write_all(&json)),
        }
    }

    /// Writes text to stdout, with control characters replaced. If the reader went away (`sdrun … | head`), that is not an error
    /// and the command continues.
    pub(crate) fn print(&self, text: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> anyhow::Result<()> {
        let mut buffer = Vec::new();
        let mut stdout = io::stdout().lock();
        let written = text(&mut buffer).and_then(|()| {
            stdout.write_all(format::clean(&String::from_utf8_lossy(&buffer)).as_bytes())?;
            stdout.flush()
        });
        match written {
            Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(cannot_write("standard output", &e).into()),
            _ => Ok(()),
        }
    }

    /// Prints a note on stderr, unless `--quiet` is given.
    pub(crate) fn note(&self, text: &str) {
        if !self.quiet {
            self.complain(&format!("{text}\n"));
        }
    }

    /// Prints text on stderr, even with `--quiet`.
    pub(crate) fn complain(&self, text: &str) {
        // If stderr is closed, there is nowhere to report it.
        let _ = self.bars.stderr(format::clean(text).as_bytes());
    }
}
