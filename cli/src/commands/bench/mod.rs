//! `sdrun bench`

mod compare;
mod export;
mod pictures;
mod plan;
mod table;
mod tune;

use crate::{
    commands::baseline,
    complete,
    context::Context,
    exit, files,
    model::ModelArgs,
    parse::{KeyValue, duration, size},
    weights::{self, WeightArgs},
};
use clap::{ArgAction, ValueEnum};
use export::Format;
use plan::Plan;
use sdrun::{
    Measurements, Observer, Registry, WeightFiles, WeightReport,
    abi::Precision,
    bench::{self, BenchOptions, CaseReport, Event, PrecisionChoice, Report, Status},
};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroUsize,
    path::PathBuf,
    process::ExitCode,
    str::FromStr,
    time::Duration,
};

/// Measure a model on every provider: build, load, speed, memory and accuracy in one table
///
/// All providers are loaded, each in its own process, and run in turns, so that a slow phase of the machine hits all alike. The table
/// says how much longer than the fastest one each takes, with a 95 % interval: 1.02 ± 0.05 is a draw. Turns during which other work ran
/// are repeated. The statistics leave out the first run and the warm-up. Outputs are compared with those of the reference provider in
/// fp32. A provider with wrong outputs is shown but not ranked. A provider that is missing, does not support the model, fails, crashes
/// or exceeds its time limit gets a row with the reason. --baseline measures other software beside them.
///
/// Without a model, measures a suite of built-in models, in fp32 and in each provider's best low precision. sdrun remembers the times:
/// commands without --provider use the fastest one. The exit code is 1 if no provider gave correct results.
///
/// Example: sdrun bench --suite quick --export html,json
///
/// Example: sdrun bench sd15/unet sd15/vae-decoder -p acme -p other --precision low --threads 8
///
/// Example: sdrun bench compare before.json after.json --fail-if-slower 5%
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    /// .onnx files or names of built-in models [default: a suite]
    #[arg(value_name = "MODEL", add = complete::models())]
    models: Vec<String>,

    /// Built-in models to measure: `quick` (classifier, VAE decoder, text encoder; about two minutes for each precision) or `full`
    /// (also UNets, ControlNet, transformers), or `pipeline`: whole pictures of the demo model, or of the checkpoint in --weights
    /// [default: quick]
    #[arg(long, conflicts_with = "models")]
    suite: Option<Suite>,

    /// Steps of each picture of the suite `pipeline` [default: depends on the model's family]
    #[arg(long, value_name = "N")]
    steps: Option<NonZeroUsize>,

    /// Measure this provider (repeatable) [default: all usable ones]
    #[arg(short, long = "provider", value_name = "ID", conflicts_with = "all_providers", add = complete::providers())]
    providers: Vec<String>,

    /// Measure all usable providers, the default without --provider
    #[arg(long)]
    all_providers: bool,

    /// Also measure other software that does the same; `all` for every one (repeatable). `sdrun baseline list` names them
    #[arg(long = "baseline", value_name = "NAME", value_delimiter = ',', add = complete::baselines())]
    baselines: Vec<String>,

    /// Device to use: an id, an index or part of a name
    #[arg(long, value_name = "DEVICE", add = complete::devices())]
    device: Option<String>,

    /// fp32, fp16, bf16, q8_0, q4_k, or low: each provider's best below fp32 (repeatable) [default: fp32; for the suite: fp32 and low]
    #[arg(long = "precision", value_name = "PRECISION", action = ArgAction::Append)]
    precisions: Vec<PrecisionArg>,

    /// Store the weights in the engines
    #[arg(long, conflicts_with_all = ["weights", "loras", "embeddings"])]
    bake: bool,

    /// Limit of device memory for weights, such as 6GB; weights beyond it stay in main memory and are copied in every run
    #[arg(long, value_name = "SIZE", value_parser = size)]
    vram_budget: Option<u64>,

    /// Provider-specific option (repeatable); PROVIDER is needed only if several are measured
    #[arg(long = "option", value_name = "[PROVIDER:]KEY=VALUE")]
    options: Vec<KeyValue>,

    /// Number of threads on CPU devices; several, such as 1,2,4,8, show how each system gains from more [default: all cores]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    threads: Vec<NonZeroUsize>,

    /// Measure at least this many runs (never fewer than 3)
    #[arg(long, value_name = "N", default_value = "10")]
    min_runs: NonZeroUsize,

    /// Run each system for at least this long
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = duration)]
    min_time: Duration,

    /// Stop running a system after this long, even with fewer runs [default: 60s; 10s for the quick suite]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    max_time: Option<Duration>,

    /// Warm-up runs after the first run, which are not counted
    #[arg(long, value_name = "N", default_value = "1")]
    warmup: usize,

    /// Limit for each call into a provider (a build, a load, a run); a provider that exceeds it is killed
    #[arg(long, value_name = "TIME", default_value = "10min", value_parser = duration)]
    time_limit: Duration,

    /// Seed of the inputs
    #[arg(long, value_name = "N", default_value = "0")]
    seed: u64,

    /// Write the report to files: html (a page with plots), json (every single time), csv (one line for each row), md (the tables)
    #[arg(long, value_name = "FORMATS", value_delimiter = ',')]
    export: Vec<Format>,

    /// Where to write them; each file gets its format's ending
    #[arg(long, value_name = "PATH", default_value = "sdrun-bench", requires = "export")]
    export_to: PathBuf,

    /// Go on with the report in --export-to: take the cases that its JSON file has from there, and measure the others
    #[arg(long = "continue", requires = "export")]
    goes_on: bool,

    /// Do not keep the measurements for the choice of providers
    #[arg(long)]
    no_save: bool,

    #[command(flatten)]
    weights: WeightArgs,
    #[command(flatten)]
    shapes: ModelArgs,
}

