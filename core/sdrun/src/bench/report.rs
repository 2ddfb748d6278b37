use crate::verify::{Comparison, Tolerance};
use sdrun_abi::{MemoryReport, RefitReport, RuntimeInfo, WeightUpdate};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use super::Stats;

/// Version of the JSON form of [`Report`]; see docs/bench-schema.json.
pub const SCHEMA_VERSION: u32 = 1;

/// Everything one call of `bench` measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of sdrun.
    pub sdrun_version: String,
    /// Seconds since 1970 when it was made.
    pub unix_time: u64,
    /// The machine.
    pub environment: Environment,
    /// One entry for each model, shape and precision.
    pub cases: Vec<CaseReport>,
}

/// The machine a report was made on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Environment {
    /// Operating system.
    pub os: String,
    /// Processor architecture.
    pub arch: String,
    /// Processor name; `None` where it cannot be told.
    pub cpu: Option<String>,
    /// Logical processors this process may use.
    pub cores: usize,
    /// Physical memory; `None` where it cannot be told.
    pub memory_bytes: Option<u64>,
}

/// One model in one precision on all providers.
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
    /// Provider whose fp32 outputs are the yardstick.
    pub reference: Option<String>,
    /// One row for each provider.
    pub rows: Vec<Row>,
}

/// How a provider did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Ran, and its numbers are right.
    Ok,
    /// Ran, and its numbers are wrong: shown, not ranked.
    Inaccurate,
    /// Ran, and there was no reference to compare with: shown, not ranked.
    Unverified,
    /// Does not offer the precision, or does not take the model.
    Unsupported,
    /// Its runtime is not installed or not usable here.
    Absent,
    /// Failed or crashed.
    Failed,
    /// Passed its time limit and was killed.
    TimedOut,
}

/// One provider's row.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Provider id.
    pub provider: String,
    /// How it did.
    pub status: Status,
    /// Why, unless it is `ok`.
    pub reason: Option<String>,
    /// Place among the rows that are `ok`, by median time.
    pub rank: Option<usize>,
    /// Device name.
    pub device: Option<String>,
    /// Vendor runtime.
    pub runtime: Option<RuntimeInfo>,
    /// Arithmetic that was used.
    pub precision: Option<String>,
    /// Loading plugin and runtime.
    pub init_seconds: Option<f64>,
    /// Building the engine, without weights.
    pub build_seconds: Option<f64>,
    /// Size of the engine file's payload.
    pub engine_bytes: Option<u64>,
    /// From the engine file to a session with weights, ready to run.
    pub load_seconds: Option<f64>,
    /// Putting adapters into a session that runs without them; `None` where there are none.
    pub refit: Option<Refit>,
    /// How weights got in.
    pub weight_update: Option<WeightUpdate>,
    /// First run.
    pub first_run_ms: Option<f64>,
    /// Warm runs.
    pub stats: Option<Stats>,
    /// Every warm run, in order.
    pub times_ms: Vec<f64>,
    /// Peak resident memory of the provider's process.
    pub memory: MemoryPeaks,
    /// Distance from the reference.
    pub accuracy: Option<Accuracy>,
    /// Outliers, drift.
    pub warnings: Vec<String>,
}

/// Peak resident memory in bytes of the provider's process up to the end of each phase. `None` is unknown.
/// Weights that a runtime reads out of mapped files count while they are resident.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct MemoryPeaks {
    /// While building.
    pub build_bytes: Option<u64>,
    /// While loading.
    pub load_bytes: Option<u64>,
    /// While putting adapters in.
    pub refit_bytes: Option<u64>,
    /// While running.
    pub run_bytes: Option<u64>,
    /// What of it the session says it needs, once it has run.
    #[serde(default)]
    pub session: MemoryReport,
}

/// A change of weights.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Refit {
    /// How long it took, weights computed.
    pub seconds: f64,
    /// How it was done.
    #[serde(flatten)]
    pub report: RefitReport,
}

impl MemoryPeaks {
    /// The highest of the phases.
    pub fn peak_bytes(&self) -> Option<u64> {
        [self.build_bytes, self.load_bytes, self.refit_bytes, self.run_bytes].into_iter().flatten().max()
    }
}

/// Comparison with the reference.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Accuracy {
    /// The worst output (least cosine).
    pub worst: Comparison,
    /// What was asked of it.
    pub tolerance: Tolerance,
    /// Whether every output is right.
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

/// Numbers the rows that are right by their median.
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
    fn only_right_rows_are_ranked() {
        let row = |id: &str, status, median: f64| Row { status, stats: Stats::of(&[median]), ..Row::new(id) };
        let mut rows =
            [row("a", Status::Ok, 3.0), row("b", Status::Inaccurate, 1.0), row("c", Status::Ok, 2.0)];
        rank(&mut rows);
        assert_eq!(rows.map(|r| r.rank), [Some(2), None, Some(1)]);
    }
}
