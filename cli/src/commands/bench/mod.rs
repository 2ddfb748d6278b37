//! `sdrun bench`

mod export;
mod table;

use crate::{
    complete,
    context::Context,
    exit, files,
    model::{self, ModelArgs},
    parse::{KeyValue, duration, size},
    weights::{self, WeightArgs},
};
use clap::ArgAction;
use sdrun::{
    Model, Observer, Shapes, WeightFiles, WeightReport,
    abi::Precision,
    bench::{self, BenchOptions, Case, Event, PrecisionChoice, Status},
    graph::OpenOptions,
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
/// Each provider runs in its own worker process, one run after the other, at batch size 1 unless --shape says otherwise. The
/// statistics leave out the first run and the warm-up. Outputs are compared with those of the reference provider in fp32. A
/// provider with wrong outputs is shown but not ranked. A provider that is missing, does not support the model, fails, crashes
/// or exceeds its time limit gets a row with the reason.
///
/// Without a model, measures the built-in suite: MobileNet v2 at 224x224 and the SD 1.5 VAE decoder at 512x512, in fp32 and in
/// each provider's best low precision. The exit code is 1 if no provider gave correct results.
///
/// Example: sdrun bench --markdown table.md --json=report.json
///
/// Example: sdrun bench sd15/unet sd15/vae-decoder -p openvino -p ggml --precision low --threads 8
#[derive(clap::Args)]
pub(crate) struct Args {
    /// .onnx files or names of built-in models [default: the built-in suite]
    #[arg(value_name = "MODEL", add = complete::models())]
    models: Vec<String>,

    /// Measure this provider (repeatable) [default: all usable ones]
    #[arg(short, long = "provider", value_name = "ID", conflicts_with = "all_providers", add = complete::providers())]
    providers: Vec<String>,

    /// Measure all usable providers, the default without --provider
    #[arg(long)]
    all_providers: bool,

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

    /// Number of threads on CPU devices [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,

    /// Measure at least this many runs (never fewer than 3)
    #[arg(long, value_name = "N", default_value = "10")]
    min_runs: NonZeroUsize,

    /// Measure for at least this long
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = duration)]
    min_time: Duration,

    /// Stop after this long, even with fewer runs
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    max_time: Duration,

    /// Warm-up runs after the first run, which are not counted
    #[arg(long, value_name = "N", default_value = "1")]
    warmup: usize,

    /// Limit for each call into a provider (a build, a load, a run); a provider that exceeds it is killed
    #[arg(long, value_name = "TIME", default_value = "10min", value_parser = duration)]
    time_limit: Duration,

    /// Seed of the inputs
    #[arg(long, value_name = "N", default_value = "0")]
    seed: u64,

    /// Write one line per row to a CSV file
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,

    /// Write the tables to a Markdown file
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,

    #[command(flatten)]
    weights: WeightArgs,
    #[command(flatten)]
    shapes: ModelArgs,
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
    for path in [&args.csv, &args.markdown].into_iter().flatten() {
        files::check_target(path)?;
    }
    let registry = context.registry()?;
    // Report an unknown name before generating models.
    for id in &args.providers {
        registry.entry(id)?;
    }
    let options = options(args, context)?;
    let files = args.weights.files(args.shapes.allow_links);
    let plan = plan(args, &files, context)?;
    let weights = match (&*plan, files.is_given()) {
        ([Plan { model, .. }], true) => Some(weights::of_model(&files, model, context)?),
        _ => None,
    };
    let mut cases = Vec::new();
    for Plan { model, shapes, precisions } in &plan {
        let weights = weights.as_ref().map(|weights| &weights.stack);
        cases.extend(precisions.iter().map(|p| Case {
            model,
            shapes: shapes.clone(),
            precision: *p,
            weights,
        }));
    }
    let mut task = None;
    let host = Observer::new(|_, _, _| {}, context.cancel_flag());
    let report = bench::run(&registry, &cases, &options, &host, &mut |event| match event {
        Event::Start { model, precision, provider } => {
            task = Some(context.task(&format!("{model} {precision}: {provider}")));
        }
        Event::Phase(phase) => {
            if let Some(task) = &task {
                task.step(phase, 0, 0);
            }
        }
        Event::Done(_) => task = None,
    })?;
    context.go_on()?;
    if let Some(path) = &args.csv {
        files::write(path, |out| export::csv(out, &report))?;
    }
    if let Some(path) = &args.markdown {
        files::write(path, |out| out.write_all(export::markdown(&report).as_bytes()))?;
    }
    let shown = Shown { report: &report, weights: weights.as_ref().map(sdrun::Weights::report) };
    context.present(&shown, |out| {
        table::show(out, &report)?;
        if let Some(weights) = &shown.weights {
            weights::show(weights, out, "")?;
        }
        for entry in registry.entries().iter().filter(|e| e.skipped.is_some()) {
            writeln!(out, "skipped {}: {}", entry.id, entry.skipped.as_deref().unwrap_or_default())?;
        }
        Ok(())
    })?;
    let any = report
        .cases
        .iter()
        .flat_map(|c| &c.rows)
        .any(|r| matches!(r.status, Status::Ok | Status::Unverified));
    Ok(ExitCode::from(if any { 0 } else { exit::NO }))
}

