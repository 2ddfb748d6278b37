//! `sdrun generate`

use crate::{
    build::BuildArgs,
    context::Context,
    files::{
        self,
        picture::{self, JPEG_QUALITY},
    },
    format,
    parse::LoraArg,
    provider::ProviderArgs,
};
use sdrun_diffusion::{
    metadata::PARAMETERS,
    names,
    pipeline::{self, Engines, Event, Files, Parts, Picture, Request, Resolved},
    sampler::Sampler,
    schedule::Schedule,
};
use serde::Serialize;
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

/// Draw pictures from a prompt
///
/// MODEL is a checkpoint of SD 1, SD 2 or SDXL in any layout, or a folder of ONNX models (unet/model.onnx and so on). Settings you leave
/// out take the usual values of its family. Prompts use A1111's syntax: (word:1.2) sets a weight, [a:b:0.5] switches from a to b halfway,
/// BREAK starts a new chunk. The same seed gives the same picture on every provider, up to rounding.
///
/// Example: sdrun generate "a red fox in the snow" -m dreamshaper.safetensors -o fox.png
///
/// Example: sdrun generate "a lighthouse" -m model.safetensors --lora style.safetensors:0.8 --sampler "DPM++ 2M" -s 7 -b 4
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to draw
    prompt: String,

    /// A checkpoint, or a folder of ONNX models
    #[arg(short, long, value_name = "MODEL")]
    model: PathBuf,

    /// What to avoid
    #[arg(short, long, value_name = "TEXT")]
    negative_prompt: Option<String>,

    /// Write the picture to this PNG, JPEG or WebP file; further pictures get a number
    #[arg(short, long, value_name = "FILE", default_value = "picture.png")]
    output: PathBuf,

    /// Width in pixels [default: the size that the model was trained for]
    #[arg(short = 'W', long, value_name = "N")]
    width: Option<usize>,

    /// Height in pixels [default: the size that the model was trained for]
    #[arg(short = 'H', long, value_name = "N")]
    height: Option<usize>,

    /// Number of steps [default: depends on the model's family]
    #[arg(long, value_name = "N")]
    steps: Option<usize>,

    /// How strongly the picture follows the prompt; 1 ignores the negative prompt and takes half the time [default: depends on the
    /// model's family]
    #[arg(long, value_name = "SCALE")]
    cfg_scale: Option<f64>,

    /// Seed of the first picture; each further picture adds 1 [default: random]
    #[arg(short, long, value_name = "N")]
    seed: Option<u64>,

    /// Number of pictures
    #[arg(short, long, value_name = "N", default_value_t = 1)]
    batch_count: usize,

    /// Sampler, under its name in ComfyUI, A1111, diffusers or stable-diffusion.cpp [default: dpmpp_2m]
    #[arg(long, alias = "sampling-method", value_name = "NAME", value_parser = sampler)]
    sampler: Option<(Sampler, Option<Schedule>)>,

    /// Spacing of the noise levels, under its name in those programs [default: karras, or the sampler's usual schedule]
    #[arg(long, alias = "scheduler", value_name = "NAME", value_parser = schedule)]
    schedule: Option<Schedule>,

    /// Apply an adapter (LoRA and its relatives) with this strength, or with TEXT to text encoders [default: 1] (repeatable)
    #[arg(long = "lora", value_name = "FILE[:STRENGTH[:TEXT]]")]
    loras: Vec<LoraArg>,

    /// Write no metadata (prompt and settings) into the pictures
    #[arg(long)]
    no_metadata: bool,

    /// Run providers in worker processes, so that a crash in one becomes an error
    #[arg(long)]
    isolate: bool,

    #[command(flatten)]
    provider: ProviderArgs,
    #[command(flatten)]
    build: BuildArgs,
}

fn sampler(name: &str) -> Result<(Sampler, Option<Schedule>), String> {
    names::sampler(name).ok_or_else(|| unknown("sampler", name, names::samplers()))
}

fn schedule(name: &str) -> Result<Schedule, String> {
    names::schedule(name).ok_or_else(|| unknown("schedule", name, names::schedules()))
}

fn unknown(what: &str, name: &str, known: impl Iterator<Item = &'static str>) -> String {
    let known: Vec<&str> = known.collect();
    let guess = sdrun::did_you_mean(name, known.iter().copied());
    format!("there is no {what} `{name}`{guess} (known: {})", known.join(", "))
}

#[derive(Serialize)]
struct Report {
    family: &'static str,
    width: usize,
    height: usize,
    steps: usize,
    sampler: &'static str,
    schedule: &'static str,
    cfg_scale: f64,
    networks: Vec<Network>,
    pictures: Vec<Drawn>,
    seconds: f64,
}

#[derive(Serialize)]
struct Network {
    part: String,
    provider: String,
    device: String,
    built: bool,
    seconds: f64,
}

