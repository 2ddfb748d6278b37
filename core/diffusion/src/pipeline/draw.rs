//! The steps from a request to pictures.

use super::{
    Error, Event, Parts, Picture, Resolved, Result,
    autoencoder::{Decoder, Encoder},
    beside::Beside,
    denoiser::{Course, Guided, Kept},
    encoder::{self, Conditions},
    hires::{Hires, Upscale},
    network::{Engines, Opener},
    reference,
    seen::Seen,
    source::{Drawn, Samples, Source},
    start::{Begun, Canvas},
    upscale::Enlarger,
};
use crate::{
    family,
    latent::{self, Rounding},
    picture::Fit,
    prediction::noised,
    program::Program,
    reuse::Cache,
    sampler::{Path, Space},
    schedule::Levels,
};
use image::RgbImage;
use sdrun::{Registry, abi::Host};
use std::{
    cell::{Cell, RefCell},
    ops::Range,
};

/// Draws the pictures of a request. `event` receives progress, and each picture as soon as it is done. `host` receives logs and can
/// cancel.
///
/// # Errors
/// The first error. `event` has received the pictures that were done before it.
pub fn generate(
    registry: &Registry,
    parts: &Parts,
    request: &Resolved,
    engines: &Engines<'_>,
    host: &dyn Host,
    event: &mut dyn FnMut(Event<'_>),
) -> Result<()> {
    let event = RefCell::new(event);
    let tell = |happened: Event<'_>| (event.borrow_mut())(happened);
    let running = Cell::default();
    let open = Opener { registry, engines, host, tell: &tell, tile: request.tile, running };
    let passes = request.passes();
    let conditions = encoder::conditions(&open, parts, request, &passes)?;
    let refined = parts.refiner.as_deref().map(|refiner| -> Result<_> {
        let request = request.of_refiner(refiner);
        let conditions = encoder::conditions(&open, refiner, &request, &passes)?;
        Ok((refiner, request, conditions))
    });
    let refined = refined.transpose()?;
    let canvas = request.start.as_ref().map(|start| Canvas::new(start, request)).transpose()?;
    let size = [request.width, request.height];
    let mut encoder = Encoder::new(&open, parts, size);
    let begun = match (&request.start, &canvas) {
        (Some(start), Some(canvas)) => Some(Begun::new(parts, request, canvas, start, &mut encoder)?),
        _ => None,
    };
    let beside = Beside::new(parts, request, canvas.as_ref(), size, &mut encoder)?;
    drop(encoder);
    let reference = &reference::encoded(&open, parts, request)?;
    let base = Model { parts, request, conditions: &conditions, beside: beside.as_ref(), reference };
    let refiner = refined.as_ref().map(|(parts, request, conditions)| Model {
        parts,
        request,
        conditions,
        beside: None,
        reference: &[],
    });
    let first = Stage {
        open: &open,
        base,
        refiner: refiner.filter(|_| request.hires.is_none()),
        pass: 0,
        size,
        strength: request.start.as_ref().map(|start| start.strength),
        begun: begun.as_ref(),
        latents: None,
    };
    let enlarger = parts.upscaler.as_ref().map(|upscaler| Enlarger::new(&open, upscaler));
    let mut finish = Finish { open: &open, parts, request, canvas: canvas.as_ref(), decoder: None, enlarger };
    let Some(hires) = &request.hires else {
        return first.run(&mut |picture, latents| finish.picture(picture, &latents, size));
    };
    let mut small = Vec::new();
    first.run(&mut |_, latents| {
        small.push(latents);
        Ok(())
    })?;
    let size = [hires.width, hires.height];
    let mut encoder = Encoder::new(&open, parts, size);
    let large = enlarged(&open, parts, request, hires, small, &mut encoder)?;
    let beside = Beside::new(parts, request, canvas.as_ref(), size, &mut encoder)?;
    drop(encoder);
    let base = Model { beside: beside.as_ref(), ..base };
    let strength = Some(hires.strength);
    let second =
        Stage { pass: 1, base, refiner, size, strength, begun: None, latents: Some(&large), ..first };
    second.run(&mut |picture, latents| finish.picture(picture, &latents, size))
}

/// A model with its request and what it takes besides the noisy latents.
#[derive(Clone, Copy)]
struct Model<'a> {
    parts: &'a Parts,
    request: &'a Resolved,
    conditions: &'a Conditions,
    beside: Option<&'a Beside>,
    /// The tokens of the pictures that the model edits.
    reference: &'a [f32],
}

/// A pass of the sampler over all pictures.
struct Stage<'a> {
    open: &'a Opener<'a>,
    base: Model<'a>,
    /// The model of the last steps.
    refiner: Option<Model<'a>>,
    pass: usize,
    /// Width and height in pixels.
    size: [usize; 2],
    strength: Option<f64>,
    /// The picture to start from.
    begun: Option<&'a Begun>,
    /// The latents to start from, for each picture.
    latents: Option<&'a [Vec<f32>]>,
}

