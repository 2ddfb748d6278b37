//! `sdrun build`

use crate::{
    complete,
    context::Context,
    files, format, model,
    weights::{WeightArgs, WeightReport},
};
use sdrun::{
    BuildOptions, EngineManifest,
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

    /// Run the provider in a worker process, so that a crash in it becomes an error
    #[arg(long)]
    isolate: bool,

    #[command(flatten)]
    weights: WeightArgs,
    #[command(flatten)]
    provider: model::ProviderArgs,
    #[command(flatten)]
    shapes: model::ModelArgs,
    #[command(flatten)]
    build: model::BuildArgs,
}

/// Writes the graph before and after [`passes::ALL`].
fn dump(bound: &Graph, folder: &Path) -> anyhow::Result<()> {
    let write = |name: &str, graph: &Graph| -> anyhow::Result<()> {
        let bytes = graph.to_onnx_stripped().map_err(sdrun::Error::from)?;
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
    if let Some(path) = &args.output {
        files::check_file_target(path)?;
    }
    let own = args.build.bake || args.weights.is_changing();
    let policy = if own { args.weights.policy() } else { WeightsPolicy::MayBeAbsent };
    let model = args.shapes.open(&args.model, policy, context)?;
    let (given, lists) = args.shapes.shapes_and_lists()?;
    let (shapes, open_shapes) = model::complete_lists(&model, given, lists);
    // Errors of the model and its weights come before those of a provider.
    let bound = model.bound_for(&shapes, &open_shapes)?;
    let weights = match args.weights.is_given() {
        true => {
            let names: Vec<&str> = bound.weights().map(|(name, _)| name).collect();
            let links = args.shapes.allow_links;
            let weights = args.weights.open(model.binding()?, &names, Some(&model), links, context)?;
            if let Some(weights) = &weights {
                check_weights(&bound, &weights.stack)?;
            }
            weights
        }
        false => None,
    };
    if let Some(folder) = &args.dump_graph {
        dump(&bound, folder)?;
    }
    let (provider, device) = args.provider.open_to_build(args.isolate, context)?;
    let threads = args.provider.threads(context);
    let options = BuildOptions { threads, shapes, open_shapes, ..BuildOptions::new(device.clone()) };
    let engine = args.build.build(context, &provider, options, &model, weights.as_ref(), false)?;
    let payload_bytes = args.output.as_ref().map(|path| engine.save(path)).transpose()?;
    let report = Report {
        device: &device,
        cached: engine.was_loaded(),
        seconds: engine.seconds(),
        file: args.output.as_deref(),
        payload_bytes,
        weights: weights.as_ref().map(|weights| args.weights.report(&args.model, &weights.stack)),
        manifest: engine.manifest(),
    };
    context.present(&report, |out| {
        writeln!(out, "{}", model::describe(&engine, &device))?;
        if let Some(weights) = &report.weights {
            weights.show(out, &args.model)?;
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
