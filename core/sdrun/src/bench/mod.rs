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
mod model;
mod provider;
mod race;
mod report;
mod rounds;
mod stats;

pub use baseline::{Baseline, Task, What};
pub use contender::{Contender, Field};
pub use disturbance::Disturbance;
pub(crate) use environment::graphics_drivers;
pub use environment::{Environment, Gpu};
pub use provider::{settings, threads};
pub use report::{Accuracy, CaseReport, Kind, MemoryPeaks, Refit, Report, Row, SCHEMA_VERSION, Status, Turn};
pub use stats::{Ratio, Stats};

use crate::{Error, Isolation, Model, Registry, Result, Shapes, Tensors, worker::Limits};
use disturbance::Watch;
use model::Systems;
use race::Race;
use sdrun_abi::{
    Capabilities, Device, Error as AbiError, ErrorCode, Hint, Host, Precision, Provide, default_threads,
};
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

impl PrecisionChoice {
    /// The precision on a device of a provider.
    ///
    /// # Errors
    /// `Unimplemented` if it offers none below fp32 and that was asked for.
    pub fn on(self, provider: &str, offered: &Capabilities, device: &Device) -> Result<Precision> {
        match self {
            PrecisionChoice::Fixed(precision) => Ok(precision),
            PrecisionChoice::BestLow => {
                let low = offered.precisions.iter().copied().find(|precision| *precision != Precision::Fp32);
                low.ok_or_else(|| Error::Provider {
                    provider: provider.into(),
                    error: AbiError::unsupported(format!(
                        "offers no precision below fp32 on {}",
                        device.name
                    )),
                })
            }
        }
    }
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
    /// Cases of an earlier report on this machine. Those of the same model, inputs, precision, threads and systems are taken from it
    /// instead of being measured again.
    pub earlier: Vec<CaseReport>,
}

impl BenchOptions {
    /// The earlier case with this name, precision, inputs and systems, and with the same threads.
    fn earlier(
        &self,
        name: &str,
        precision: PrecisionChoice,
        inputs_sha256: &str,
        systems: &[(String, Kind)],
    ) -> Option<&CaseReport> {
        let precision = precision.to_string();
        self.earlier.iter().find(|case| {
            (&*case.model, &*case.precision, &*case.inputs_sha256) == (name, &*precision, inputs_sha256)
                && case.threads == self.threads
                && case
                    .rows
                    .iter()
                    .map(|row| (&row.system, row.kind))
                    .eq(systems.iter().map(|(n, k)| (n, *k)))
        })
    }
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
            earlier: Vec::new(),
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
    let mut watch = Watch::new(options.threads.unwrap_or_else(default_threads));
    for case in cases {
        let graph = case.model.bound(&case.shapes)?;
        let inputs = crate::inputs::seeded(case.model, &graph, options.seed)?;
        let topology = graph.topology_hash();
        let isolation = Isolation::worker(limits(options.time_limit));
        let mut systems = Systems {
            registry,
            providers: &providers,
            case,
            graph: &graph,
            inputs: &inputs,
            options,
            isolation: &isolation,
            host,
            files: None,
        };
        let inputs_sha256 = crate::inputs::sha256(&inputs);
        let (name, asked) = (case.model.name(), systems.systems());
        if let Some(done) = options.earlier(name, case.precision, &inputs_sha256, &asked) {
            listen(Event::Done(done));
            report.cases.push(done.clone());
            continue;
        }
        let computed = (topology.clone(), case.weights.map(std::ptr::from_ref));
        if !references.iter().any(|(known, _)| *known == computed)
            && let Some(outputs) = reference_outputs(registry, case, &inputs, options, &isolation, host)
        {
            references.push((computed.clone(), outputs));
        }
        go_on(host)?;
        let reference = references.iter().find(|(known, _)| *known == computed).map(|(_, outputs)| outputs);
        let (rows, heats) =
            in_turns((name, case.precision), reference, &mut systems, options, &mut watch, host, listen)?;
        let done = CaseReport {
            model: name.to_string(),
            topology,
            model_topology: case.model.graph().topology_hash(),
            precision: case.precision.to_string(),
            threads: options.threads,
            shapes: inputs.iter().map(|(name, t)| (name.clone(), t.shape().to_vec())).collect(),
            inputs_sha256,
            reference: registry.reference().map(|p| p.id.clone()),
            steps: None,
            heats,
            rows,
        };
        listen(Event::Done(&done));
        report.cases.push(done);
    }
    Ok(report)
}

