//! Benchmarks one model on every provider: time to build and load, speed, memory use, and whether the results are
//! correct.
//!
//! Each provider runs in its own worker process. A provider that crashes, hangs or is absent becomes a row with the
//! reason, and its memory can be measured separately. Runs are sequential with batch size 1. Warm-up and first run
//! are excluded from the statistics; raw times are kept.

mod measure;
mod report;
mod stats;

pub use report::{
    Accuracy, CaseReport, Environment, MemoryPeaks, Refit, Report, Row, SCHEMA_VERSION, Status,
};
pub use stats::Stats;

use crate::{Isolation, Model, Registry, Result, Shapes, Tensors, worker::Limits};
use sdrun_abi::{Error as AbiError, ErrorCode, Hint, Host, Precision, Provide};
use sdrun_weights::WeightStack;
use std::{collections::BTreeMap, time::Duration};

/// Precision of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrecisionChoice {
    /// This precision on every provider.
    Fixed(Precision),
    /// The first precision below fp32 that each provider offers on its device.
    BestLow,
}

impl std::fmt::Display for PrecisionChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PrecisionChoice::Fixed(p) => p.fmt(f),
            PrecisionChoice::BestLow => f.write_str("low"),
        }
    }
}

/// A model, its shapes and a precision.
pub struct Case<'m> {
    /// The model.
    pub model: &'m Model,
    /// Input shapes; if empty, a built-in model's defaults.
    pub shapes: Shapes,
    /// Arithmetic.
    pub precision: PrecisionChoice,
    /// Weights to use instead of the model's own. Adapters are applied by a refit, which is timed.
    pub weights: Option<&'m WeightStack>,
}

/// How to measure.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Providers to measure; empty means all usable ones.
    pub providers: Vec<String>,
    /// Device for all of them; `None` uses each provider's first.
    pub device: Option<String>,
    /// Threads for CPU devices.
    pub threads: Option<usize>,
    /// Minimum number of warm runs, unless `max_time` ends first (never fewer than three).
    pub min_runs: usize,
    /// Continue for at least this long.
    pub min_time: Duration,
    /// Stop after this long.
    pub max_time: Duration,
    /// Number of uncounted runs after the first.
    pub warmup: usize,
    /// Time limit of each call into a provider. A provider that exceeds it is killed.
    pub time_limit: Duration,
    /// Seed of the inputs.
    pub seed: u64,
    /// Options of builds ([`BuildOptions::options`](crate::BuildOptions::options)), by provider id.
    pub options: BTreeMap<String, BTreeMap<String, String>>,
    /// Store the weights in the engines ([`BuildOptions::bake`](crate::BuildOptions::bake)).
    pub bake: bool,
    /// Device memory for weights ([`BuildOptions::vram_budget`](crate::BuildOptions::vram_budget)).
    pub vram_budget: Option<u64>,
}

impl Default for BenchOptions {
    fn default() -> Self {
        BenchOptions {
            providers: Vec::new(),
            device: None,
            threads: None,
            min_runs: 10,
            min_time: Duration::from_secs(3),
            max_time: Duration::from_secs(60),
            warmup: 1,
            time_limit: Duration::from_secs(600),
            seed: 0,
            options: BTreeMap::new(),
            bake: false,
            vram_budget: None,
        }
    }
}