#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    report: &'a bench::Report,
    /// The weights from --weights and --lora.
    #[serde(skip_serializing_if = "Option::is_none")]
    weights: Option<WeightReport>,
}

/// A model, its shapes, and the precisions to measure it in.
struct Plan {
    model: Model,
    shapes: Shapes,
    precisions: Vec<PrecisionChoice>,
}

fn plan(args: &Args, files: &WeightFiles, context: &Context) -> anyhow::Result<Vec<Plan>> {
    let asked: Vec<PrecisionChoice> = args.precisions.iter().map(|p| p.0).collect();
    let or = |default: &[PrecisionChoice]| if asked.is_empty() { default.to_vec() } else { asked.clone() };
    let given = args.shapes.shapes()?;
    let invalid = |message: &str, hint: &str| Err(sdrun::abi::Error::invalid(message).with_hint(hint).into());
    match &*args.models {
        [] if !given.is_empty() => {
            invalid("--shape applies to a model, but none is named", "`sdrun bench MODEL --shape …`")
        }
        [] if files.is_given() => invalid(
            "--weights, --lora and --embedding belong to a model, and none is named",
            "`sdrun bench MODEL --weights …`",
        ),
        [_, _, ..] if files.is_given() => invalid(
            "--weights, --lora and --embedding belong to one model, and several are named",
            "run `sdrun bench` once for each model",
        ),
        [] => bench::SUITE
            .iter()
            .map(|(name, precisions)| {
                let model = model::open_model(name, &OpenOptions::default(), context)?;
                Ok(Plan { model, shapes: Shapes::new(), precisions: or(precisions) })
            })
            .collect(),
        models => {
            let mut unused: BTreeSet<&String> = given.keys().collect();
            let mut plans = Vec::new();
            for what in models {
                let model = args.shapes.open(what, files.policy(), context)?;
                // Each model takes the shapes of the inputs it has; one alone takes all, so that a wrong name is its error.
                let inputs: Vec<String> = model.inputs().into_iter().map(|(spec, _)| spec.name).collect();
                let mut own = given.clone();
                own.retain(|name, _| models.len() == 1 || inputs.contains(name));
                unused.retain(|name| !own.contains_key(*name));
                let precisions = or(&[PrecisionChoice::Fixed(Precision::Fp32)]);
                plans.push(Plan { model, shapes: own, precisions });
            }
            match unused.first() {
                None => Ok(plans),
                Some(name) => invalid(
                    &format!("--shape names {name:?}, which is not an input of any of the models"),
                    "`sdrun inspect MODEL` lists the inputs",
                ),
            }
        }
    }
}

fn options(args: &Args, context: &Context) -> anyhow::Result<BenchOptions> {
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
    Ok(BenchOptions {
        providers: args.providers.clone(),
        device: args.device.clone(),
        threads: args.threads.or(context.config.threads).map(NonZeroUsize::get),
        min_runs: args.min_runs.get(),
        min_time: args.min_time,
        max_time: args.max_time,
        warmup: args.warmup,
        time_limit: args.time_limit,
        seed: args.seed,
        options,
        bake: args.bake,
        vram_budget: args.vram_budget,
    })
}