/// A case that is not a model, such as a whole picture.
pub struct Title<'a> {
    /// What the report calls it.
    pub name: &'a str,
    /// Arithmetic.
    pub precision: PrecisionChoice,
    /// Provider whose fp32 outputs are the reference, and these outputs.
    pub reference: Option<(&'a str, &'a Tensors)>,
    /// Steps of a run, if it has steps.
    pub steps: Option<usize>,
}

/// Lets systems run a case in turns that is not a model. `listen` gets the finished case, too.
///
/// # Errors
/// `Cancelled` if `host` cancels. A failure of a system is reported in its row.
pub fn race<'a>(
    title: &Title<'a>,
    field: &mut dyn Field<'a>,
    options: &'a BenchOptions,
    host: &'a dyn Host,
    listen: &mut dyn FnMut(Event<'_>),
) -> Result<CaseReport> {
    if let Some(done) = options.earlier(title.name, title.precision, "", &field.systems()) {
        listen(Event::Done(done));
        return Ok(done.clone());
    }
    let mut watch = Watch::new(options.threads.unwrap_or_else(default_threads));
    let reference = title.reference.map(|(_, outputs)| outputs);
    let case = (title.name, title.precision);
    let (rows, heats) = in_turns(case, reference, field, options, &mut watch, host, listen)?;
    let done = CaseReport {
        model: title.name.into(),
        topology: String::new(),
        model_topology: String::new(),
        precision: title.precision.to_string(),
        threads: options.threads,
        shapes: BTreeMap::new(),
        inputs_sha256: String::new(),
        reference: title.reference.map(|(provider, _)| provider.into()),
        steps: title.steps,
        heats,
        rows,
    };
    listen(Event::Done(&done));
    Ok(done)
}

/// Runs a case. Returns the rows, ranked, and the number of heats.
fn in_turns<'a>(
    (model, precision): (&'a str, PrecisionChoice),
    reference: Option<&'a Tensors>,
    field: &mut dyn Field<'a>,
    options: &'a BenchOptions,
    watch: &mut Watch,
    host: &'a dyn Host,
    listen: &mut dyn FnMut(Event<'_>),
) -> Result<(Vec<Row>, usize)> {
    let (rows, racers) = (Vec::new(), Vec::new());
    let mut race = Race { model, precision, reference, options, host, rows, racers, heats: 0 };
    race.run(field, watch, listen)?;
    report::rank(&mut race.rows);
    Ok((race.rows, race.heats))
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

/// How long a call may go on after the benchmark was cancelled. Then its worker is killed, which nobody needs any more.
const CANCEL_LIMIT: Duration = Duration::from_millis(400);

/// The limits of a worker in a benchmark.
pub fn limits(each: Duration) -> Limits {
    let init = Some(each.min(Duration::from_secs(60)));
    Limits { init, cancel: Some(CANCEL_LIMIT), ..Limits::all(each) }
}

/// A model of a suite.
pub struct Member {
    /// Name of the built-in model.
    pub model: &'static str,
    /// Inputs whose shapes differ from the model's own.
    pub shapes: &'static [(&'static str, &'static [usize])],
}

const fn whole(model: &'static str) -> Member {
    Member { model, shapes: &[] }
}

/// The suite of two minutes.
pub const QUICK: &[Member] = &[whole("mobilenet-v2"), whole("sd15/vae-decoder"), whole("sd15/text-encoder")];

/// The suite of all kinds of networks that diffusion models have, for pictures of 256 pixels: some compilers need minutes for a run of
/// larger ones on a processor. Those of Flux and T5 have all the width and few of the layers, so that they fit into most memories.
pub const FULL: &[Member] = &[
    whole("mobilenet-v2"),
    Member { model: "sd15/vae-decoder", shapes: &[("latent_sample", &[1, 4, 32, 32])] },
    whole("sd15/text-encoder"),
    Member { model: "sd15/unet", shapes: &[("sample", &[1, 4, 32, 32])] },
    Member {
        model: "sd15/controlnet",
        shapes: &[("sample", &[1, 4, 32, 32]), ("controlnet_cond", &[1, 3, 256, 256])],
    },
    Member { model: "sdxl/unet", shapes: &[("sample", &[1, 4, 32, 32])] },
    Member { model: "sd35/medium", shapes: &[("hidden_states", &[1, 16, 32, 32])] },
    Member {
        model: "flux/dev-2x2-layers",
        shapes: &[("hidden_states", &[1, 256, 64]), ("img_ids", &[256, 3])],
    },
    whole("t5-xxl-2-layers"),
];
