use crate::Error;
use crate::verify::{Comparison, Tolerance};
use sdrun_abi::{Device, ErrorCode, MemoryReport, RefitReport, RuntimeInfo, TimingPlan, WeightUpdate};
use serde::{Deserialize, Serialize};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use super::{Disturbance, Environment, Ratio, Stats, stats};

/// Version of the JSON form of [`Report`]; see docs/bench-schema.json.
pub const SCHEMA_VERSION: u32 = 2;

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

/// Results of one model in one precision on all providers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CaseReport {
    /// Model file or built-in name.
    pub model: String,
    /// Topology hash of the bound graph.
    pub topology: String,
    /// Topology hash of the graph with open dimensions.
    #[serde(default)]
    pub model_topology: String,
    /// `fp32`, `fp16`, `bf16`, or `low` (each provider's best below fp32).
    pub precision: String,
    /// Number of threads on CPU devices, if it was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Shapes of the inputs.
    pub shapes: BTreeMap<String, Vec<usize>>,
    /// SHA-256 over the inputs.
    pub inputs_sha256: String,
    /// Provider whose fp32 outputs are the reference.
    pub reference: Option<String>,
    /// Steps of a run, for whole pictures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<usize>,
    /// How many heats there were. Systems whose memory did not fit beside the others' ran in later ones, beside the first system if the
    /// memory holds both.
    pub heats: usize,
    /// One row per provider and baseline.
    pub rows: Vec<Row>,
}

/// Whether a row is a provider's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A provider of sdrun.
    Provider,
    /// Another system.
    Baseline,
}

/// The result of a system.
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

/// Runs of a system that follow each other. Then it is another system's turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// The heat, from 0.
    pub heat: usize,
    /// The round within the heat, from 0. Turns of one round are neighbours in time.
    pub round: usize,
    /// Durations of the runs in milliseconds, in order.
    pub times_ms: Vec<f64>,
    /// What disturbed it. Disturbed turns do not count if enough others are there.
    pub disturbed: Option<Disturbance>,
}

/// One system's row.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Provider id, or the name of a baseline.
    pub system: String,
    /// Which of the two it is.
    pub kind: Kind,
    /// The result.
    pub status: Status,
    /// Why, unless the status is `ok`.
    pub reason: Option<String>,
    /// Rank by time among the rows with status `ok`.
    pub rank: Option<usize>,
    /// Its time as a multiple of the best one's; `None` without a rank.
    pub versus_best: Option<Ratio>,
    /// The device; `None` for baselines.
    pub device: Option<Device>,
    /// Vendor runtime.
    pub runtime: Option<RuntimeInfo>,
    /// Identity of the provider's build.
    pub build_id: Option<String>,
    /// The precision used.
    pub precision: Option<String>,
    /// Other settings that change the figures, such as `2 threads`.
    pub settings: Vec<String>,
    /// Time to start the process and to load plugin and runtime.
    pub init_seconds: Option<f64>,
    /// Time to build the engine, or what a baseline compiles.
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
    /// Statistics of the warm runs. They leave out disturbed turns if enough others are there.
    pub stats: Option<Stats>,
    /// All turns.
    pub turns: Vec<Turn>,
    /// Peak resident memory of the provider's process.
    pub memory: MemoryPeaks,
    /// Distance from the reference.
    pub accuracy: Option<Accuracy>,
    /// Warnings, for example about outliers and drift.
    pub warnings: Vec<String>,
}

