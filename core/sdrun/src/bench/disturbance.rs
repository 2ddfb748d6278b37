//! Notices other work on the machine while something is measured.

use sdrun_abi::default_threads;
use serde::{Deserialize, Serialize};
use std::{
    fs, hint, thread,
    time::{Duration, Instant},
};

/// The state of the machine at a moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    at: Instant,
    /// How long the calibration loop took.
    loop_time: Duration,
    cpu: Option<CpuTimes>,
    /// Processor time of the measured processes, in seconds.
    own: Option<f64>,
}

/// Processor time of the whole machine since it was started, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct CpuTimes {
    busy: f64,
    stolen: f64,
}

/// What disturbed a turn.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Disturbance {
    /// Other processes used this many cores.
    OtherWork {
        /// Cores.
        cores: f64,
    },
    /// The hypervisor gave this share of the time to other machines.
    Stolen {
        /// Share of the processor time.
        share: f64,
    },
    /// A calibration loop before or after ran at this share of its best speed.
    Slower {
        /// Speed, 1 is the best.
        speed: f64,
    },
}

impl std::fmt::Display for Disturbance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Disturbance::OtherWork { cores } => write!(f, "other processes used {cores:.1} cores"),
            Disturbance::Stolen { share } => {
                write!(f, "other virtual machines took {:.0} % of the processor", share * 100.0)
            }
            Disturbance::Slower { speed } => {
                write!(f, "the processor ran at {:.0} % of its best speed", speed * 100.0)
            }
        }
    }
}

/// Above these, times are not comparable.
const MOST_STOLEN: f64 = 0.03;
const MOST_OTHER_CORES: f64 = 0.15;
const LEAST_SPEED: f64 = 0.8;
/// Shorter turns cannot be judged by the kernel's counters, whose unit is 10 ms.
const SHORTEST: f64 = 0.1;

/// Watches the machine.
pub(super) struct Watch {
    threads: usize,
    /// Hardware threads of the machine.
    all: usize,
    /// Cores on which nothing is measured.
    free: usize,
    best: Duration,
    steps: u64,
}

impl Watch {
    /// A watch for work on this many threads.
    pub(super) fn new(threads: usize) -> Self {
        let all = thread::available_parallelism().map_or(1, Into::into);
        let threads = threads.clamp(1, all);
        let free = default_threads().saturating_sub(threads);
        // About 3 ms, from the time of a short one.
        let started = Instant::now();
        hint::black_box(spin(1 << 16));
        let each = started.elapsed().as_secs_f64() / f64::from(1 << 16);
        let steps = (0.003 / each.max(1e-10)) as u64;
        let mut watch = Watch { threads, all, free, best: Duration::MAX, steps };
        for _ in 0..5 {
            watch.calibrate();
        }
        watch
    }

    /// Runs the calibration loop on all threads and returns the time of the slowest.
    fn calibrate(&mut self) -> Duration {
        let steps = self.steps;
        let one = || {
            let started = Instant::now();
            hint::black_box(spin(steps));
            started.elapsed()
        };
        let time = thread::scope(|scope| {
            let others: Vec<_> = (1..self.threads).map(|_| scope.spawn(one)).collect();
            let own = one();
            others.into_iter().filter_map(|thread| thread.join().ok()).fold(own, Duration::max)
        });
        self.best = self.best.min(time);
        time
    }

    /// Notes the state of the machine. The measured work runs in these processes.
    pub(super) fn note(&mut self, processes: &[u32]) -> Moment {
        // A short interruption of the loop itself means nothing, so the best of three counts.
        let loop_time = (0..3).map(|_| self.calibrate()).min().unwrap_or_default();
        let own = processes.iter().map(|pid| cpu_of(*pid)).sum();
        Moment { at: Instant::now(), loop_time, cpu: cpu_times(), own }
    }

