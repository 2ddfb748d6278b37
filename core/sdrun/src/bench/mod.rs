//! Benchmarks a model on every provider, and on other systems beside them: time to build and load, speed, memory use, and whether the
//! results are correct.
//!
//! Each system runs in its own process, so that a crash, a hang or a missing runtime becomes a row with the reason, and memory can be
//! measured separately. All of a case stay alive and run in turns ([`Turn`]), so that a slow phase of the machine hits all alike; the
//! ratio to the best one, with its interval, comes from turns of the same round. Turns during which other work ran are repeated. Runs are
//! sequential with the batch size of the model's shapes. Warm-up and first run are excluded from the statistics; raw times are kept.

mod baseline;
mod contender;
mod disturbance;
mod environment;
mod judge;
mod provider;
mod race;
mod report;
mod rounds;
mod stats;

pub use baseline::Baseline;
pub use disturbance::Disturbance;
pub use environment::Environment;
pub use report::{Accuracy, CaseReport, Kind, MemoryPeaks, Refit, Report, Row, SCHEMA_VERSION, Status, Turn};
pub use stats::{Ratio, Stats};

use crate::{Isolation, Model, Registry, Result, Shapes, Tensors, worker::Limits};
use disturbance::Watch;
use race::Race;
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
    /// Other systems to measure beside them.
    pub baselines: Vec<Baseline>,
    /// Device for all of them; `None` uses each provider's first.
    pub device: Option<String>,
    /// Threads for CPU devices.
    pub threads: Option<usize>,
    /// Minimum number of warm runs, unless `max_time` ends first (never fewer than three). Disturbed turns count half.
    pub min_runs: usize,
    /// Run each system for at least this long.
    pub min_time: Duration,
    /// Stop running a system after this long.
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
            baselines: Vec::new(),
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
    /// A system starts a case.
    Start {
        /// Model name.
        model: &'a str,
        /// Precision of the case.
        precision: PrecisionChoice,
        /// Provider id, or the name of a baseline.
        system: &'a str,
    },
    /// A phase of the case starts: `init`, `build`, `load`, `first run`.
    Phase(&'a str),
    /// All that are loaded run in turns.
    Runs,
    /// The case is done.
    Done(&'a CaseReport),
}

/// Measures every case on every provider and baseline. `listen` gets each finished case.
///
/// # Errors
/// Mistakes of the caller (an unknown provider, a model that cannot be bound), and `Cancelled` if `host` cancels. A failure of a
/// system is reported in its row.
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
    let mut watch = Watch::new(options.threads.unwrap_or(usize::MAX));
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
        let mut race = Race {
            registry,
            case,
            graph: &graph,
            inputs: &inputs,
            reference,
            options,
            isolation: &isolation,
            host,
            files: None,
            rows: Vec::new(),
            racers: Vec::new(),
            heats: 0,
        };
        race.run(&providers, &mut watch, listen)?;
        let (mut rows, heats) = (race.rows, race.heats);
        report::rank(&mut rows);
        let done = CaseReport {
            model: case.model.name().to_string(),
            topology,
            model_topology: case.model.graph().topology_hash(),
            precision: case.precision.to_string(),
            shapes: inputs.iter().map(|(name, t)| (name.clone(), t.shape().to_vec())).collect(),
            inputs_sha256: crate::inputs::sha256(&inputs),
            reference: registry.reference().map(|p| p.id.clone()),
            heats,
            rows,
        };
        listen(Event::Done(&done));
        report.cases.push(done);
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
    match provider::outputs_of(registry, provide, case, inputs, options, isolation, host) {
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

/// The suite of two minutes: names of built-in models.
pub const QUICK: &[&str] = &["mobilenet-v2", "sd15/vae-decoder", "sd15/text-encoder"];

/// The suite of all kinds of networks that diffusion models have: names of built-in models. Those of Flux and T5 have all the width and
/// few of the layers, so that they fit where others measure them too.
pub const FULL: &[&str] = &[
    "mobilenet-v2",
    "sd15/vae-decoder",
    "sd15/text-encoder",
    "sd15/unet",
    "sd15/controlnet",
    "sdxl/unet",
    "sd35/medium",
    "flux/dev-2x2-layers",
    "t5-xxl-2-layers",
];
