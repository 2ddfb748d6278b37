//! `sdrun run`

use crate::{
    commands::inspect::is_engine,
    complete,
    context::Context,
    format, job,
    model::{self, BuildArgs, ModelArgs, ProviderArgs},
    tensors::{self, InputArgs, OutputArgs, Summary},
    weights::{WeightArgs, WeightReport, Weights},
};
use sdrun::{
    BuildOptions, Engine, EngineFile, Model, Shapes, Tensors,
    abi::{Device, Error, Precision, RuntimeInfo, TensorSpec},
};
use serde::Serialize;
use std::{
    io::{self, Write},
    path::Path,
    process::ExitCode,
    time::Instant,
};

/// Run a model or an engine once
///
/// A model is built first, or its engine taken from the cache. The shapes of input files fix the model's open
/// dimensions, where --shape does not. NumPy files hold tensors as they are (bf16 as f32); a .png file is a tensor
/// [1, 3, height, width].
///
/// Example: sdrun run taef2/encoder --input image=photo.png -o latent.npz
///
/// Example: sdrun run unet.sdengine --weights dreamshaper.safetensors --lora style.safetensors:0.8 --input all.npz
#[derive(clap::Args)]
pub(crate) struct Args {
    /// An .onnx file, the name of a built-in model, or an .sdengine file
    #[arg(value_name = "MODEL|ENGINE", add = complete::models())]
    what: String,

    /// Fail where there is no engine in the cache, instead of building one
    #[arg(long, conflicts_with_all = ["rebuild", "no_cache"])]
    no_build: bool,

    /// Run the provider in a worker process, so that a crash in it becomes an error
    #[arg(long)]
    isolate: bool,

    /// Accept NaN and infinity in outputs; without it, they are an error
    #[arg(long)]
    allow_non_finite: bool,

    #[command(flatten)]
    weights: WeightArgs,
    #[command(flatten)]
    provider: ProviderArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    build: BuildArgs,
    #[command(flatten)]
    inputs: InputArgs,
    #[command(flatten)]
    outputs: OutputArgs,
}

#[derive(Serialize)]
struct Report {
    model: String,
    provider: String,
    runtime: RuntimeInfo,
    device: Device,
    precision: Precision,
    /// Whether the engine was loaded and not built.
    cached: bool,
    engine_seconds: f64,
    /// Giving it its weights.
    session_seconds: f64,
    /// Absent where they are baked in.
    weights: Option<WeightReport>,
    run_ms: f64,
    outputs: Vec<Summary>,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    if is_engine(Path::new(&args.what)) { run_engine(args, context) } else { run_model(args, context) }
}

fn run_model(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let job = job::prepare(&args.what, &args.model, &args.inputs, args.weights.policy(), context)?;
    args.outputs.check(&job.output_names(), &args.inputs)?;
    let names: Vec<&str> = job.model.graph().weights().map(|(name, _)| name).collect();
    let binding = job.model.binding()?;
    let weights = args.weights.open(binding, &names, Some(&job.model), args.model.allow_links, context)?;
    let (provider, device) = args.provider.open(args.isolate, context)?;
    let options = BuildOptions {
        threads: args.provider.threads(context),
        shapes: job.shapes,
        ..BuildOptions::new(device.clone())
    };
    let engine =
        args.build.build(context, &provider, options, &job.model, weights.as_ref(), args.no_build)?;
    finish(args, context, &engine, &device, weights.as_ref(), &job.inputs)
}