/// A picture between two models: its latents and the rest of its noise.
struct Paused {
    latents: Vec<f32>,
    noise: Source,
}

impl Stage<'_> {
    /// Runs it. `done` gets the latents of each picture.
    fn run(&self, done: &mut dyn FnMut(usize, Vec<f32>) -> Result<()>) -> Result<()> {
        let Model { parts, request, conditions, .. } = self.base;
        let steps = conditions.steps.get(self.pass).map_or(0, Vec::len);
        let (levels, sigmas) = &request.levels(parts, self.size, steps, self.strength);
        let count = sigmas.len() - 1;
        let mut finish = |picture, paused: Paused| done(picture, paused.latents);
        let Some(refiner) = self.refiner else {
            return self.walk(self.base, levels, sigmas, 0..count, Vec::new(), &mut finish);
        };
        // A step belongs to the model under which it begins.
        let switch = ((count as f64 * request.refiner_start).ceil() as usize).min(count);
        let mut paused = Vec::new();
        let mut pause = |_, state| {
            paused.push(state);
            Ok(())
        };
        self.walk(self.base, levels, sigmas, 0..switch, Vec::new(), &mut pause)?;
        self.walk(refiner, levels, sigmas, switch..count, paused, &mut finish)
    }

    fn shape(&self) -> [usize; 3] {
        let [width, height] = self.size;
        self.base.parts.family.latent.shape(width, height)
    }

    /// Some steps of all pictures, with one model. `paused` has the pictures if they are not new. Before the last call of `done`, the
    /// denoiser's memory is free again.
    fn walk(
        &self,
        model: Model<'_>,
        levels: &Levels,
        sigmas: &[f64],
        range: Range<usize>,
        paused: Vec<Paused>,
        done: &mut dyn FnMut(usize, Paused) -> Result<()>,
    ) -> Result<()> {
        let Stage { open, pass, .. } = *self;
        let Model { parts, request, conditions, beside, reference } = model;
        let (shape, late) = (self.shape(), request.like == Some(Program::Diffusers));
        let len = shape.iter().product();
        let steps = conditions.steps.get(pass).map_or(&[][..], Vec::as_slice);
        let course = Course { parts, request, levels, sigmas, conditions, steps, shape };
        let mut guided = Guided::open(open, course)?;
        guided.reference = reference.to_vec();
        let mut denoiser = Some(guided);
        let mut paused = paused.into_iter();
        for picture in 0..request.count {
            let Some(mut guided) = denoiser.take() else { break };
            guided.cache = request.reuse.map(Cache::new);
            let Drawn { sample, beside: shown, start: noise, steps: fresh } =
                Source::draw(request, picture, shape, sigmas, self.samples());
            if let Some(beside) = beside {
                guided.beside = beside.values(&parts.family.latent, shown.as_deref());
            }
            let clean = match (self.begun, self.latents.and_then(|all| all.get(picture))) {
                (Some(begun), _) => begun.clean(parts, &noise, sample.as_deref()),
                (None, Some(latents)) => latents.clone(),
                (None, None) => vec![0.0; len],
            };
            let Paused { latents: mut x, noise: mut steps } = paused.next().unwrap_or_else(|| Paused {
                latents: self.begin(levels, sigmas, &clean, &noise),
                noise: fresh,
            });
            // diffusers leaves it to models that see the mask.
            let is_seen = late && parts.family.beside.has_mask();
            let mask = self.begun.and_then(|begun| begun.mask.as_deref()).filter(|_| !is_seen);
            let late = late && range.start == 0;
            let kept = Kept { inner: &mut guided, levels, mask, clean: &clean, noise: &noise, late };
            let last = RefCell::new(Vec::new());
            let mut seen = Seen { inner: kept, last: &last };
            let count = sigmas.len() - 1;
            let mut observe = |step: usize, latents: &[f32]| {
                let (step, clean) = (range.start + step, &last.borrow());
                let running = open.running.take();
                open.tell(Event::Step { picture, pass, step, steps: count, shape, latents, clean, running });
            };
            open.running.take();
            let path = Path { sigmas: &sigmas[range.start..=range.end], levels };
            if !range.is_empty() {
                request.sampler.run(&path, &request.options, &mut x, &mut seen, &mut steps, &mut observe)?;
            }
            if picture + 1 < request.count {
                denoiser = Some(guided);
            } else {
                drop(guided);
            }
            done(picture, Paused { latents: x, noise: steps })?;
        }
        Ok(())
    }

    /// The first state of a picture.
    fn begin(&self, levels: &Levels, sigmas: &[f64], clean: &[f32], noise: &[f32]) -> Vec<f32> {
        let request = self.base.request;
        let first = sigmas.first().copied().unwrap_or_default();
        // Where all is new, nothing of the picture is left. Programs differ; ComfyUI and A1111 leave it in.
        let is_new =
            self.strength == Some(1.0) && !matches!(request.like, Some(Program::ComfyUi | Program::A1111));
        // A flow model's state is noise alone only where there is no picture.
        let is_noise = levels.space() == Space::Additive || is_new || self.strength.is_none();
        let full = is_noise && request.starts_full(levels, first);
        let zeros = vec![0.0; clean.len()];
        noised(levels.space(), first, full, if is_new { &zeros } else { clean }, noise)
    }

    /// What noise is drawn for besides the start and the steps.
    fn samples(&self) -> Samples {
        if self.base.request.like != Some(Program::Diffusers) {
            return Samples::default();
        }
        let beside = self.base.parts.family.beside;
        Samples {
            // An inpainting UNet needs no latents of a picture that is all new.
            start: self.begun.is_some()
                && !(self.strength == Some(1.0) && beside == family::Beside::MaskAndPicture),
            before: beside == family::Beside::Picture,
            after: self.begun.is_some_and(|begun| begun.mask.is_some()),
        }
    }
}

