//! Numbers for Prometheus (text format 0.0.4).

use crate::job::State;
use sdrun_diffusion::pipeline::Origin;
use std::{
    fmt::Write,
    sync::{Mutex, PoisonError},
    time::Duration,
};
use sysinfo::{Pid, ProcessRefreshKind, ProcessesToUpdate, System};

/// Numbers since the server began.
#[derive(Default)]
pub(crate) struct Metrics(Mutex<Numbers>);

#[derive(Clone, Default)]
struct Numbers {
    done: u64,
    failed: u64,
    cancelled: u64,
    job_seconds: f64,
    pictures: u64,
    steps: u64,
    /// In which networks ran.
    step_seconds: f64,
    built: u64,
    cached: u64,
    refitted: u64,
    kept: u64,
    refit_seconds: f64,
}

impl Metrics {
    fn change(&self, change: impl FnOnce(&mut Numbers)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn ended(&self, state: State, time: Duration) {
        self.change(|numbers| {
            match state {
                State::Done => numbers.done += 1,
                State::Failed => numbers.failed += 1,
                _ => numbers.cancelled += 1,
            }
            numbers.job_seconds += time.as_secs_f64();
        });
    }

    pub(crate) fn picture(&self) {
        self.change(|numbers| numbers.pictures += 1);
    }

    pub(crate) fn step(&self, running: f64) {
        self.change(|numbers| {
            numbers.steps += 1;
            numbers.step_seconds += running;
        });
    }

    pub(crate) fn network(&self, origin: Origin, seconds: f64) {
        self.change(|numbers| match origin {
            Origin::Built => numbers.built += 1,
            Origin::Cached => numbers.cached += 1,
            Origin::Kept => numbers.kept += 1,
            Origin::Refitted => {
                numbers.refitted += 1;
                numbers.refit_seconds += seconds;
            }
        });
    }

    /// All numbers as text. `waiting` and `running` count jobs.
    pub(crate) fn text(&self, waiting: usize, running: usize) -> String {
        let numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut out = String::new();
        let mut family = |name: &str, kind: &str, help: &str, values: &[(&str, f64)]| {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "# HELP sdrun_{name} {help}\n# TYPE sdrun_{name} {kind}");
            for (labels, value) in values {
                let _ = writeln!(out, "sdrun_{name}{labels} {value}");
            }
        };
        let jobs = [
            ("{state=\"done\"}", numbers.done as f64),
            ("{state=\"failed\"}", numbers.failed as f64),
            ("{state=\"cancelled\"}", numbers.cancelled as f64),
        ];
        family("jobs_total", "counter", "Jobs that have ended.", &jobs);
        family("jobs_waiting", "gauge", "Jobs that wait for a device.", &[("", waiting as f64)]);
        family("jobs_running", "gauge", "Jobs that are being done.", &[("", running as f64)]);
        let seconds = numbers.job_seconds;
        family("job_seconds_total", "counter", "Time of all jobs, without waiting.", &[("", seconds)]);
        family("pictures_total", "counter", "Finished pictures.", &[("", numbers.pictures as f64)]);
        family("steps_total", "counter", "Steps of samplers.", &[("", numbers.steps as f64)]);
        let seconds = numbers.step_seconds;
        family("step_seconds_total", "counter", "Time of networks in steps.", &[("", seconds)]);
        let rate = if seconds > 0.0 { numbers.steps as f64 / seconds } else { 0.0 };
        family("steps_per_second", "gauge", "Steps per second, on average.", &[("", rate)]);
        let networks = [
            ("{origin=\"built\"}", numbers.built as f64),
            ("{origin=\"cached\"}", numbers.cached as f64),
            ("{origin=\"refitted\"}", numbers.refitted as f64),
            ("{origin=\"kept\"}", numbers.kept as f64),
        ];
        let help = "Networks that jobs used: their engine was built, came from the cache, got other weights, or was still loaded.";
        family("networks_total", "counter", help, &networks);
        let seconds = numbers.refit_seconds;
        family("refit_seconds_total", "counter", "Time of putting other weights in.", &[("", seconds)]);
        if let Some(bytes) = resident() {
            family("resident_bytes", "gauge", "Memory of this process.", &[("", bytes as f64)]);
        }
        out
    }
}

/// Memory of this process in bytes.
pub(crate) fn resident() -> Option<u64> {
    let pid = Pid::from_u32(std::process::id());
    let mut system = System::new();
    let kind = ProcessRefreshKind::nothing().with_memory();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), true, kind);
    Some(system.process(pid)?.memory())
}

/// Whether a process exists.
pub(crate) fn exists(pid: u32) -> bool {
    let pid = Pid::from_u32(pid);
    let mut system = System::new();
    let kind = ProcessRefreshKind::nothing();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), true, kind);
    system.process(pid).is_some()
}
