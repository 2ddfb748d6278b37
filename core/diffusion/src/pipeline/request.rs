//! What to draw.

use super::{Control, Error, Hires, Parts, Result, Start, Upscale, Upscaler, words::Syntax};
use crate::{
    guidance::{self, Guidance, Rule},
    latent::{self, Rounding},
    metadata::{self, Record},
    noise::{Rng, Variation},
    prediction::{Prediction, Time},
    program::Program,
    prompt::{self, Pass, Tag},
    reuse::Reuse,
    sampler::{Options, Sampler},
    schedule::{
        Levels, Schedule,
        diffusers::{self, Spacing},
    },
};
use image::RgbImage;
use sdrun::abi;

/// What a user asks for. `None` means the default of the model's family.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    /// What the pictures show, with weights and alternatives in A1111's language.
    pub prompt: String,
    /// What they do not show.
    pub negative: String,
    /// Width in pixels.
    pub width: Option<usize>,
    /// Height in pixels.
    pub height: Option<usize>,
    /// Steps.
    pub steps: Option<usize>,
    /// Guidance scale.
    pub scale: Option<f64>,
    /// How far to restore the deviation of guided predictions, from 0 to 1.
    pub rescale: f64,
    /// Sampler.
    pub sampler: Option<Sampler>,
    /// Schedule. If only the sampler is given, the default is that sampler's usual schedule.
    pub schedule: Option<Schedule>,
    /// Seed of the first picture. Picture `i` has the seed `seed + i`, unless it varies.
    pub seed: u64,
    /// A share of another seed's noise. All pictures have the same seed then; it is the other seed that picture `i` adds `i` to.
    pub variation: Option<Variation>,
    /// Where noise comes from; torch's generator for CPUs by default.
    pub rng: Option<Rng>,
    /// Number of pictures; 0 counts as 1.
    pub count: usize,
    /// Which of the last layers of the text encoder to use, where 1 is the last; only in SD 1.
    pub clip_skip: Option<usize>,
    /// What the denoiser predicts, if the model does not tell.
    pub prediction: Option<Prediction>,
    /// The guidance scale of models that take it as an input (Flux dev).
    pub distilled_guidance: Option<f64>,
    /// How to combine predictions with and without the prompt.
    pub guidance_rule: Option<Rule>,
    /// In which part of the steps to guide, as shares from 0 to 1.
    pub guidance_interval: Option<(f64, f64)>,
    /// A picture to start from.
    pub start: Option<Start>,
    /// A second pass over the enlarged picture.
    pub hires: Option<Hires>,
    /// How often [`Parts::upscaler`] enlarges the finished pictures; 0 for not at all.
    pub upscale_repeats: usize,
    /// Pictures that ControlNets follow, as many as [`Parts::controls`]. A model that itself draws after a picture
    /// ([`Beside::is_hint`]) takes one, at full strength.
    ///
    /// [`Beside::is_hint`]: crate::family::Beside::is_hint
    pub controls: Vec<Control>,
    /// Pictures to edit as the prompt says, of any size (FLUX.1 Kontext).
    pub references: Vec<RgbImage>,
    /// After which share of the steps [`Parts::refiner`] takes over; 0.8 by default.
    pub refiner_start: Option<f64>,
    /// When steps may skip the network. `None` computes every step.
    pub reuse: Option<Reuse>,
    /// Sides in pixels of tiles for the autoencoder. `None` takes the whole picture, or tiles of 512 where memory is short.
    pub tile: Option<usize>,
    /// The language of the prompts. The default is that of `like`, or else A1111's.
    pub syntax: Option<Syntax>,
    /// The program whose pictures to reproduce. By default sdrun draws its own: samplers follow ComfyUI, and each picture has its
    /// own noise.
    pub like: Option<Program>,
}

