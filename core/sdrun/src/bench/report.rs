use crate::verify::{Comparison, Tolerance};
use sdrun_abi::{MemoryReport, RefitReport, RuntimeInfo, WeightUpdate};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use super::Stats;

/// Version of the JSON form of [`Report`]; see docs/bench-schema.json.
pub const SCHEMA_VERSION: u32 = 1;

/// All results of one call of `bench`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of sdrun.
    pub sdrun_version: String,
    /// Time of creation, in seconds since 1970.
    pub unix_time: u64,
    /// The machine.
    pub environment: Environment,
    /// One entry per model, shape and precision.
    pub cases: Vec<CaseReport>,
}

/// The machine that produced a report.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Environment {
    /// Operating system.
    pub os: String,
    /// Processor architecture.
    pub arch: String,
    /// Processor name; `None` if unknown.
    pub cpu: Option<String>,
    /// Logical processors available to this process.
    pub cores: usize,
    /// Physical memory; `None` if unknown.
    pub memory_bytes: Option<u64>,
}

/// Results of one model in one precision on all providers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CaseReport {
    /// Model file or built-in name.
    pub model: String,
    /// Topology hash of the bound graph.
    pub topology: String,
    /// `fp32`, `fp16`, `bf16`, or `low` (each provider's best below fp32).
    pub precision: String,
    /// Shapes of the inputs.
    pub shapes: BTreeMap<String, Vec<usize>>,
    /// SHA-256 over the inputs.
    pub inputs_sha256: String,
    /// Provider whose fp32 outputs are the reference.
    pub reference: Option<String>,
    /// One row per provider.
    pub rows: Vec<Row>,
}

/// The result of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Ran, with correct results.
    Ok,
    /// Ran, with wrong results: shown, not ranked.
    Inaccurate,
    /// Ran without a reference to compare with: shown, not ranked.
    Unverified,
    /// Does not support the precision or the model.
    Unsupported,
    /// Its runtime is not installed or not usable here.
    Absent,
    /// Failed or crashed.
    Failed,
    /// Exceeded its time limit and was killed.
    TimedOut,
}

/// One provider's row.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Provider id.
    pub provider: String,
    /// The result.
    pub status: Status,
    /// Why, unless the status is `ok`.
    pub reason: Option<String>,
    /// Rank by median time among the rows with status `ok`.
    pub rank: Option<usize>,
    /// Device name.
    pub device: Option<String>,
    /// Vendor runtime.
    pub runtime: Option<RuntimeInfo>,
    /// The precision used.
    pub precision: Option<String>,
    /// Time to load plugin and runtime.
    pub init_seconds: Option<f64>,
    /// Time to build the engine, without weights.
    pub build_seconds: Option<f64>,
    /// Size of the engine's payload.
    pub engine_bytes: Option<u64>,
    /// Time from the engine file to a session with weights, ready to run.
    pub load_seconds: Option<f64>,
    /// Applying adapters to a session that runs without them; `None` without adapters.
    pub refit: Option<Refit>,
    /// How the weights reached the engine.
    pub weight_update: Option<WeightUpdate>,
    /// Duration of the first run.
    pub first_run_ms: Option<f64>,
    /// Statistics of the warm runs.
    pub stats: Option<Stats>,
    /// Durations of all warm runs, in order.
    pub times_ms: Vec<f64>,
    /// Peak resident memory of the provider's process.
    pub memory: MemoryPeaks,
    /// Distance from the reference.
    pub accuracy: Option<Accuracy>,
    /// Warnings, for example about outliers and drift.
    pub warnings: Vec<String>,
}

/// Peak resident memory, in bytes, of the provider's process up to the end of each phase. `None` is unknown. Weights
/// that a runtime reads from mapped files count while they are resident.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct MemoryPeaks {
    /// While building.
    pub build_bytes: Option<u64>,
    /// While loading.
    pub load_bytes: Option<u64>,
    /// While applying adapters.
    pub refit_bytes: Option<u64>,
    /// While running.
    pub run_bytes: Option<u64>,
    /// The session's own report of its memory, after a run.
    #[serde(default)]
    pub session: MemoryReport,
}

/// A replacement of weights.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Refit {
    /// Duration, including the computation of the weights.
    pub seconds: f64,
    /// Method and size.
    #[serde(flatten)]
    pub report: RefitReport,
}

impl MemoryPeaks {
    /// The highest peak of all phases.
    pub fn peak_bytes(&self) -> Option<u64> {
        [self.build_bytes, self.load_bytes, self.refit_bytes, self.run_bytes].into_iter().flatten().max()
    }
}

/// Comparison with the reference.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Accuracy {
    /// The worst output (lowest cosine).
    pub worst: Comparison,
    /// The tolerance applied.
    pub tolerance: Tolerance,
    /// Whether every output is within tolerance.
    pub accepted: bool,
}

impl Row {
    pub(crate) fn new(provider: &str) -> Self {
        Row {
            provider: provider.to_string(),
            status: Status::Failed,
            reason: None,
            rank: None,
            device: None,
            runtime: None,
            precision: None,
            init_seconds: None,
            build_seconds: None,
            engine_bytes: None,
            load_seconds: None,
            refit: None,
            weight_update: None,
            first_run_ms: None,
            stats: None,
            times_ms: Vec::new(),
            memory: MemoryPeaks::default(),
            accuracy: None,
            warnings: Vec::new(),
        }
    }
}

/// Ranks the correct rows by median time.
pub(crate) fn rank(rows: &mut [Row]) {
    let mut order: Vec<usize> = (0..rows.len()).filter(|i| rows[*i].status == Status::Ok).collect();
    let median = |row: &Row| row.stats.as_ref().map_or(f64::INFINITY, |s| s.median_ms);
    order.sort_by(|a, b| median(&rows[*a]).total_cmp(&median(&rows[*b])));
    for (place, index) in order.into_iter().enumerate() {
        rows[index].rank = Some(place + 1);
    }
}

impl Report {
    pub(crate) fn new() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Report {
            schema_version: SCHEMA_VERSION,
            sdrun_version: env!("CARGO_PKG_VERSION").to_string(),
            unix_time: now.map_or(0, |d| d.as_secs()),
            environment: Environment::here(),
            cases: Vec::new(),
        }
    }
}

impl Environment {
    /// This machine.
    pub fn here() -> Self {
        let proc = |file: &str, key: &str| -> Option<String> {
            let text = std::fs::read_to_string(file).ok()?;
            let line = text.lines().find(|l| l.starts_with(key))?;
            Some(line.split_once(':')?.1.trim().to_string())
        };
        Environment {
            os: std::env::consts::OS.to_string(),
            arch: std::env::consts::ARCH.to_string(),
            cpu: proc("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism().map_or(1, Into::into),
            memory_bytes: proc("/proc/meminfo", "MemTotal")
                .and_then(|v| v.split_whitespace().next()?.parse::<u64>().ok())
                .map(|kib| kib * 1024),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_correct_rows_are_ranked() {
        let row = |id: &str, status, median: f64| Row { status, stats: Stats::of(&[median]), ..Row::new(id) };
        let mut rows =
            [row("a", Status::Ok, 3.0), row("b", Status::Inaccurate, 1.0), row("c", Status::Ok, 2.0)];
        rank(&mut rows);
        assert_eq!(rows.map(|r| r.rank), [Some(2), None, Some(1)]);
    }
}