/// The way from latents to finished pictures.
struct Finish<'a> {
    open: &'a Opener<'a>,
    parts: &'a Parts,
    request: &'a Resolved,
    canvas: Option<&'a Canvas>,
    decoder: Option<Decoder<'a>>,
    enlarger: Option<Enlarger<'a>>,
}

impl Finish<'_> {
    fn picture(&mut self, picture: usize, latents: &[f32], [width, height]: [usize; 2]) -> Result<()> {
        let shape = self.parts.family.latent.shape(width, height);
        let decoder = match &mut self.decoder {
            Some(decoder) => decoder,
            none => none.insert(Decoder::open(self.open, self.parts, shape)?),
        };
        self.open.tell(Event::Decoding { picture });
        let values = decoder.decode(latents)?;
        let drawn = rgb(latent::to_bytes(&values, self.request.rounding()), width, height)?;
        let finished = match self.canvas {
            Some(canvas) => canvas.finished(drawn)?,
            None => drawn,
        };
        if picture + 1 == self.request.count {
            // The upscaler may need its memory.
            self.decoder = None;
        }
        let finished = match &mut self.enlarger {
            Some(enlarger) => enlarger.enlarge(finished, self.request.upscale_repeats, picture)?,
            None => finished,
        };
        let (width, height) = (finished.width() as usize, finished.height() as usize);
        let (seed, variation) = (self.request.seed_of(picture), self.request.variation_of(picture));
        let bytes = finished.into_raw();
        self.open.tell(Event::Picture(Picture { width, height, bytes, seed, variation }));
        Ok(())
    }
}

/// The latents of the second pass.
fn enlarged(
    open: &Opener<'_>,
    parts: &Parts,
    request: &Resolved,
    hires: &Hires,
    small: Vec<Vec<f32>>,
    encoder: &mut Encoder<'_>,
) -> Result<Vec<Vec<f32>>> {
    let latent = &parts.family.latent;
    let from = latent.shape(request.width, request.height);
    let [_, height, width] = latent.shape(hires.width, hires.height);
    if hires.upscale == Upscale::Latent {
        return Ok(small.iter().map(|latents| latent::resized(latents, from, [height, width])).collect());
    }
    let mut pictures = Vec::new();
    let mut decoder = Decoder::open(open, parts, from)?;
    for latents in &small {
        let bytes = latent::to_bytes(&decoder.decode(latents)?, Rounding::Nearest);
        pictures.push(rgb(bytes, request.width, request.height)?);
    }
    drop(decoder);
    let mut enlarger = parts.upscaler.as_ref().map(|upscaler| Enlarger::new(open, upscaler));
    for (number, picture) in pictures.iter_mut().enumerate() {
        if let (Upscale::Model, Some(enlarger)) = (hires.upscale, &mut enlarger) {
            *picture = enlarger.enlarge(std::mem::take(picture), 1, number)?;
        }
        *picture = Fit::Stretch.picture(picture, hires.width as u32, hires.height as u32)?;
    }
    drop(enlarger);
    let encode = |picture: &RgbImage| {
        let mut latents = encoder.encode(&latent::from_bytes(picture))?.drawn(None);
        latent.encoded(&mut latents);
        Ok(latents)
    };
    pictures.iter().map(encode).collect()
}

/// A picture of bytes `[height, width, 3]`.
pub(super) fn rgb(bytes: Vec<u8>, width: usize, height: usize) -> Result<RgbImage> {
    RgbImage::from_raw(width as u32, height as u32, bytes)
        .ok_or_else(|| Error::invalid(format!("there are too few bytes for a picture of {width} x {height}")))
}