pub(crate) use tune::{Args as TuneArgs, run as tune};

#[derive(clap::Subcommand)]
enum Command {
    Compare(compare::Args),
}

/// A set of built-in models.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Suite {
    Quick,
    Full,
    Pipeline,
}

/// A precision, or `low`.
#[derive(Clone, Copy)]
struct PrecisionArg(PrecisionChoice);

impl FromStr for PrecisionArg {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "low" {
            return Ok(PrecisionArg(PrecisionChoice::BestLow));
        }
        let unknown = |why| format!("{why}, or low");
        text.parse::<Precision>().map(|p| PrecisionArg(PrecisionChoice::Fixed(p))).map_err(unknown)
    }
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    if let Some(Command::Compare(args)) = &args.command {
        return compare::run(args, context);
    }
    let targets: Vec<(Format, PathBuf)> =
        args.export.iter().map(|format| (*format, format.file(&args.export_to))).collect();
    for (_, path) in &targets {
        files::check_target(path)?;
    }
    let registry = context.registry()?;
    // Report an unknown name before generating models.
    for id in &args.providers {
        registry.entry(id)?;
    }
    let mut options = options(args, &registry, context)?;
    if args.goes_on {
        options.earlier = earlier(&targets)?;
    }
    let files = args.weights.files(args.shapes.allow_links);
    let precisions: Vec<PrecisionChoice> = args.precisions.iter().map(|p| p.0).collect();
    let suite = args.suite.unwrap_or(Suite::Quick);
    let pictures = match suite {
        Suite::Pipeline => {
            Some(pictures::open(&files, &args.shapes, args.steps, &options, &registry, context)?)
        }
        _ if args.steps.is_some() => {
            let error = sdrun::abi::Error::invalid("only whole pictures have steps");
            return Err(error.with_hint("leave out --steps, or add --suite pipeline").into());
        }
        _ => None,
    };
    // Whole pictures take the weights themselves.
    let of_network = if pictures.is_some() { WeightFiles::default() } else { files.clone() };
    let plan = plan::plan(&args.models, suite, &precisions, &args.shapes, &of_network, context)?;
    let weights = match (&*plan, of_network.is_given()) {
        ([Plan { model, .. }], true) => Some(weights::of_model(&files, model, context)?),
        _ => None,
    };
    let cases = Plan::cases(&plan, weights.as_ref().map(|weights| &weights.stack));
    let mut task = None;
    context.saves_when_cancelled();
    let host = Observer::new(|_, _, _| {}, context.cancel_flag());
    let mut so_far = Report::new();
    let mut faults: BTreeMap<&PathBuf, anyhow::Error> = BTreeMap::new();
    let mut title = String::new();
    let mut listen = |event: Event<'_>| match event {
        Event::Start { model, precision, system } => {
            title = format!("{model} {precision}");
            task = Some(context.task(&format!("{title}: {system}")));
        }
        Event::Phase(phase) => {
            if let Some(task) = &task {
                task.step(phase, 0, 0);
            }
        }
        Event::Runs => task = Some(context.task(&format!("{title}: all in turns"))),
        Event::Done(case) => {
            task = None;
            so_far.cases.push(case.clone());
            // What is finished survives whatever comes.
            for (format, path) in &targets {
                match format.write(path, &so_far) {
                    Ok(()) => drop(faults.remove(path)),
                    Err(error) => drop(faults.insert(path, error)),
                }
            }
        }
    };
    let report = by_threads(args, &mut options, |options| match &pictures {
        Some(pictures) => pictures.draw(&precisions, &registry, options, &host, &mut listen),
        None => bench::run(&registry, &cases, options, &host, &mut listen),
    });
    if report.is_err() && !so_far.cases.is_empty() && !targets.is_empty() {
        context.note(&format!("{} finished cases are in the exported files", so_far.cases.len()));
    }
    // Of a benchmark that was cancelled, the finished cases.
    let finished = report.as_ref().unwrap_or(&so_far);
    let saved = if args.changes_nothing() { Measurements::add(registry.paths(), finished) } else { Ok(0) };
    let report = report?;
    context.go_on()?;
    let shown = Shown { report: &report, weights: weights.as_ref().map(sdrun::Weights::report) };
    context.present(&shown, |out| {
        table::show(out, &report, table::width())?;
        if let Some(weights) = &shown.weights {
            weights::show(weights, out, "")?;
        }
        for entry in registry.entries().iter().filter(|e| e.skipped.is_some()) {
            writeln!(out, "skipped {}: {}", entry.id, entry.skipped.as_deref().unwrap_or_default())?;
        }
        for (_, path) in targets.iter().filter(|(_, path)| !faults.contains_key(path)) {
            writeln!(out, "wrote {}", path.display())?;
        }
        Ok(())
    })?;
    if let Some((_, fault)) = faults.pop_first() {
        return Err(fault);
    }
    saved?;
    let any = report
        .cases
        .iter()
        .flat_map(|c| &c.rows)
        .any(|r| matches!(r.status, Status::Ok | Status::Unverified));
    Ok(ExitCode::from(if any { 0 } else { exit::NO }))
}

