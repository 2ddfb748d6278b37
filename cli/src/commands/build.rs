//! `sdrun build`

use crate::{
    build::{self, BuildArgs},
    complete,
    context::Context,
    files, format,
    model::ModelArgs,
    provider::{Job, ProviderArgs},
    weights::{self, WeightArgs},
};
use sdrun::{
    BuildOptions, EngineManifest, WeightReport,
    abi::{Device, Error},
    check_weights,
    graph::{Graph, WeightsPolicy, passes},
};
use serde::Serialize;
use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Build an engine for a model
///
/// The engine goes into the cache, where `sdrun run` finds it, and with -o into a file too. Without --bake it holds no weights:
/// an engine belongs to a topology and takes any weights of that topology. So the model's weight files may be missing.
///
/// --weights and --lora check that these weights fit. They go into the engine only with --bake.
///
/// Example: sdrun build sd15/unet -p openvino --precision bf16
///
/// Example: sdrun build sd15/unet --weights dreamshaper.safetensors -p openvino
///
/// Example: sdrun build vae/model.onnx --shape latent_sample=1,4,64,64 -o vae.sdengine
///
/// Example: sdrun build taef2/decoder --shape latent=1,32,32,32:1,32,64,64:1,32,64,32 -o decoder.sdengine
#[derive(clap::Args)]
pub(crate) struct Args {
    /// An .onnx file or the name of a built-in model
    #[arg(add = complete::models())]
    model: String,

    /// Also write the engine to this file
    #[arg(short, long, value_name = "FILE.sdengine")]
    output: Option<PathBuf>,

    /// Write the graph as ONNX without weights into this folder: given.onnx, which the provider receives, and merged.onnx, which
    /// results from the passes that fuse nodes
    #[arg(long, value_name = "DIR")]
    dump_graph: Option<PathBuf>,

    /// Run the provider in a worker process even if it needs no vendor's runtime; those that do always run in one, so that a crash in it
    /// becomes an error
    #[arg(long)]
    isolate: bool,

    #[command(flatten)]
    weights: WeightArgs,
    #[command(flatten)]
    provider: ProviderArgs,
    #[command(flatten)]
    shapes: ModelArgs,
    #[command(flatten)]
    build: BuildArgs,
}

/// Writes the graph before and after [`passes::ALL`].
fn dump(bound: &Graph, folder: &Path) -> anyhow::Result<()> {
    let write = |name: &str, graph: &Graph| -> anyhow::Result<()> {
        // Some weights have names that Windows does not accept as file names.
        let bytes = graph.to_onnx_without_weights(|_| "left-out".into()).map_err(sdrun::Error::from)?;
        files::write(&folder.join(name), |out| out.write_all(&bytes))
    };
    if folder.exists() && !folder.is_dir() {
        return Err(Error::invalid(format!("{} is not a folder", folder.display())).with_file(folder).into());
    }
    fs::create_dir_all(folder).map_err(|e| Error::io("make", folder, &e))?;
    write("given.onnx", bound)?;
    let mut merged = bound.clone();
    passes::optimize(&mut merged, passes::ALL).map_err(sdrun::Error::from)?;
    write("merged.onnx", &merged)
}

#[derive(Serialize)]
struct Report<'a> {
    device: &'a Device,
    /// Whether it came from the cache.
    cached: bool,
    seconds: f64,
    file: Option<&'a Path>,
    /// Size of the engine in the file.
    payload_bytes: Option<u64>,
    /// The weights from --weights and --lora.
    weights: Option<WeightReport>,
    #[serde(flatten)]
    manifest: &'a EngineManifest,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    context.limit(args.provider.time_limit);
    if let Some(path) = &args.output {
        files::check_file_target(path)?;
    }
    let files = args.weights.files(args.shapes.allow_links);
    let own = args.build.bake || files.is_changing();
    let policy = if own { files.policy() } else { WeightsPolicy::MayBeAbsent };
    let model = args.shapes.open(&args.model, policy, context)?;
    let (shapes, open_shapes) = args.shapes.shapes_and_lists()?;
    // Errors of the model and its weights come before those of a provider.
    let bound = model.bound_for(&shapes, &open_shapes)?;
    let weights = match files.is_given() {
        true => Some(weights::of_model(&files, &model, context)?),
        false => None,
    };
    if let Some(weights) = &weights {
        check_weights(&bound, &weights.stack)?;
    }
    if let Some(folder) = &args.dump_graph {
        dump(&bound, folder)?;
    }
    let options = |device: Device| -> BuildOptions {
        let mut options = args.build.options(device, false, context);
        options.threads = args.provider.threads(context);
        (options.shapes, options.open_shapes) = (shapes.clone(), open_shapes.clone());
        options
    };
    let job = Job { model: &model, options: &options, isolate: args.isolate, absent_devices: true };
    let engine = args.provider.attempt(&job, context, |provider, options| {
        build::build(provider, &model, weights.as_ref(), &options, context)
    })?;
    let payload_bytes = args.output.as_ref().map(|path| engine.save(path)).transpose()?;
    let report = Report {
        device: engine.device(),
        cached: engine.was_loaded(),
        seconds: engine.seconds(),
        file: args.output.as_deref(),
        payload_bytes,
        weights: weights.as_ref().map(sdrun::Weights::report),
        manifest: engine.manifest(),
    };
    context.present(&report, |out| {
        writeln!(out, "{}", build::describe(&engine))?;
        if let Some(weights) = &report.weights {
            weights::show(weights, out, model.name())?;
        }
        let weights = engine.info().weights.len();
        match weights {
            0 => writeln!(out, "  holds all its weights")?,
            n => writeln!(out, "  takes {n} weights when it is loaded")?,
        }
        if let (Some(path), Some(bytes)) = (&args.output, payload_bytes) {
            writeln!(out, "  {} in {}", format::bytes(bytes), path.display())?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}