/// A request with every setting filled in.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Resolved {
    /// See [`Request`].
    pub prompt: String,
    /// See [`Request`].
    pub negative: String,
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Steps.
    pub steps: usize,
    /// Guidance.
    pub guidance: Guidance,
    /// Sampler.
    pub sampler: Sampler,
    /// Schedule.
    pub schedule: Schedule,
    /// How a level becomes a timestep.
    pub time: Time,
    /// Seed of the first picture.
    pub seed: u64,
    /// A share of another seed's noise, above 0.
    pub variation: Option<Variation>,
    /// Where noise comes from.
    pub rng: Rng,
    /// Number of pictures.
    pub count: usize,
    /// Layer of the text encoder, counted from the last, which is 1.
    pub clip_skip: usize,
    /// What the denoiser predicts.
    pub prediction: Prediction,
    /// What the user says that it predicts, against the model.
    pub told_prediction: Option<Prediction>,
    /// The guidance scale of models that take it as an input.
    pub distilled_guidance: Option<f64>,
    /// A picture to start from.
    pub start: Option<Start>,
    /// A second pass over the enlarged picture.
    pub hires: Option<Hires>,
    /// How often an upscaler enlarges the finished pictures.
    pub upscale_repeats: usize,
    /// Pictures that ControlNets follow.
    pub controls: Vec<Control>,
    /// Pictures to edit.
    pub references: Vec<RgbImage>,
    /// After which share of the steps the refiner takes over.
    pub refiner_start: f64,
    /// When steps may skip the network.
    pub reuse: Option<Reuse>,
    /// Sides in pixels of tiles for the autoencoder.
    pub tile: Option<usize>,
    /// The language of the prompts.
    pub syntax: Syntax,
    /// The program whose pictures to reproduce.
    pub like: Option<Program>,
    /// What the user changed about the sampler, and whose rules to follow.
    pub options: Options,
}

/// The most steps. More never help, and a typo could take days.
const MOST_STEPS: usize = 1000;

/// The smallest tile of the autoencoder, in pixels. Below, tiles know too little of the picture.
const SMALLEST_TILE: usize = 128;

impl Request {
    /// Fills in what the user left open, from the defaults of the model's family.
    ///
    /// # Errors
    /// Numbers out of range, sizes that the model cannot have, and prompts with syntax that is not supported yet.
    pub fn resolve(&self, parts: &Parts) -> Result<Resolved> {
        let syntax = self.syntax.or(self.like.map(Syntax::of)).unwrap_or_default();
        if syntax != Syntax::Plain {
            [&self.prompt, &self.negative].into_iter().try_for_each(|prompt| check(prompt))?;
        }
        let family = parts.family;
        let defaults = &family.defaults;
        let (width, height) = (self.width.unwrap_or(family.size), self.height.unwrap_or(family.size));
        latent::check_size(width, height, family.multiple)?;
        self.start.as_ref().map_or(Ok(()), Start::check)?;
        self.hires.as_ref().map_or(Ok(()), |hires| hires.check(family.multiple))?;
        check_controls(&self.controls, parts, (width, height))?;
        self.check_upscaler(parts.upscaler.as_ref(), (width, height))?;
        let steps = self.steps.unwrap_or(defaults.steps);
        if steps == 0 || steps > MOST_STEPS {
            return Err(Error::invalid(format!("{steps} steps are not between 1 and {MOST_STEPS}")));
        }
        let scale = self.scale.unwrap_or(defaults.scale);
        if !scale.is_finite() || !(0.0..=1.0).contains(&self.rescale) {
            return Err(Error::invalid(format!(
                "the guidance scale {scale} is not a number, or its rescaling {} is not between 0 and 1",
                self.rescale
            )));
        }
        let interval = self.guidance_interval.unwrap_or((0.0, 1.0));
        if !guidance::is_range(interval) {
            let (from, to) = interval;
            return Err(Error::invalid(format!(
                "guidance from {from} to {to} of the steps is no range in 0 to 1"
            )));
        }
        let guidance = Guidance {
            rescale: self.rescale,
            rule: self.guidance_rule.unwrap_or(Rule::Standard),
            interval,
            ..Guidance::standard(scale)
        };
        let refiner_start = self.refiner_start.unwrap_or(0.8);
        if !(0.0..=1.0).contains(&refiner_start) {
            let message =
                format!("the refiner starts after {refiner_start} of the steps: take a share from 0 to 1");
            return Err(Error::invalid(message));
        }
        if !self.references.is_empty() && !family.edits {
            let message = format!("{} cannot edit a reference picture; FLUX.1 Kontext can", family.title);
            return Err(abi::Error::unsupported(message).into());
        }
        if let Some(tile) = self.tile.filter(|tile| *tile < SMALLEST_TILE) {
            let message = format!("tiles of {tile} pixels are too small: take {SMALLEST_TILE} or more");
            return Err(Error::invalid(message));
        }
        self.reuse.as_ref().map_or(Ok(()), Reuse::check)?;
        if let Some(Variation { strength, .. }) = self.variation
            && !(0.0..=1.0).contains(&strength)
        {
            return Err(Error::invalid(format!("a variation of {strength} is no share from 0 to 1")));
        }
        let clip_skip = self.clip_skip.unwrap_or(1).max(1);
        let sampler = self.sampler.unwrap_or(defaults.sampler);
        let usual = || if self.sampler.is_some() { sampler.usual_schedule() } else { defaults.schedule };
        Ok(Resolved {
            prompt: self.prompt.clone(),
            negative: self.negative.clone(),
            width,
            height,
            steps,
            guidance,
            sampler,
            schedule: self.schedule.unwrap_or_else(usual),
            time: defaults.time,
            seed: self.seed,
            variation: self.variation.filter(|variation| variation.strength > 0.0),
            rng: self.rng.unwrap_or_default(),
            count: self.count.max(1),
            clip_skip,
            prediction: self.prediction.or(parts.prediction).unwrap_or(family.prediction),
            told_prediction: self.prediction,
            distilled_guidance: family
                .distilled_guidance
                .map(|usual| self.distilled_guidance.unwrap_or(usual)),
            start: self.start.clone(),
            hires: self.hires,
            upscale_repeats: self.upscale_repeats,
            controls: self.controls.clone(),
            references: self.references.clone(),
            refiner_start,
            reuse: self.reuse,
            tile: self.tile,
            syntax,
            like: self.like,
            options: Options { program: self.like.unwrap_or_default(), ..Options::default() },
        })
    }
}

