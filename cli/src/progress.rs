//! Progress bars on a terminal, and log lines that do not disturb them.

use crate::{format, limit::Watch};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use sdrun::Observer;
use std::{
    io::{self, Write},
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};
use tracing_subscriber::fmt::MakeWriter;

/// All progress bars of the program, hidden if nobody sees them. All output to stderr goes through this.
#[derive(Clone)]
pub(crate) struct Bars {
    bars: MultiProgress,
    pub(crate) watch: Watch,
}

impl Bars {
    pub(crate) fn new(visible: bool) -> Self {
        let target = if visible { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Bars { bars: MultiProgress::with_draw_target(target), watch: Watch::new() }
    }

    pub(crate) fn task(&self, what: &str) -> Task {
        let bar = self.bars.add(ProgressBar::new_spinner());
        bar.set_style(style(WITHOUT_STEPS));
        bar.set_prefix(format::clean(what).into_owned());
        if !self.bars.is_hidden() {
            // Keeps the spinner and the seconds running while a provider reports nothing.
            bar.enable_steady_tick(Duration::from_millis(120));
        }
        self.watch.begin(what);
        Task { bar, watch: self.watch.clone() }
    }

    pub(crate) fn stderr(&self, bytes: &[u8]) -> io::Result<()> {
        self.bars.suspend(|| io::stderr().lock().write_all(bytes))
    }
}

impl io::Write for &Bars {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stderr(bytes).map(|()| bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Bars {
    type Writer = &'a Bars;
    fn make_writer(&'a self) -> &'a Bars {
        self
    }
}

const WITHOUT_STEPS: &str = "{spinner} {prefix} {msg} {elapsed}";

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner())
}

/// A piece of work with a bar. Dropping it removes the bar.
pub(crate) struct Task {
    bar: ProgressBar,
    watch: Watch,
}

impl Task {
    /// Shows `step` of `total` in a phase. A `total` of 0 is unknown.
    pub(crate) fn step(&self, phase: &str, step: u64, total: u64) {
        self.bar.set_message(format::clean(phase).into_owned());
        if total > 0 && self.bar.position() != step {
            self.watch.begin(phase);
        } else {
            self.watch.rename(phase);
        }
        if total > 0 && self.bar.length() != Some(total) {
            self.bar.set_length(total);
            self.bar.set_style(style("{spinner} {prefix} {msg} {bar:30} {percent} % {elapsed}"));
        }
        self.bar.set_position(step);
    }

    /// Shows another piece of work, whose steps are not known yet.
    pub(crate) fn rename(&self, what: &str) {
        self.watch.begin(what);
        self.bar.set_prefix(format::clean(what).into_owned());
        self.bar.set_message("");
        self.bar.unset_length();
        self.bar.set_style(style(WITHOUT_STEPS));
    }

    /// A host for calls into the library: logs, shows progress here, and stops when `cancel` is set.
    pub(crate) fn host(&self, cancel: Arc<AtomicBool>) -> Observer<impl Fn(&str, u64, u64) + Sync> {
        Observer::new(|phase: &str, step, total| self.step(phase, step, total), cancel)
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
        self.watch.end();
    }
}
