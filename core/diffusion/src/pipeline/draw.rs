//! The steps from a request to pictures.

use super::{
    Error, Event, Parts, Picture, Resolved, Result,
    autoencoder::{Decoder, Encoder},
    beside::Beside,
    denoiser::{Course, Guided, Kept},
    encoder::{self, Conditions},
    hires::{Hires, Upscale},
    network::{Engines, Opener},
    source::{Drawn, Samples, Source},
    start::{Begun, Canvas},
};
use crate::{
    family,
    latent::{self, Rounding},
    picture::Fit,
    prediction::noised,
    program::Program,
    sampler::Path,
};
use image::RgbImage;
use sdrun::{Registry, abi::Host};
use std::cell::RefCell;

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
    let open = Opener { registry, engines, host, tell: &tell };
    let conditions = encoder::conditions(&open, parts, request, &request.passes())?;
    let canvas = request.start.as_ref().map(|start| Canvas::new(start, request)).transpose()?;
    let begun = match (&request.start, &canvas) {
        (Some(start), Some(canvas)) => Some(Begun::new(&open, parts, request, canvas, start)?),
        _ => None,
    };
    let size = [request.width, request.height];
    let first = Stage {
        open: &open,
        parts,
        request,
        conditions: &conditions,
        pass: 0,
        size,
        strength: request.start.as_ref().map(|start| start.strength),
        begun: begun.as_ref(),
        latents: None,
        canvas: canvas.as_ref(),
    };
    let mut finish = Finish { open: &open, parts, request, canvas: canvas.as_ref(), decoder: None };
    let Some(hires) = &request.hires else {
        return first.run(&mut |picture, latents| finish.picture(picture, &latents, size));
    };
    let mut small = Vec::new();
    first.run(&mut |_, latents| {
        small.push(latents);
        Ok(())
    })?;
    let large = enlarged(&open, parts, request, hires, small)?;
    let size = [hires.width, hires.height];
    let strength = Some(hires.strength);
    let second = Stage { pass: 1, size, strength, begun: None, latents: Some(&large), ..first };
    second.run(&mut |picture, latents| finish.picture(picture, &latents, size))
}

/// A pass of the sampler over all pictures.
struct Stage<'a> {
    open: &'a Opener<'a>,
    parts: &'a Parts,
    request: &'a Resolved,
    conditions: &'a Conditions,
    pass: usize,
    /// Width and height in pixels.
    size: [usize; 2],
    strength: Option<f64>,
    /// The picture to start from.
    begun: Option<&'a Begun>,
    /// The latents to start from, for each picture.
    latents: Option<&'a [Vec<f32>]>,
    canvas: Option<&'a Canvas>,
}

impl Stage<'_> {
    /// Runs it. `done` gets the latents of each picture. Before the last one, the denoiser's memory is free again.
    fn run(&self, done: &mut dyn FnMut(usize, Vec<f32>) -> Result<()>) -> Result<()> {
        let Stage { open, parts, request, conditions, pass, size, .. } = *self;
        let [width, height] = size;
        let shape = parts.family.latent.shape(width, height);
        let len = shape.iter().product();
        // Flow models count 16x16 pixels as a token, whatever they pack.
        let tokens = shape[1] * shape[2] / 4;
        let levels = &parts.noise.levels(tokens, request.like);
        let steps = conditions.steps.get(pass).map_or(&[][..], Vec::as_slice);
        let sigmas = &request.path(levels, steps.len(), self.strength, tokens);
        let path = Path { sigmas, levels };
        let beside = Beside::new(open, parts, request, self.canvas, size)?;
        let course = Course { parts, request, levels, sigmas, conditions, steps, shape };
        let mut denoiser = Some(Guided::open(open, course)?);
        for picture in 0..request.count {
            let Some(mut guided) = denoiser.take() else { break };
            let Drawn { sample, beside: shown, start: noise, mut steps } =
                Source::draw(request, picture, len, sigmas, self.samples());
            if let Some(beside) = &beside {
                guided.beside = beside.values(&parts.family.latent, shown.as_deref());
            }
            let clean = match (self.begun, self.latents.and_then(|all| all.get(picture))) {
                (Some(begun), _) => begun.clean(parts, &noise, sample.as_deref()),
                (None, Some(latents)) => latents.clone(),
                (None, None) => vec![0.0; len],
            };
            let first = sigmas.first().copied().unwrap_or_default();
            let full = request.starts_full(levels, first);
            // Where all is new, nothing of the picture is left. Programs differ; ComfyUI and A1111 leave it in.
            let is_new = self.strength == Some(1.0)
                && !matches!(request.like, Some(Program::ComfyUi | Program::A1111));
            let zeros = vec![0.0; len];
            let mut x = noised(levels.space(), first, full, if is_new { &zeros } else { &clean }, &noise);
            let late = request.like == Some(Program::Diffusers);
            // diffusers leaves it to models that see the mask.
            let is_seen = late && parts.family.beside.has_mask();
            let mask = self.begun.and_then(|begun| begun.mask.as_deref()).filter(|_| !is_seen);
            let mut kept = Kept { inner: &mut guided, levels, mask, clean: &clean, noise: &noise, late };
            let count = sigmas.len() - 1;
            let mut observe = |step: usize, latents: &[f32]| {
                open.tell(Event::Step { picture, pass, step, steps: count, latents });
            };
            request.sampler.run(&path, &request.options, &mut x, &mut kept, &mut steps, &mut observe)?;
            if picture + 1 < request.count {
                denoiser = Some(guided);
            } else {
                drop(guided);
            }
            done(picture, x)?;
        }
        Ok(())
    }

    /// What noise is drawn for besides the start and the steps.
    fn samples(&self) -> Samples {
        if self.request.like != Some(Program::Diffusers) {
            return Samples::default();
        }
        let beside = self.parts.family.beside;
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
}

impl Finish<'_> {
    fn picture(&mut self, picture: usize, latents: &[f32], [width, height]: [usize; 2]) -> Result<()> {
        let shape = self.parts.family.latent.shape(width, height);
        let decoder = match &mut self.decoder {
            Some(decoder) => decoder,
            none => none.insert(Decoder::open(self.open, self.parts, shape)?),
        };
        let values = decoder.decode(latents)?;
        let drawn = rgb(latent::to_bytes(&values, self.request.rounding()), width, height)?;
        let finished = match self.canvas {
            Some(canvas) => canvas.finished(drawn)?,
            None => drawn,
        };
        let (width, height) = (finished.width() as usize, finished.height() as usize);
        let seed = self.request.seed_of(picture);
        self.open.tell(Event::Picture(Picture { width, height, bytes: finished.into_raw(), seed }));
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
        let picture = rgb(bytes, request.width, request.height)?;
        pictures.push(Fit::Stretch.picture(&picture, hires.width as u32, hires.height as u32)?);
    }
    drop(decoder);
    let mut encoder = Encoder::open(open, parts, [hires.height, hires.width])?;
    let encode = |picture: &RgbImage| {
        let mut latents = encoder.encode(&latent::from_bytes(picture))?.drawn(None);
        latent.encoded(&mut latents);
        Ok(latents)
    };
    pictures.iter().map(encode).collect()
}

/// A picture of bytes `[height, width, 3]`.
fn rgb(bytes: Vec<u8>, width: usize, height: usize) -> Result<RgbImage> {
    RgbImage::from_raw(width as u32, height as u32, bytes)
        .ok_or_else(|| Error::invalid(format!("there are too few bytes for a picture of {width} x {height}")))
}