impl Request {
    /// Refuses a missing upscaler, and results with too many pixels.
    fn check_upscaler(&self, upscaler: Option<&Upscaler>, size: (usize, usize)) -> Result<()> {
        let Some(upscaler) = upscaler else {
            let needed = self.upscale_repeats > 0 || self.hires.is_some_and(|h| h.upscale == Upscale::Model);
            let message =
                "the pictures shall be enlarged by a network, and none was given: give the file of an ESRGAN";
            return if needed { Err(Error::invalid(message)) } else { Ok(()) };
        };
        let sides = |(width, height): (usize, usize)| {
            let side = |pixels| u32::try_from(pixels).unwrap_or(u32::MAX);
            (side(width), side(height))
        };
        let part =
            |start: &Start| start.inpaint.as_ref().is_some_and(|inpaint| inpaint.only_masked.is_some());
        let finished = match (&self.start, &self.hires) {
            (Some(start), _) if part(start) => start.picture.dimensions(),
            (_, Some(hires)) => sides((hires.width, hires.height)),
            _ => sides(size),
        };
        upscaler.check(finished, self.upscale_repeats)
    }
}

/// Refuses tags, which the pipeline would read as plain text.
fn check(prompt: &str) -> Result<()> {
    match prompt::tags(prompt).1.first() {
        Some(Tag { kind, name, .. }) => Err(Error::invalid(format!(
            "the prompt has the tag <{kind}:{name}>: take tags out of prompts before"
        ))),
        None => Ok(()),
    }
}

/// Refuses hints that do not fit.
fn check_controls(controls: &[Control], parts: &Parts, size: (usize, usize)) -> Result<()> {
    let own = parts.family.beside.is_hint();
    if controls.len() != parts.controls.len() + usize::from(own) {
        let message = match own {
            true => {
                format!("{} draws after one picture, and {} were given", parts.family.title, controls.len())
            }
            false => format!(
                "{} pictures for {} ControlNets: give one for each",
                controls.len(),
                parts.controls.len()
            ),
        };
        return Err(Error::invalid(message));
    }
    for Control { hint, strength, interval } in controls {
        let found = (hint.width() as usize, hint.height() as usize);
        if found != size {
            let ((width, height), (new_width, new_height)) = (found, size);
            let message = format!(
                "a ControlNet's picture has {width} x {height} pixels instead of {new_width} x {new_height}: resize it"
            );
            return Err(Error::invalid(message));
        }
        if !strength.is_finite() || !guidance::is_range(*interval) {
            let (start, end) = interval;
            let message =
                format!("a ControlNet acts with strength {strength} from {start} to {end} of the steps");
            return Err(Error::invalid(format!("{message}: take a number, and a range in 0 to 1")));
        }
    }
    Ok(())
}

impl Resolved {
    /// The passes of the sampler.
    pub fn passes(&self) -> Vec<Pass> {
        let steps = self.steps;
        let second =
            self.hires.map(|hires| Pass::Second { before: steps, steps: hires.steps.unwrap_or(steps) });
        [Some(Pass::First { steps }), second].into_iter().flatten().collect()
    }

    /// The request for the refiner.
    pub(super) fn of_refiner(&self, refiner: &Parts) -> Self {
        let family = refiner.family;
        Self {
            prediction: refiner.prediction.unwrap_or(family.prediction),
            distilled_guidance: family.distilled_guidance,
            controls: Vec::new(),
            references: Vec::new(),
            ..self.clone()
        }
    }

