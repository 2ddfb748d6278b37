//! `sdrun upscale`

use super::generate::log;
use crate::{
    build::BuildArgs,
    context::Context,
    files::{self, picture},
    format,
    provider::ProviderArgs,
};
use sdrun_diffusion::{
    file::JPEG_QUALITY,
    metadata::{POSTPROCESSING, Upscale},
    pipeline::{self, Event, LoadedNetwork, Upscaler},
};
use serde::Serialize;
use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

/// Enlarge a picture with ESRGAN or Real-ESRGAN
///
/// The new file keeps the texts of PICTURE, such as prompt and settings. A PNG file also says how it was enlarged, as A1111 does. Large
/// pictures run in tiles.
///
/// Example: sdrun upscale fox.png -m RealESRGAN_x4plus.safetensors -o large.png
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A PNG, JPEG or WebP file
    #[arg(value_name = "PICTURE")]
    picture: PathBuf,

    /// The upscaler: a file of ESRGAN or Real-ESRGAN for 4 or 2 times the size
    #[arg(short, long, alias = "upscale-model", value_name = "FILE")]
    model: PathBuf,

    /// Write the result to this PNG, JPEG or WebP file
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// How often to enlarge
    #[arg(long, alias = "upscale-repeats", value_name = "N", default_value = "1")]
    repeats: NonZeroUsize,

    /// Run providers in worker processes even if they need no vendor's runtime; those that do always run in one, so that a crash in it
    /// becomes an error
    #[arg(long)]
    isolate: bool,

    #[command(flatten)]
    provider: ProviderArgs,
    #[command(flatten)]
    build: BuildArgs,
}

#[derive(Serialize)]
struct Report<'a> {
    file: &'a Path,
    width: u32,
    height: u32,
    factor: f64,
    networks: Vec<LoadedNetwork>,
    seconds: f64,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    context.limit(args.provider.time_limit);
    let report = enlarge(args, context)?;
    context.present(&report, |out| {
        let Report { file, width, height, seconds, .. } = &report;
        writeln!(out, "{}  {width} x {height}, {}", file.display(), format::seconds(*seconds))
    })?;
    Ok(ExitCode::SUCCESS)
}

fn enlarge<'a>(args: &'a Args, context: &Context) -> anyhow::Result<Report<'a>> {
    let started = Instant::now();
    let read = picture::read(&args.picture)?;
    picture::format_of(&args.output)?;
    files::check_target(&args.output)?;
    let registry = context.registry()?;
    let task = context.task("upscaling");
    let host = task.host(context.cancel_flag());
    let upscaler = Upscaler::open(&args.model, registry.paths(), &host)?;
    let threads = args.provider.threads(context);
    let options = |device| args.build.options(device, false, context).threads(threads);
    let engines = args.provider.engines(&registry, args.isolate, context, &options)?;
    let mut networks = Vec::new();
    let mut hear = |event: Event<'_>| match event {
        Event::Tile { tile, tiles, .. } => {
            task.step(&format!("tile {} of {tiles}", tile + 1), tile as u64 + 1, tiles as u64);
        }
        event => {
            log(&event);
            if let Event::Loaded(network) = event {
                networks.push(network.clone());
            }
        }
    };
    let repeats = args.repeats.get();
    let large = pipeline::upscale(&registry, &upscaler, read.rgb(), repeats, &engines, &host, &mut hear)?;
    let factor = upscaler.factor(repeats);
    let done = Upscale::new(&args.model.to_string_lossy(), None, factor);
    let texts = with_postprocessing(read.texts, done.infotext());
    let texts: Vec<(&str, &str)> = texts.iter().map(|(key, text)| (&**key, &**text)).collect();
    picture::write(&args.output, &large, JPEG_QUALITY, &texts)?;
    Ok(Report {
        file: &args.output,
        width: large.width(),
        height: large.height(),
        factor,
        networks,
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// A picture's texts and what was done to it, after what was done before.
fn with_postprocessing(mut texts: Vec<(String, String)>, done: String) -> Vec<(String, String)> {
    match texts.iter_mut().find(|(key, _)| key == POSTPROCESSING) {
        Some((_, text)) => *text = format!("{text}, {done}"),
        None => texts.push((POSTPROCESSING.into(), done)),
    }
    texts
}