fn run_engine(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let path = Path::new(&args.what);
    let manifest = EngineFile::open(path)?.manifest;
    args.provider.check_engine(path, &manifest)?;
    args.build.check_engine(&manifest)?;
    let given = args.model.shapes()?;
    if !given.is_empty() && !manifest.info.inputs.iter().any(TensorSpec::is_open) {
        return Err(Error::invalid("an engine has its shapes already")
            .with_hint("leave out `--shape`, or run the model instead of the engine")
            .into());
    }
    let names: Vec<&str> = manifest.info.weights.iter().map(|w| w.name.as_str()).collect();
    let binding = manifest.binding.clone();
    let weights = args.weights.open(binding, &names, None, args.model.allow_links, context)?;
    match (manifest.info.weights.is_empty(), &weights) {
        (false, None) => {
            return Err(Error::precondition(format!("{} holds no weights", path.display()))
                .with_hint(format!(
                    "it was built from {}: give `--weights` with that or with a checkpoint",
                    manifest.model
                ))
                .into());
        }
        (true, _) if args.weights.is_given() => {
            return Err(Error::invalid(format!(
                "{} has its weights baked in and takes no others",
                path.display()
            ))
            .with_hint("leave out `--weights`, `--lora` and `--embedding`")
            .into());
        }
        _ => {}
    }
    let model = weights.as_ref().and_then(|weights| weights.model.as_deref());
    let mut inputs = args.inputs.read(&manifest.info.inputs, model.and_then(Model::builtin))?;
    tensors::check(&manifest.info.inputs, &inputs)?;
    let missing = args.inputs.missing(&manifest.info.inputs, &inputs, model)?;
    if !missing.is_empty() {
        let model = model.ok_or_else(|| {
            Error::invalid(format!("these inputs are not given: {}", format::list(&missing)))
                .with_hint("give each with `--input NAME=FILE`; they can be made only with `--weights MODEL`")
        })?;
        let shape = |s: &TensorSpec| Some((s.name.clone(), s.shape.iter().copied().collect::<Option<_>>()?));
        let mut shapes: Shapes = manifest.info.inputs.iter().filter_map(shape).collect();
        shapes.extend(inputs.iter().map(|(name, tensor)| (name.clone(), tensor.shape().to_vec())));
        shapes.extend(given);
        job::fill(model, &model.bound(&shapes)?, &mut inputs, args.inputs.seed)?;
    }
    let names: Vec<String> = manifest.info.outputs.iter().map(|s| s.name.clone()).collect();
    args.outputs.check(&names, &args.inputs)?;

    let (engine, device) = args.provider.load(path, &manifest, args.isolate, context)?;
    finish(args, context, &engine, &device, weights.as_ref(), &inputs)
}

/// From an engine to files and a report.
fn finish(
    args: &Args,
    context: &Context,
    engine: &Engine,
    device: &Device,
    weights: Option<&Weights>,
    inputs: &Tensors,
) -> anyhow::Result<ExitCode> {
    context.go_on()?;
    let task = context.task("running");
    let host = task.host(context.cancel_flag());
    // An engine that has its weights baked in is given none.
    let mut session = match weights {
        Some(weights) if !engine.info().weights.is_empty() => engine.session(&weights.stack, &host)?,
        _ => engine.session(&sdrun::weights::InMemoryWeights::default(), &host)?,
    };
    if args.allow_non_finite {
        session = session.allow_non_finite();
    }
    let started = Instant::now();
    let outputs = session.run(inputs, &host)?;
    let run_ms = started.elapsed().as_secs_f64() * 1e3;
    drop(host);
    drop(task);
    context.go_on()?;
    args.outputs.write(&outputs, &args.inputs, context)?;
    let manifest = engine.manifest();
    let report = Report {
        model: manifest.model.clone(),
        provider: manifest.provider.clone(),
        runtime: engine.provider().runtime().clone(),
        device: device.clone(),
        precision: manifest.spec.precision,
        cached: engine.was_loaded(),
        engine_seconds: engine.seconds(),
        session_seconds: session.seconds(),
        weights: weights.map(|weights| args.weights.report(&args.what, &weights.stack)),
        run_ms,
        outputs: outputs.iter().map(|(name, tensor)| Summary::of(name, tensor)).collect(),
    };
    context.present(&report, |out| {
        writeln!(out, "{}", model::describe(engine, device))?;
        if let Some(weights) = &report.weights {
            weights.show(out, &args.what)?;
        }
        show(out, &report)
    })?;
    Ok(ExitCode::SUCCESS)
}

fn show(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let (session, run) = (format::seconds(report.session_seconds), format::seconds(report.run_ms / 1e3));
    writeln!(out, "  weights in after {session}, ran in {run} (first run)")?;
    let mut table = format::table(["output", "type", "shape", "min", "max", "mean", "stddev", "NaN, inf"]);
    for s in &report.outputs {
        let number = |v: Option<f64>| v.map_or("-".into(), |v| format!("{v:.5}"));
        table.add_row([
            s.name.clone(),
            s.dtype.to_string(),
            format!("{:?}", s.shape),
            number(s.min),
            number(s.max),
            number(s.mean),
            number(s.stddev),
            s.not_finite.to_string(),
        ]);
    }
    format::right(&mut table, 3..8);
    writeln!(out, "{table}")
}
