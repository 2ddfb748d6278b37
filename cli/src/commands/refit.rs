//! `sdrun refit`

use crate::{
    context::Context,
    files, format,
    provider::ProviderArgs,
    weights::{self, WeightArgs},
};
use sdrun::{
    EngineFile, WeightReport,
    abi::{Device, Error, Hint},
    bench::Refit,
};
use serde::Serialize;
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

/// Load a checkpoint and adapters into an engine
///
/// Loads the checkpoint, then refits the engine with the adapters. Reports what fits, which method the provider uses and how
/// long it takes. With -o, also writes the engine with these weights inside, if the provider can do that. `sdrun run ENGINE`
/// takes the same options.
///
/// Example: sdrun refit unet.sdengine --weights dreamshaper.safetensors --lora style.safetensors:0.8
///
/// Example: sdrun refit unet.sdengine --weights dreamshaper.safetensors -o dreamshaper.sdengine
#[derive(clap::Args)]
pub(crate) struct Args {
    /// An .sdengine file without weights
    #[arg(value_name = "ENGINE")]
    engine: PathBuf,

    /// Write the engine with the weights inside to this file
    #[arg(short, long, value_name = "FILE.sdengine")]
    output: Option<PathBuf>,

    /// Run the provider in a worker process even if it needs no vendor's runtime; those that do always run in one, so that a crash in it
    /// becomes an error
    #[arg(long)]
    isolate: bool,

    /// Follow symbolic and hard links to external weight files, even outside the model's folder
    #[arg(long)]
    allow_links: bool,

    #[command(flatten)]
    weights: WeightArgs,
    #[command(flatten)]
    provider: ProviderArgs,
}

#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    provider: &'a str,
    device: &'a Device,
    weights: WeightReport,
    /// Time to load the weights below the adapters.
    session_seconds: f64,
    /// The refit to the weights with the adapters; absent if there are none.
    refit: Option<Refit>,
    file: Option<&'a Path>,
    /// Size of the engine in the file.
    payload_bytes: Option<u64>,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    context.limit(args.provider.time_limit);
    if let Some(path) = &args.output {
        files::check_file_target(path)?;
    }
    let path = &*args.engine;
    let file = EngineFile::open(path)?;
    let manifest = &file.manifest;
    args.provider.check_engine(path, manifest)?;
    if manifest.info.weights.is_empty() {
        let message = format!("{} has its weights baked in and takes no others", path.display());
        return Err(Error::precondition(message).with_hint(Hint::LeaveOut { option: "bake".into() }).into());
    }
    let files = args.weights.files(args.allow_links);
    let weights = weights::of_engine(&files, manifest, context)?;
    let weights =
        weights.ok_or_else(|| Error::not_found("no weights are given").with_hint(Hint::GiveWeights))?;
    let engine = args.provider.load(path, &file, args.isolate, context)?;
    let stack = &weights.stack;

    let task = context.task("loading weights");
    let host = task.host(context.cancel_flag());
    let mut session = engine.session(&stack.pristine(), &host)?;
    let refit = match files.is_changing() {
        false => None,
        true => {
            let started = Instant::now();
            let report = session.refit(stack, &host)?;
            Some(Refit { seconds: started.elapsed().as_secs_f64(), report })
        }
    };
    let session_seconds = session.seconds();
    // Baking needs the weights too. Free the session's copy first.
    drop(session);
    let payload_bytes = match &args.output {
        Some(path) => Some(engine.bake(stack, &host)?.save(path)?),
        None => None,
    };
    drop(host);
    drop(task);
    context.go_on()?;
    let report = Report {
        model: &manifest.model,
        provider: &manifest.provider,
        device: engine.device(),
        weights: weights.report(),
        session_seconds,
        refit,
        file: args.output.as_deref(),
        payload_bytes,
    };
    context.present(&report, |out| {
        writeln!(out, "{} on {} ({})", report.model, report.provider, report.device.name)?;
        weights::show(&report.weights, out, "")?;
        writeln!(out, "  weights in after {}", format::seconds(session_seconds))?;
        if let Some(refit) = &report.refit {
            writeln!(out, "  {}", format::refit(refit))?;
        }
        if let (Some(path), Some(bytes)) = (report.file, report.payload_bytes) {
            writeln!(out, "  {} with these weights in {}", format::bytes(bytes), path.display())?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}