/// Peak resident memory, in bytes, of the system's process up to the end of each phase. `None` is unknown. Weights
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
    /// A row of which nothing is known yet.
    pub fn new(system: &str, kind: Kind) -> Self {
        Row {
            system: system.to_string(),
            kind,
            status: Status::Failed,
            reason: None,
            rank: None,
            versus_best: None,
            device: None,
            runtime: None,
            build_id: None,
            precision: None,
            settings: Vec::new(),
            init_seconds: None,
            build_seconds: None,
            engine_bytes: None,
            load_seconds: None,
            refit: None,
            weight_update: None,
            first_run_ms: None,
            stats: None,
            turns: Vec::new(),
            memory: MemoryPeaks::default(),
            accuracy: None,
            warnings: Vec::new(),
        }
    }

    /// Says why it has no result.
    pub(crate) fn fail(&mut self, error: &Error) {
        self.status = match error.code() {
            ErrorCode::Unimplemented => Status::Unsupported,
            ErrorCode::DeadlineExceeded => Status::TimedOut,
            ErrorCode::FailedPrecondition | ErrorCode::NotFound if self.runtime.is_none() => Status::Absent,
            _ => Status::Failed,
        };
        self.reason = Some(match error.hint() {
            Some(hint) => format!("{error} ({hint})"),
            None => error.to_string(),
        });
    }

    /// Sets the turns, and the statistics and warnings that follow from them.
    pub(crate) fn take(&mut self, turns: Vec<Turn>) {
        self.turns = turns;
        let counted = self.counted();
        let times: Vec<f64> = counted.iter().flat_map(|turn| turn.times_ms.iter().copied()).collect();
        let all_count = counted.len() == self.turns.len();
        self.stats = Stats::of(&times);
        self.warnings = stats::warnings(&times);
        let disturbed: Vec<Disturbance> = self.turns.iter().filter_map(|turn| turn.disturbed).collect();
        if let Some(first) = disturbed.first() {
            let (count, of) = (disturbed.len(), self.turns.len());
            let what = if all_count { "count, because there are too few others" } else { "do not count" };
            self.warnings.push(format!("{count} of {of} turns were disturbed and {what}: {first}"));
        }
    }

    /// The turns that count: those that nothing disturbed, or all of them if these are too few.
    pub fn counted(&self) -> Vec<&Turn> {
        let quiet: Vec<&Turn> = self.turns.iter().filter(|turn| turn.disturbed.is_none()).collect();
        let runs: usize = quiet.iter().map(|turn| turn.times_ms.len()).sum();
        if runs >= TimingPlan::LEAST_RUNS { quiet } else { self.turns.iter().collect() }
    }
}

/// Ranks the correct rows by their time as a multiple of the best one's.
pub(crate) fn rank(rows: &mut [Row]) {
    let ranked: Vec<usize> =
        (0..rows.len()).filter(|i| rows[*i].status == Status::Ok && rows[*i].stats.is_some()).collect();
    // The system that ran in every heat comes first, even if its results are wrong.
    let anchor = (0..rows.len()).max_by_key(|i| {
        let heats = rows[*i].turns.iter().map(|turn| turn.heat).collect::<BTreeSet<_>>().len();
        (heats, Reverse(*i))
    });
    let order: Vec<usize> =
        anchor.into_iter().chain(ranked.iter().copied().filter(|i| Some(*i) != anchor)).collect();
    let turns: Vec<Vec<&Turn>> = order.iter().map(|i| rows[*i].counted()).collect();
    // Wrong results win nothing.
    let can_win: Vec<bool> = order.iter().map(|i| ranked.contains(i)).collect();
    let ratios = stats::ratios(&turns, &can_win);
    // A ratio compares systems. One that never ran beside another has none, unless it is the only one.
    let together = ratios.iter().flatten().count() > 1 || ranked.len() == 1;
    for (row, ratio) in order.iter().zip(&ratios) {
        rows[*row].versus_best = ratio.filter(|_| together && ranked.contains(row));
    }
    // Where there is no ratio, medians decide.
    let median = |row: &Row| row.stats.as_ref().map_or(f64::INFINITY, |stats| stats.median_ms);
    let ratio = |row: &Row| row.versus_best.map(|versus| versus.ratio);
    let best = ranked.iter().map(|i| &rows[*i]).filter(|row| ratio(row) == Some(1.0)).map(median);
    let best = best.fold(f64::INFINITY, f64::min);
    let score = |row: &Row| ratio(row).map_or(median(row), |ratio| ratio * best);
    let mut places = ranked;
    places.sort_by(|a, b| score(&rows[*a]).total_cmp(&score(&rows[*b])));
    for (place, index) in places.into_iter().enumerate() {
        rows[index].rank = Some(place + 1);
    }
}

