//! `sdrun generate`

mod draw;
mod explain;
mod inputs;
mod listener;
mod model;
mod output;
mod preview;
mod report;
mod reuse;
mod upscaling;

pub(super) use report::log;

use crate::{build::BuildArgs, context::Context, files::picture, provider::ProviderArgs};
use inputs::InputArgs;
use model::ModelArgs;
use preview::PreviewArgs;
use reuse::ReuseArgs;
use sdrun_diffusion::{
    metadata::{self, Record, read_record},
    names,
    noise::{Rng, Variation},
    pipeline::Request,
    program::Program,
    sampler::Sampler,
    schedule::Schedule,
};
use std::{
    path::PathBuf,
    process::ExitCode,
    time::{SystemTime, UNIX_EPOCH},
};

/// Draw pictures from a prompt
///
/// Without --model, sdrun uses a small built-in model that draws coloured shapes, 64 x 64. To try its LoRA, embedding and ControlNet,
/// write <lora:outline:1> or gem in the prompt, or give --control-net demo/canny.
///
/// MODEL is a checkpoint of SD 1, SD 2, SDXL, SD 3, Flux, Chroma, PixArt-Σ or Sana in any layout, or a folder of ONNX models
/// (unet/model.onnx and so on). Models for inpainting, depths or edges, the SDXL refiner and latent consistency models count too. Settings you leave out
/// take the usual values of its family. Prompts use A1111's syntax: (word:1.2) sets a weight, [a:b:0.5] switches from a to b halfway, AND
/// combines prompts, BREAK starts a new chunk, {a|b} chooses one for each picture. The same seed gives the same picture on every
/// provider, up to rounding.
///
/// Example: sdrun generate "a red circle left of a blue square"
///
/// Example: sdrun generate "a red fox in the snow" -m dreamshaper.safetensors -o fox.png
///
/// Example: sdrun generate "a lighthouse" -m model.safetensors --lora style.safetensors:0.8 --sampler "DPM++ 2M" -s 7 -b 4
///
/// Example: sdrun generate "a lighthouse" -m model.safetensors --upscale-model RealESRGAN_x4plus.safetensors
///
/// Example: sdrun generate "a hat" -m model.safetensors -i fox.png --mask head.png --only-masked
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to draw
    #[arg(required_unless_present = "from")]
    prompt: Option<String>,

    /// What to avoid
    #[arg(short, long, value_name = "TEXT")]
    negative_prompt: Option<String>,

    /// Folder of wildcards: __NAME__ in a prompt becomes a line of the file NAME.txt in it
    #[arg(long, value_name = "FOLDER")]
    wildcard_dir: Option<PathBuf>,

    /// Write the picture to this PNG, JPEG or WebP file; further pictures get a number
    #[arg(short, long, value_name = "FILE", default_value = "picture.png")]
    output: PathBuf,

    /// Take the settings of this picture, which sdrun, A1111, ComfyUI or another program made; options change them
    #[arg(long, value_name = "PICTURE")]
    from: Option<PathBuf>,

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

    /// How far to restore the contrast that a high --cfg-scale changes; 0.7 suits models with zero terminal SNR
    #[arg(long, value_name = "0..1")]
    cfg_rescale: Option<f64>,

    /// Guide only in this part of the steps, such as 0.1,0.8; the others take half the time
    #[arg(long, value_name = "FROM,TO", value_parser = inputs::interval)]
    cfg_interval: Option<(f64, f64)>,

    /// Guidance of models that take it as an input [default: 3.5 for Flux dev, 30 for Fill, Canny and Depth, 8.5 for latent
    /// consistency models]
    #[arg(long, value_name = "SCALE")]
    guidance: Option<f64>,

    /// Which of the last layers of the text encoder to use; most anime models of SD 1 need 2 [default: 1]
    #[arg(long, value_name = "N")]
    clip_skip: Option<usize>,

    /// After which share of the steps --refiner takes over [default: 0.8]
    #[arg(long, value_name = "0..1", requires = "refiner")]
    refiner_start: Option<f64>,

    /// Seed of the first picture; each further picture adds 1 [default: random]
    #[arg(short, long, value_name = "N")]
    seed: Option<u64>,

    /// Mix the noise of this seed into the first picture's; each further picture adds 1 to it and keeps --seed [default: random]
    #[arg(long, value_name = "N", requires = "variation_strength")]
    variation_seed: Option<u64>,

    /// How much of the noise is that of --variation-seed: 0.05 to 0.2 gives small changes
    #[arg(long, value_name = "0..1")]
    variation_strength: Option<f64>,

    /// Draw the pictures of another program from its seeds: its noise, rounding, prompt syntax and order of random numbers
    #[arg(long, value_name = "PROGRAM", value_enum)]
    seed_like: Option<Like>,

    /// Where noise comes from [default: cpu]
    #[arg(long, value_name = "SOURCE", value_enum)]
    rng: Option<RngArg>,

    /// Number of pictures
    #[arg(short, long, value_name = "N", default_value_t = 1)]
    batch_count: usize,

    /// Sampler, under its name in ComfyUI, A1111, diffusers or stable-diffusion.cpp [default: depends on the model's family]
    #[arg(long, alias = "sampling-method", value_name = "NAME", value_parser = sampler)]
    sampler: Option<(Sampler, Option<Schedule>)>,

    /// Spacing of the noise levels, under its name in those programs [default: the sampler's usual schedule]
    #[arg(long, alias = "scheduler", value_name = "NAME", value_parser = schedule)]
    schedule: Option<Schedule>,

    /// Run the autoencoder on tiles of this many pixels [without it: only if the memory is too small for the whole picture]
    #[arg(long, value_name = "PIXELS", num_args = 0..=1, default_missing_value = "512")]
    vae_tiling: Option<usize>,

    /// Write no metadata (prompt and settings) into the pictures
    #[arg(long, alias = "disable-image-metadata")]
    no_metadata: bool,

    #[command(flatten)]
    reuse: ReuseArgs,

    #[command(flatten)]
    preview: PreviewArgs,

    /// First say what will run where and why, whether its engine is cached, and how much memory it needs
    #[arg(long)]
    explain: bool,

    /// Run providers in worker processes even if they need no vendor's runtime; those that do always run in one, so that a crash in it
    /// becomes an error
    #[arg(long)]
    isolate: bool,

    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    inputs: InputArgs,
    #[command(flatten)]
    provider: ProviderArgs,
    #[command(flatten)]
    build: BuildArgs,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Like {
    /// diffusers with a generator on the CPU
    Diffusers,
    /// AUTOMATIC1111's web UI with random numbers from the CPU
    A1111,
    /// ComfyUI
    Comfy,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum RngArg {
    /// torch's generator for CPUs
    Cpu,
    /// The generator of NVIDIA GPUs, which A1111 and stable-diffusion.cpp use by default
    #[value(alias = "cuda")]
    Nv,
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

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    context.limit(args.provider.time_limit);
    context.begin_lines();
    let report = draw::draw(args, context)?;
    context.present(&report, |out| report.write(out))?;
    Ok(ExitCode::SUCCESS)
}

/// The request: settings of a picture, changed by options.
fn wanted(args: &Args) -> anyhow::Result<(Request, Option<Record>)> {
    let from = match &args.from {
        None => None,
        Some(file) => {
            let reading = read_record(&picture::read(file)?.texts).map_err(|error| error.of_file(file))?;
            for unread in &reading.unread {
                tracing::warn!("{}: {unread}", file.display());
            }
            Some(reading.record)
        }
    };
    let mut base = from.as_ref().map(Request::of_record).unwrap_or_default();
    if let (Some(from), None) = (&from, &args.model.upscale_model) {
        upscaling::leave_out(from, &mut base);
    }
    let (sampler, usual) = args.sampler.map_or((None, None), |(sampler, usual)| (Some(sampler), usual));
    let request = Request {
        prompt: args.prompt.clone().or(from.as_ref().map(prompt_of)).unwrap_or_default(),
        negative: args.negative_prompt.clone().unwrap_or(base.negative),
        width: args.width.or(base.width),
        height: args.height.or(base.height),
        steps: args.steps.or(base.steps),
        scale: args.cfg_scale.or(base.scale),
        rescale: args.cfg_rescale.unwrap_or(base.rescale),
        guidance_interval: args.cfg_interval.or(base.guidance_interval),
        distilled_guidance: args.guidance.or(base.distilled_guidance),
        clip_skip: args.clip_skip.or(base.clip_skip),
        tile: args.vae_tiling.or(base.tile),
        refiner_start: args.refiner_start.or(base.refiner_start),
        // Another sampler brings its own usual schedule.
        schedule: args.schedule.or(usual).or(base.schedule.filter(|_| sampler.is_none())),
        sampler: sampler.or(base.sampler),
        seed: args.seed.or(from.as_ref().and_then(|record| record.seed)).unwrap_or_else(any_seed),
        variation: args.variation(base.variation),
        like: args.seed_like.map(Like::program).or(base.like),
        rng: args.rng.map(RngArg::rng).or(base.rng),
        count: args.batch_count,
        reuse: args.reuse.wanted(base.reuse)?,
        ..base
    };
    Ok((request, from))
}

impl Args {
    /// The variation that the options ask for, or that of the picture `--from` names.
    fn variation(&self, base: Option<Variation>) -> Option<Variation> {
        let strength = self.variation_strength.or(base.map(|base| base.strength))?;
        let seed = self.variation_seed.or(base.map(|base| base.seed)).unwrap_or_else(any_seed);
        Some(Variation { seed, strength })
    }
}

/// A record's prompt with a tag for each adapter, which is found in the folder of adapters.
fn prompt_of(record: &Record) -> String {
    let tag = |lora: &metadata::Lora| {
        format!(" <lora:{}:{}:{}>", lora.name, lora.text_encoder_strength, lora.strength)
    };
    record.prompt.clone() + &record.loras.iter().map(tag).collect::<String>()
}

impl Like {
    fn program(self) -> Program {
        match self {
            Like::Diffusers => Program::Diffusers,
            Like::A1111 => Program::A1111,
            Like::Comfy => Program::ComfyUi,
        }
    }
}

impl RngArg {
    fn rng(self) -> Rng {
        match self {
            RngArg::Cpu => Rng::Cpu,
            RngArg::Nv => Rng::Nv,
        }
    }
}

/// A seed that differs from run to run, in the 32 bits that other programs accept.
fn any_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (now.as_nanos() as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_sampler_is_answered_with_the_nearest() {
        let error = sampler("dpmpp_3n").unwrap_err();
        assert!(error.contains("dpmpp_3m"), "{error}");
        assert_eq!(sampler("DPM++ 2M Karras").unwrap(), (Sampler::DpmPp2m, Some(Schedule::Karras)));
        assert!(schedule("karas").unwrap_err().contains("did you mean"));
    }
}