/// Progress of a benchmark, for display.
#[derive(Debug)]
pub enum Event<'a> {
    /// A provider starts a case.
    Start {
        /// Model name.
        model: &'a str,
        /// Precision of the case.
        precision: PrecisionChoice,
        /// Provider id.
        provider: &'a str,
    },
    /// A phase of the case starts: `init`, `build`, `load`, `first run`, `runs`.
    Phase(&'a str),
    /// The case is done.
    Done(&'a Row),
}

/// Measures every case on every provider. Fails only for mistakes of the caller (an unknown provider, a model that
/// cannot be bound), and with `Cancelled` if `host` cancels. A failure of a provider is reported in its row.
pub fn run(
    registry: &Registry,
    cases: &[Case<'_>],
    options: &BenchOptions,
    host: &dyn Host,
    listen: &mut dyn FnMut(Event<'_>),
) -> Result<Report> {
    let providers: Vec<&Provide> = if options.providers.is_empty() {
        registry.usable()
    } else {
        options
            .providers
            .iter()
            .map(|id| {
                registry.entry(id)?.provide.as_ref().ok_or_else(|| AbiError::internal("no manifest").into())
            })
            .collect::<Result<_>>()?
    };
    if providers.is_empty() {
        return Err(AbiError::not_found("there is no provider to measure")
            .with_hint(Hint::ListProviders)
            .into());
    }
    let mut report = Report::new();
    let mut references: Vec<(Computed, Tensors)> = Vec::new();
    for case in cases {
        let graph = case.model.bound(&case.shapes)?;
        let inputs = crate::inputs::seeded(case.model, &graph, options.seed)?;
        let topology = graph.topology_hash();
        let isolation = Isolation::worker(limits(options.time_limit));
        let computed = (topology.clone(), case.weights.map(std::ptr::from_ref));
        if !references.iter().any(|(known, _)| *known == computed)
            && let Some(outputs) = reference_outputs(registry, case, &inputs, options, &isolation, host)
        {
            references.push((computed.clone(), outputs));
        }
        go_on(host)?;
        let reference = references.iter().find(|(known, _)| *known == computed).map(|(_, outputs)| outputs);
        let mut rows = Vec::new();
        for provide in &providers {
            listen(Event::Start {
                model: case.model.name(),
                precision: case.precision,
                provider: &provide.id,
            });
            let row =
                measure::row(registry, provide, case, &inputs, reference, options, &isolation, host, listen);
            go_on(host)?;
            listen(Event::Done(&row));
            rows.push(row);
        }
        report::rank(&mut rows);
        report.cases.push(CaseReport {
            model: case.model.name().to_string(),
            topology,
            precision: case.precision.to_string(),
            shapes: inputs.iter().map(|(name, t)| (name.clone(), t.shape().to_vec())).collect(),
            inputs_sha256: crate::inputs::sha256(&inputs),
            reference: registry.reference().map(|p| p.id.clone()),
            rows,
        });
    }
    Ok(report)
}

/// Identifies the source of reference outputs: topology and weights.
type Computed = (String, Option<*const WeightStack>);

/// The fp32 outputs of the reference provider; `None` if it cannot be used here (accuracy is then unknown).
fn reference_outputs(
    registry: &Registry,
    case: &Case<'_>,
    inputs: &Tensors,
    options: &BenchOptions,
    isolation: &Isolation,
    host: &dyn Host,
) -> Option<Tensors> {
    let provide = registry.reference()?;
    match measure::outputs_of(registry, provide, case, inputs, options, isolation, host) {
        Ok(outputs) => Some(outputs),
        Err(e) => {
            tracing::warn!("no reference outputs, so accuracy is unknown: {e}");
            None
        }
    }
}

fn go_on(host: &dyn Host) -> Result<()> {
    match host.cancelled() {
        true => Err(AbiError::new(ErrorCode::Cancelled, "the benchmark was cancelled").into()),
        false => Ok(()),
    }
}

fn limits(each: Duration) -> Limits {
    Limits { init: Some(each.min(Duration::from_secs(60))), ..Limits::all(each) }
}

/// The suite of `sdrun bench` without a model: names of built-in models and the precisions of each.
pub const SUITE: &[(&str, &[PrecisionChoice])] = &[
    ("mobilenet-v2", &[PrecisionChoice::Fixed(Precision::Fp32), PrecisionChoice::BestLow]),
    ("sd15/vae-decoder", &[PrecisionChoice::Fixed(Precision::Fp32), PrecisionChoice::BestLow]),
];