    /// What disturbed the time between two moments.
    pub(super) fn disturbance(&self, before: &Moment, after: &Moment) -> Option<Disturbance> {
        let seconds = (after.at - before.at).as_secs_f64();
        if let (Some(a), Some(b)) = (before.cpu, after.cpu)
            && seconds >= SHORTEST
        {
            let share = (b.stolen - a.stolen) / (seconds * self.all as f64);
            if share > MOST_STOLEN {
                return Some(Disturbance::Stolen { share });
            }
            if let (Some(own_before), Some(own_after)) = (before.own, after.own) {
                let others = ((b.busy - a.busy) - (own_after - own_before)) / seconds;
                // Other work on cores that the measured systems leave free disturbs nobody.
                let disturbing = others - self.free as f64;
                if disturbing > MOST_OTHER_CORES {
                    return Some(Disturbance::OtherWork { cores: others });
                }
            }
        }
        let slowest = before.loop_time.max(after.loop_time).as_secs_f64();
        let speed = self.best.as_secs_f64() / slowest.max(1e-9);
        (speed < LEAST_SPEED).then_some(Disturbance::Slower { speed })
    }
}

/// A chain of dependent operations, which no compiler can shorten.
fn spin(steps: u64) -> u64 {
    let mut x = hint::black_box(1u64);
    for _ in 0..steps {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        x ^= x >> 29;
    }
    x
}

/// Linux counts processor time in hundredths of a second (`USER_HZ`).
const TICKS: f64 = 100.0;

/// Times of the whole machine, from proc(5). `None` outside Linux.
fn cpu_times() -> Option<CpuTimes> {
    parse_cpu_times(&fs::read_to_string("/proc/stat").ok()?)
}

fn parse_cpu_times(text: &str) -> Option<CpuTimes> {
    let numbers: Vec<f64> = text
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_whitespace()
        .map(str::parse::<f64>)
        .collect::<Result<_, _>>()
        .ok()?;
    let [user, nice, system, _idle, _wait, interrupt, soft, stolen, ..] = numbers[..] else { return None };
    let busy = user + nice + system + interrupt + soft;
    Some(CpuTimes { busy: busy / TICKS, stolen: stolen / TICKS })
}

/// Processor time of a process, in seconds. `None` outside Linux.
fn cpu_of(pid: u32) -> Option<f64> {
    parse_cpu_of(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse_cpu_of(text: &str) -> Option<f64> {
    // The name, in parentheses, may contain anything.
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at)?.parse::<f64>().ok();
    // utime, stime, and those of children that have ended (fields 14 to 17 of proc(5)).
    Some((ticks(11)? + ticks(12)? + ticks(13)? + ticks(14)?) / TICKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_counters() {
        let text = "cpu  100 20 30 4000 50 6 7 80 0 0\ncpu0 1 2 3\n";
        assert_eq!(parse_cpu_times(text), Some(CpuTimes { busy: 1.63, stolen: 0.8 }));
        assert_eq!(parse_cpu_times("cpu 1 2"), None);
        let own = "7 (a) b) S 1 7 7 0 -1 4194304 100 0 0 0 250 50 100 0 20 0 3 0 1 1 1";
        assert_eq!(parse_cpu_of(own), Some(4.0));
        assert_eq!(parse_cpu_of("7 (a"), None);
    }

    #[test]
    fn judges_what_it_saw() {
        let watch = Watch { threads: 2, all: 4, free: 2, best: Duration::from_millis(3), steps: 1 };
        let start = Instant::now();
        let moment = |seconds: f64, busy: f64, stolen: f64, own: f64, loop_ms: u64| Moment {
            at: start + Duration::from_secs_f64(seconds),
            loop_time: Duration::from_millis(loop_ms),
            cpu: Some(CpuTimes { busy, stolen }),
            own: Some(own),
        };
        let before = moment(0.0, 10.0, 0.0, 5.0, 3);
        let judge = |after: Moment| watch.disturbance(&before, &after);
        // Two cores of work, and two free cores with other work.
        assert_eq!(judge(moment(1.0, 13.9, 0.0, 7.0, 3)), None);
        assert_eq!(judge(moment(1.0, 14.5, 0.0, 7.0, 3)), Some(Disturbance::OtherWork { cores: 2.5 }));
        assert_eq!(judge(moment(1.0, 12.0, 0.4, 7.0, 3)), Some(Disturbance::Stolen { share: 0.1 }));
        assert_eq!(judge(moment(1.0, 12.0, 0.0, 7.0, 6)), Some(Disturbance::Slower { speed: 0.5 }));
        // Too short for the counters.
        assert_eq!(judge(moment(0.05, 14.5, 1.0, 7.0, 3)), None);
    }
}