    /// How values of a picture become bytes.
    pub fn rounding(&self) -> Rounding {
        match self.options.program {
            Program::Diffusers => Rounding::Nearest,
            Program::A1111 | Program::ComfyUi => Rounding::Down,
        }
    }

    /// The model's noise levels for a picture of `[width, height]`, and those of a pass of `steps` steps over it ([`path`]).
    ///
    /// [`path`]: Self::path
    pub fn levels(
        &self,
        parts: &Parts,
        [width, height]: [usize; 2],
        steps: usize,
        strength: Option<f64>,
    ) -> (Levels, Vec<f64>) {
        let [_, rows, columns] = parts.family.latent.shape(width, height);
        // Flow models count 16x16 pixels as a token, whatever they pack.
        let tokens = rows * columns / 4;
        let levels = parts.noise.levels(tokens, self.like);
        let sigmas = self.path(&levels, steps, strength, tokens);
        (levels, sigmas)
    }

    /// The noise levels of a run that starts from a picture, or from noise alone without `strength`.
    ///
    /// diffusers takes the share `strength` of the steps, A1111 one step more. sdrun takes all steps, as ComfyUI does: the last of so
    /// many that they are that share.
    pub fn path(&self, levels: &Levels, steps: usize, strength: Option<f64>, tokens: usize) -> Vec<f64> {
        let all = |steps| self.sigmas(levels, steps, tokens);
        let Some(strength) = strength else { return all(steps) };
        let last = |all: Vec<f64>, steps: usize| all[all.len().saturating_sub(steps + 1)..].to_vec();
        match self.like {
            Some(Program::Diffusers) => last(all(steps), ((steps as f64 * strength) as usize).max(1)),
            Some(Program::A1111) => last(all(steps), (strength.min(0.999) * steps as f64) as usize + 1),
            _ if strength > 0.9999 => all(steps),
            _ => last(all((steps as f64 / strength) as usize), steps),
        }
    }

    /// The seed of picture number `picture`, from 0.
    pub fn seed_of(&self, picture: usize) -> u64 {
        if self.variation.is_some() { self.seed } else { self.seed.wrapping_add(picture as u64) }
    }

    /// The other seed of picture number `picture`, from 0.
    pub fn variation_of(&self, picture: usize) -> Option<Variation> {
        self.variation
            .map(|variation| Variation { seed: variation.seed.wrapping_add(picture as u64), ..variation })
    }

    /// The noise levels of `steps` steps for a picture of `tokens` tokens. Most end with 0.
    pub fn sigmas(&self, levels: &Levels, steps: usize, tokens: usize) -> Vec<f64> {
        let program = self.options.program;
        if let Some(own) = self.sampler.own_levels(program, levels, steps) {
            return own;
        }
        let is_solver = program == Program::Diffusers && self.sampler.is_solver();
        let spacing = match self.schedule {
            Schedule::Linspace if levels.shift().is_none() => Some(Spacing::Linspace),
            Schedule::Leading => Some(Spacing::Leading { offset: 1 }),
            _ => None,
        };
        let mut sigmas = match spacing.filter(|_| is_solver) {
            Some(spacing) => [diffusers::solver_sigmas(levels, spacing, steps), vec![0.0]].concat(),
            None => {
                let extra = self.sampler.drops_second_lowest(program);
                let mut sigmas = self.schedule.sigmas(levels, steps + usize::from(extra), program, tokens);
                if extra && sigmas.len() > 2 {
                    sigmas.remove(sigmas.len() - 2);
                }
                sigmas
            }
        };
        // A1111's form of one schedule does not end with 0.
        if let Some(last) = sigmas.last_mut().filter(|last| **last == 0.0) {
            *last = self.sampler.last_level(program, levels);
        }
        sigmas
    }

    /// Whether the first noise is that of a state with variance 1, scaled by `√(1 + σ²)` instead of σ ([`noised`]).
    ///
    /// ComfyUI does so at the model's highest level. diffusers does for every scheduler that keeps states at variance 1, and for
    /// the others with the spacing "leading". A1111 never does.
    ///
    /// [`noised`]: crate::prediction::noised
    pub fn starts_full(&self, levels: &Levels, first: f64) -> bool {
        use Sampler::{Dpm2, Dpm2Ancestral, Euler, EulerAncestral, Heun, Lms};
        match self.options.program {
            Program::A1111 => false,
            Program::ComfyUi => (first / levels.max() - 1.0).abs() < 1e-5,
            Program::Diffusers => {
                // diffusers' EDM schedulers do it too.
                let is_edm = matches!(self.prediction, Prediction::Edm { .. });
                let additive =
                    matches!(self.sampler, Euler | EulerAncestral | Heun | Dpm2 | Dpm2Ancestral | Lms);
                is_edm || !additive || self.schedule == Schedule::Leading
            }
        }
    }