#[derive(Serialize)]
struct Drawn {
    file: PathBuf,
    seed: u64,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let report = draw(args, context)?;
    context.present(&report, |out| {
        for picture in &report.pictures {
            writeln!(out, "{}  seed {}", picture.file.display(), picture.seed)?;
        }
        let Report { family, width, height, steps, sampler, schedule, cfg_scale, seconds, .. } = &report;
        let seconds = format::seconds(*seconds);
        writeln!(
            out,
            "{family}, {width} x {height}, {steps} steps of {sampler} ({schedule}), scale {cfg_scale}, {seconds}"
        )
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Draws the pictures and writes each as soon as it is done.
fn draw(args: &Args, context: &Context) -> anyhow::Result<Report> {
    let started = Instant::now();
    picture::Format::of(&args.output)?;
    for number in 0..args.batch_count.max(1) {
        files::check_target(&numbered(&args.output, number))?;
    }
    let registry = context.registry()?;
    let task = context.task("opening the model");
    let host = task.host(context.cancel_flag());
    let files = Files { model: Some(args.model.clone()), ..Files::default() };
    let mut parts = Parts::open(&files, registry.paths(), &host)?;
    for lora in &args.loras {
        parts.add_adapter(&lora.file, lora.strength, lora.text_encoder_strength)?;
    }
    let request = request(args).resolve(&parts)?;

    let threads = args.provider.threads(context);
    let options = |device| args.build.options(device, false, context).threads(threads);
    let engines = Engines {
        only: args.provider.named(&registry, args.isolate, false, context)?,
        wishes: args.provider.wishes(args.isolate, false, context),
        options: &options,
    };

    let (mut networks, mut drawn, mut fault) = (Vec::new(), Vec::new(), None);
    let model = args.model.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let mut hear = |event: Event<'_>| match event {
        Event::Loaded { part, provider, device, precision, built, seconds } => {
            tracing::info!("{part} on {provider} ({device}, {precision}) after {seconds:.1} s");
            let [part, provider, device] = [part, provider, device].map(str::to_string);
            networks.push(Network { part, provider, device, built, seconds });
        }
        Event::Widened { part, from } => {
            tracing::warn!("{part} gave values that are not finite in {from}; it runs in fp32 now");
        }
        Event::Prompt { part, tokens, lost } if lost > 0 => {
            tracing::warn!("{part} takes {} of the prompt's {tokens} tokens", tokens - lost);
        }
        Event::Step { picture, step, steps, .. } => {
            let what = format!("picture {} of {}, step {} of {steps}", picture + 1, request.count, step + 1);
            let (done, all) = (picture * steps + step + 1, request.count * steps);
            task.step(&what, done as u64, all as u64);
        }
        Event::Picture(picture) => {
            let file = numbered(&args.output, drawn.len());
            let text = (!args.no_metadata).then(|| request.infotext(&model, picture.seed).to_string());
            let seed = picture.seed;
            match write(&file, picture, text.as_deref()) {
                Ok(()) => drawn.push(Drawn { file, seed }),
                Err(error) => fault = fault.take().or(Some(error)),
            }
        }
        _ => {}
    };
    pipeline::generate(&registry, &parts, &request, &engines, &host, &mut hear)?;
    if let Some(error) = fault {
        return Err(error);
    }
    let Resolved { width, height, steps, .. } = request;
    Ok(Report {
        family: parts.family.title,
        width,
        height,
        steps,
        sampler: request.sampler.name(),
        schedule: request.schedule.name(),
        cfg_scale: request.guidance.scale,
        networks,
        pictures: drawn,
        seconds: started.elapsed().as_secs_f64(),
    })
}

fn request(args: &Args) -> Request {
    Request {
        prompt: args.prompt.clone(),
        negative: args.negative_prompt.clone().unwrap_or_default(),
        width: args.width,
        height: args.height,
        steps: args.steps,
        scale: args.cfg_scale,
        sampler: args.sampler.map(|(sampler, _)| sampler),
        schedule: args.schedule.or(args.sampler.and_then(|(_, schedule)| schedule)),
        seed: args.seed.unwrap_or_else(any_seed),
        count: args.batch_count,
        ..Request::default()
    }
}

/// A seed that differs from run to run, in the 32 bits that other programs accept.
fn any_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (now.as_nanos() as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32
}

/// `NAME.png`, `NAME-2.png` and so on.
fn numbered(file: &Path, number: usize) -> PathBuf {
    if number == 0 {
        return file.to_path_buf();
    }
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let ending = file.extension().map(|e| format!(".{}", e.to_string_lossy())).unwrap_or_default();
    file.with_file_name(format!("{stem}-{}{ending}", number + 1))
}

fn write(file: &Path, picture: Picture, text: Option<&str>) -> anyhow::Result<()> {
    let image = picture::rgb(picture.width, picture.height, picture.bytes)?;
    let texts: Vec<(&str, &str)> = text.map(|text| (PARAMETERS, text)).into_iter().collect();
    picture::write(file, &image, JPEG_QUALITY, &texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_pictures_have_a_number() {
        assert_eq!(numbered(Path::new("a/fox.png"), 0), Path::new("a/fox.png"));
        assert_eq!(numbered(Path::new("a/fox.png"), 1), Path::new("a/fox-2.png"));
        assert_eq!(numbered(Path::new("fox"), 2), Path::new("fox-3"));
    }

    #[test]
    fn an_unknown_sampler_is_answered_with_the_nearest() {
        let error = sampler("dpmpp_3n").unwrap_err();
        assert!(error.contains("dpmpp_3m"), "{error}");
        assert_eq!(sampler("DPM++ 2M Karras").unwrap(), (Sampler::DpmPp2m, Some(Schedule::Karras)));
        assert!(schedule("karas").unwrap_err().contains("did you mean"));
    }
}