/// Measures with each number of threads in turn. Returns one report of all cases.
fn by_threads(
    args: &Args,
    options: &mut BenchOptions,
    mut measure: impl FnMut(&BenchOptions) -> sdrun::Result<Report>,
) -> sdrun::Result<Report> {
    let counts: BTreeSet<usize> = args.threads.iter().map(|count| count.get()).collect();
    if counts.is_empty() {
        return measure(options);
    }
    let mut report = Report::new();
    for count in counts {
        options.threads = Some(count);
        report.cases.extend(measure(options)?.cases);
    }
    Ok(report)
}

impl Args {
    /// Whether the figures are those of ordinary use, so that the choice of providers may rest on them.
    fn changes_nothing(&self) -> bool {
        !self.no_save
            && !self.bake
            && self.vram_budget.is_none()
            && self.threads.is_empty()
            && self.options.is_empty()
    }
}

#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    report: &'a bench::Report,
    /// The weights from --weights and --lora.
    #[serde(skip_serializing_if = "Option::is_none")]
    weights: Option<WeightReport>,
}

fn options(args: &Args, registry: &Registry, context: &Context) -> anyhow::Result<BenchOptions> {
    let mut options: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    for KeyValue { key, value } in &args.options {
        let (provider, key) = match (key.split_once(':'), &*args.providers) {
            (Some((provider, key)), _) => (provider, key),
            (None, [provider]) => (provider.as_str(), key.as_str()),
            (None, _) => {
                let message = format!("--option {key}={value} does not say which provider it is for");
                return Err(sdrun::abi::Error::invalid(message)
                    .with_hint(format!("write --option PROVIDER:{key}={value}"))
                    .into());
            }
        };
        options.entry(provider.into()).or_default().insert(key.into(), value.clone());
    }
    let is_quick = args.models.is_empty() && !matches!(args.suite, Some(Suite::Full | Suite::Pipeline));
    Ok(BenchOptions {
        providers: args.providers.clone(),
        baselines: baseline::chosen(&args.baselines, args.suite == Some(Suite::Pipeline), registry.paths())?,
        device: args.device.clone(),
        threads: context.config.threads.map(NonZeroUsize::get),
        min_runs: args.min_runs.get(),
        min_time: args.min_time,
        max_time: args.max_time.unwrap_or(Duration::from_secs(if is_quick { 10 } else { 60 })),
        warmup: args.warmup,
        time_limit: args.time_limit,
        seed: args.seed,
        options,
        bake: args.bake,
        vram_budget: args.vram_budget,
        earlier: Vec::new(),
    })
}

/// The cases of the report that a benchmark goes on with; none if it was not begun.
fn earlier(targets: &[(Format, PathBuf)]) -> Result<Vec<CaseReport>, sdrun::abi::Error> {
    let Some((_, path)) = targets.iter().find(|(format, _)| *format == Format::Json) else {
        return Err(sdrun::abi::Error::invalid(
            "--continue reads the JSON file of a report, and none is written",
        )
        .with_hint("add json to --export"));
    };
    if !path.exists() {
        return Ok(Vec::new());
    }
    let report = compare::read(path)?;
    sdrun::files::forget_input(path);
    match compare::differences(&report, &Report::new()).first() {
        None => Ok(report.cases),
        Some(difference) => {
            let message = format!("cannot go on with {}: this is {difference}", path.display());
            Err(sdrun::abi::Error::invalid(message).with_hint("leave out --continue to measure all again"))
        }
    }
}
