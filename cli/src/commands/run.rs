//! `sdrun run`

use crate::{
    build::{self, BuildArgs},
    commands::inspect::is_engine,
    complete,
    context::Context,
    format, job,
    model::ModelArgs,
    provider::{Job, ProviderArgs},
    tensors::{InputArgs, OutputArgs, Summary},
    weights::{self, WeightArgs},
};
use sdrun::{
    BuildOptions, Engine, EngineFile, Model, Session, Shapes, Tensors, WeightReport, Weights,
    abi::{Device, Error, Hint, NoWeights, Precision, RuntimeInfo, TensorSpec, WeightSource},
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
/// For a model, builds the engine first or takes it from the cache. --shape sets the model's open dimensions; the shapes of
/// input files set the others. NumPy files hold tensors unchanged (bf16 as f32); a picture (PNG, JPEG, WebP) is a tensor [1, 3, height, width].
///
/// Example: sdrun run taef2/encoder --input image=photo.png -o latent.npz
///
/// Example: sdrun run unet.sdengine --weights dreamshaper.safetensors --lora style.safetensors:0.8 --input all.npz
#[derive(clap::Args)]
pub(crate) struct Args {
    /// An .onnx file, the name of a built-in model, or an .sdengine file
    #[arg(value_name = "MODEL|ENGINE", add = complete::models())]
    what: String,

    /// Fail if the cache has no engine, instead of building one
    #[arg(long, conflicts_with_all = ["rebuild", "no_cache"])]
    no_build: bool,

    /// Run the provider in a worker process even if it needs no vendor's runtime; those that do always run in one, so that a crash in it
    /// becomes an error
    #[arg(long)]
    isolate: bool,

    /// Accept NaN and infinity in outputs instead of failing
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
    /// Time to load the weights.
    session_seconds: f64,
    /// Absent if they are baked in.
    weights: Option<WeightReport>,
    run_ms: f64,
    outputs: Vec<Summary>,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    context.limit(args.provider.time_limit);
    if is_engine(Path::new(&args.what)) { run_engine(args, context) } else { run_model(args, context) }
}

fn run_model(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let files = args.weights.files(args.model.allow_links);
    let job = job::prepare(&args.what, &args.model, &args.inputs, files.policy(), context)?;
    args.outputs.check(&job.output_names(), &args.inputs)?;
    let weights = weights::of_model(&files, &job.model, context)?;
    let options = |device: Device| -> BuildOptions {
        let options = args.build.options(device, args.no_build, context);
        options.threads(args.provider.threads(context)).shapes(job.shapes.clone())
    };
    let need = Job { model: &job.model, options: &options, isolate: args.isolate, absent_devices: false };
    // Some runtimes tell only when the session is made that they do not support the model.
    let (engine, session) = args.provider.attempt(&need, context, |provider, options| {
        let engine = build::build(provider, &job.model, Some(&weights), &options, context)?;
        let session = session(&engine, Some(&weights), context)?;
        Ok((engine, session))
    })?;
    finish(args, context, &engine, session, Some(&weights), &job.inputs)
}

/// Gives an engine its weights. One that has them baked in is given none.
fn session(engine: &Engine, weights: Option<&Weights>, context: &Context) -> sdrun::Result<Session> {
    let task = context.task("giving it weights");
    let source: &dyn WeightSource = match weights {
        Some(weights) if !engine.info().weights.is_empty() => &weights.stack,
        _ => &NoWeights,
    };
    engine.session(source, &task.host(context.cancel_flag()))
}

fn run_engine(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let path = Path::new(&args.what);
    let file = EngineFile::open(path)?;
    let manifest = &file.manifest;
    args.provider.check_engine(path, manifest)?;
    args.build.check_engine(manifest)?;
    let given = args.model.shapes()?;
    if !given.is_empty() && !manifest.info.inputs.iter().any(TensorSpec::is_open) {
        return Err(Error::invalid("the shapes of this engine are fixed")
            .with_hint("leave out `--shape`, or run the model instead of the engine")
            .into());
    }
    let files = args.weights.files(args.model.allow_links);
    let weights = weights::of_engine(&files, manifest, context)?;
    match (manifest.info.weights.is_empty(), &weights) {
        (false, None) => {
            let model = format!("it was built from {}", manifest.model);
            return Err(Error::not_found(format!("{} holds no weights, and none are given", path.display()))
                .with_hint(Hint::GiveWeights.with_note(model))
                .into());
        }
        (true, _) if files.is_given() => {
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
    let missing = args.inputs.missing(&manifest.info.inputs, &inputs, model)?;
    if !missing.is_empty() {
        let model = model.ok_or_else(|| {
            Error::invalid(format!("these inputs are missing: {}", format::list(&missing))).with_hint(
                "give each with `--input NAME=FILE`; sdrun can generate them only with `--weights MODEL`",
            )
        })?;
        let shape = |s: &TensorSpec| Some((s.name.clone(), s.shape.iter().copied().collect::<Option<_>>()?));
        let mut shapes: Shapes = manifest.info.inputs.iter().filter_map(shape).collect();
        shapes.extend(inputs.iter().map(|(name, tensor)| (name.clone(), tensor.shape().to_vec())));
        shapes.extend(given);
        job::fill(model, &model.bound(&shapes)?, &mut inputs, args.inputs.seed)?;
    }
    let names: Vec<String> = manifest.info.outputs.iter().map(|s| s.name.clone()).collect();
    args.outputs.check(&names, &args.inputs)?;

    let engine = args.provider.load(path, &file, args.isolate, context)?;
    let session = session(&engine, weights.as_ref(), context)?;
    finish(args, context, &engine, session, weights.as_ref(), &inputs)
}

/// From a session to files and a report.
fn finish(
    args: &Args,
    context: &Context,
    engine: &Engine,
    mut session: Session,
    weights: Option<&Weights>,
    inputs: &Tensors,
) -> anyhow::Result<ExitCode> {
    context.go_on()?;
    let task = context.task("running");
    let host = task.host(context.cancel_flag());
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
        device: engine.device().clone(),
        precision: manifest.spec.precision,
        cached: engine.was_loaded(),
        engine_seconds: engine.seconds(),
        session_seconds: session.seconds(),
        weights: weights.map(Weights::report),
        run_ms,
        outputs: outputs.iter().map(|(name, tensor)| Summary::of(name, tensor)).collect(),
    };
    context.present(&report, |out| {
        writeln!(out, "{}", build::describe(engine))?;
        if let Some(weights) = &report.weights {
            let own = if is_engine(Path::new(&args.what)) { "" } else { &report.model };
            weights::show(weights, out, own)?;
        }
        show(out, &report)
    })?;
    Ok(ExitCode::SUCCESS)
}

fn show(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let (session, run) = (format::seconds(report.session_seconds), format::seconds(report.run_ms / 1e3));
    writeln!(out, "  weights loaded in {session}, ran in {run} (first run)")?;
    let mut table = format::table(["output", "type", "shape", "min", "max", "mean", "stddev", "NaN, inf"]);
    for s in &report.outputs {
        let number = |v: Option<f64>| v.map_or("-".into(), |v| format!("{v:.5}"));
        table.add_row([
            format::line(&s.name).into_owned(),
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