    /// The settings of a picture with these seeds. `files` has the names of the model's files; its ControlNets are those of
    /// [`Parts::controls`], in the same order, and the factor of its upscaler is that of one run.
    pub fn record(&self, files: &Record, seed: u64, variation: Option<Variation>) -> Record {
        let control = |(net, control): (&metadata::ControlNet, &Control)| {
            let (start, end) = control.interval;
            metadata::ControlNet { strength: control.strength, start, end, ..net.clone() }
        };
        let upscaler = files.upscale.as_ref();
        let hires = self.hires.map(|hires| metadata::Hires {
            width: Some(hires.width),
            height: Some(hires.height),
            steps: hires.steps,
            upscaler: hires.upscale.label().map(str::to_string).or(upscaler.map(|file| file.name.clone())),
            denoising_strength: Some(hires.strength),
            ..metadata::Hires::default()
        });
        Record {
            prompt: self.prompt.clone(),
            negative: self.negative.clone(),
            width: Some(self.width),
            height: Some(self.height),
            steps: Some(self.steps),
            sampler: Some(self.sampler),
            schedule: Some(self.schedule),
            cfg_scale: Some(self.guidance.scale),
            cfg_rescale: Some(self.guidance.rescale).filter(|share| *share > 0.0),
            guidance: self.distilled_guidance,
            guidance_rule: Some(self.guidance.rule).filter(|rule| *rule != Rule::Standard),
            guidance_interval: Some(self.guidance.interval).filter(|interval| *interval != (0.0, 1.0)),
            syntax: Some(self.syntax)
                .filter(|syntax| *syntax != self.like.map(Syntax::of).unwrap_or_default()),
            inpaint: self.start.as_ref().and_then(|start| start.inpaint.as_ref()).map(|inpaint| {
                metadata::Inpaint {
                    blur: f64::from(inpaint.blur),
                    content: inpaint.content,
                    only_masked: inpaint.only_masked,
                }
            }),
            seed: Some(seed),
            variation,
            rng: Some(self.rng),
            seed_like: self.like,
            prediction: self.told_prediction,
            clip_skip: Some(self.clip_skip).filter(|layer| *layer > 1),
            denoising_strength: self.start.as_ref().map(|start| start.strength),
            reuse: self.reuse,
            tile: self.tile,
            refiner_start: files.refiner.as_ref().map(|_| self.refiner_start),
            controlnets: files.controlnets.iter().zip(&self.controls).map(control).collect(),
            hires,
            upscale: upscaler.filter(|_| self.upscale_repeats > 0).map(|file| metadata::Upscale {
                factor: file.factor.powi(self.upscale_repeats as i32),
                ..file.clone()
            }),
            ..files.clone()
        }
    }
}

impl Request {
    /// The settings of a record. Names of files, the picture to start from, and the factor of an upscaler, which
    /// [`Upscaler::repeats`] translates, are not part of it.
    pub fn of_record(record: &Record) -> Self {
        let hires = record.hires.as_ref().and_then(|hires| {
            let scaled = |side: Option<usize>| Some((side? as f64 * hires.scale?).round() as usize);
            Some(Hires {
                width: hires.width.or_else(|| scaled(record.width))?,
                height: hires.height.or_else(|| scaled(record.height))?,
                steps: hires.steps.filter(|steps| *steps > 0),
                strength: hires.denoising_strength?,
                upscale: hires.upscaler.as_deref().map(Upscale::named).unwrap_or_default(),
            })
        });
        Request {
            prompt: record.prompt.clone(),
            negative: record.negative.clone(),
            width: record.width,
            height: record.height,
            steps: record.steps,
            scale: record.cfg_scale,
            rescale: record.cfg_rescale.unwrap_or_default(),
            sampler: record.sampler,
            schedule: record.schedule,
            seed: record.seed.unwrap_or_default(),
            variation: record.variation,
            rng: record.rng,
            clip_skip: record.clip_skip,
            prediction: record.prediction,
            distilled_guidance: record.guidance,
            guidance_rule: record.guidance_rule,
            guidance_interval: record.guidance_interval,
            syntax: record.syntax,
            refiner_start: record.refiner_start,
            reuse: record.reuse,
            tile: record.tile,
            hires,
            like: record.seed_like,
            ..Request::default()
        }
    }
}