impl Report {
    /// A report of now and here, without cases.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "it depends on the time and the machine")]
    pub fn new() -> Self {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: &str, status: Status, times: &[f64]) -> Row {
        let turn = |(round, ms): (usize, &f64)| Turn { heat: 0, round, times_ms: vec![*ms], disturbed: None };
        let mut row = Row { status, ..Row::new(id, Kind::Provider) };
        row.take(times.iter().enumerate().map(turn).collect());
        row
    }

    #[test]
    fn only_correct_rows_are_ranked() {
        let mut rows = [
            row("a", Status::Ok, &[3.0; 5]),
            row("b", Status::Inaccurate, &[1.0; 5]),
            row("c", Status::Ok, &[2.0; 5]),
            row("d", Status::Ok, &[]),
        ];
        rank(&mut rows);
        assert_eq!(rows.each_ref().map(|r| r.rank), [Some(2), None, Some(1), None]);
        assert_eq!(rows.map(|r| r.versus_best.map(|v| v.ratio)), [Some(1.5), None, Some(1.0), None]);
        let mut rows = [row("a", Status::Inaccurate, &[1.0; 5]), row("b", Status::Ok, &[2.0; 5])];
        rank(&mut rows);
        assert_eq!(rows[1].versus_best.unwrap().ratio, 1.0);
    }

    /// As if memory held only some of them at a time.
    #[test]
    fn systems_that_ran_alone_are_ranked_by_their_medians() {
        let of = |heats: [usize; 3], times: [f64; 3]| {
            let mut rows = ["a", "b", "c"].map(|id| row(id, Status::Ok, &[]));
            for (row, (heat, ms)) in rows.iter_mut().zip(heats.into_iter().zip(times)) {
                let turn = |round| Turn { heat, round, times_ms: vec![ms], disturbed: None };
                row.take((0..5).map(turn).collect());
            }
            rank(&mut rows);
            rows.map(|row| (row.rank.unwrap(), row.versus_best.map(|versus| versus.ratio)))
        };
        assert_eq!(of([0, 1, 2], [3.0, 2.0, 4.0]), [(2, None), (1, None), (3, None)]);
        assert_eq!(of([0, 0, 1], [3.0, 2.0, 1.0]), [(3, Some(1.5)), (2, Some(1.0)), (1, None)]);
        assert_eq!(of([0, 0, 1], [3.0, 2.0, 2.5]), [(3, Some(1.5)), (1, Some(1.0)), (2, None)]);
    }

    #[test]
    fn disturbed_turns_count_only_if_they_must() {
        let turn = |round: usize, ms: f64, disturbed: bool| Turn {
            heat: 0,
            round,
            times_ms: vec![ms],
            disturbed: disturbed.then_some(Disturbance::Slower { speed: 0.5 }),
        };
        let mut few = Row::new("a", Kind::Provider);
        few.take(vec![turn(0, 1.0, false), turn(1, 9.0, true), turn(2, 9.0, true)]);
        assert_eq!(few.stats.as_ref().unwrap().median_ms, 9.0);
        assert!(
            few.warnings.last().unwrap().contains("2 of 3 turns were disturbed and count"),
            "{:?}",
            few.warnings
        );
        let mut enough = Row::new("a", Kind::Provider);
        enough
            .take((0..4).map(|round| turn(round, if round == 3 { 9.0 } else { 1.0 }, round == 3)).collect());
        assert_eq!((enough.stats.as_ref().unwrap().max_ms, enough.counted().len()), (1.0, 3));
    }
}
