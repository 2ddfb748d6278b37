//! The steps from a request to pictures.

use super::{
    Error, Event, Part, Parts, Picture, Resolved, Result,
    denoiser::{Course, Guided},
    encoder,
    network::{Engines, Network, Opener},
    source::Source,
};
use crate::{
    latent::{self, Rounding},
    prediction::noised,
    program::Program,
    prompt::Pass,
    sampler::Path,
};
use sdrun::{Registry, Shapes, abi::Host};
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
    let family = parts.family;
    let shape = family.latent.shape(request.width, request.height);
    let conditions = encoder::conditions(&open, parts, request, &[Pass::First { steps: request.steps }])?;

    // Flow models count 16x16 pixels as a token, whatever they pack.
    let tokens = shape[1] * shape[2] / 4;
    let levels = parts.noise.levels(tokens, request.like);
    let sigmas = request.sigmas(&levels, request.steps, tokens);
    let steps = sigmas.len().saturating_sub(1);
    let path = Path { sigmas: &sigmas, levels: &levels };
    let first = sigmas.first().copied().unwrap_or_default();
    let len = shape.iter().product();

    let course = Course {
        parts,
        request,
        levels: &levels,
        sigmas: &sigmas,
        conditions: &conditions,
        steps: conditions.steps.first().map_or(&[], Vec::as_slice),
        shape,
    };
    let mut denoiser = Some(Guided::open(&open, course)?);
    let mut decoder = None;
    for picture in 0..request.count {
        let Some(mut guided) = denoiser.take() else { break };
        let (noise, mut source) = Source::new(request, picture, len, &sigmas);
        let full = request.starts_full(&levels, first);
        let mut x = noised(levels.space(), first, full, &vec![0.0; len], &noise);
        let mut observe =
            |step: usize, latents: &[f32]| open.tell(Event::Step { picture, step, steps, latents });
        request.sampler.run(&path, &request.options, &mut x, &mut guided, &mut source, &mut observe)?;
        if picture + 1 < request.count {
            denoiser = Some(guided);
        } else {
            // Frees its memory for the decoder.
            drop(guided);
        }
        let decoder = match &mut decoder {
            Some(decoder) => decoder,
            none => none.insert(open_decoder(&open, &parts.vae_decoder, shape)?),
        };
        family.latent.decoded(&mut x);
        let values = decoder.run_one(&[("latent_sample", &x)])?;
        open.tell(Event::Picture(finished(&values, request, picture)?));
    }
    Ok(())
}

/// A picture of the decoder's values.
fn finished(values: &[f32], request: &Resolved, picture: usize) -> Result<Picture> {
    let (width, height) = (request.width, request.height);
    if values.len() != 3 * width * height {
        return Err(Error::invalid(format!(
            "the autoencoder returned {} numbers for a picture of {width} x {height}, which has {}",
            values.len(),
            3 * width * height
        )));
    }
    let rounding = match request.options.program {
        Program::Diffusers => Rounding::Nearest,
        Program::A1111 | Program::ComfyUi => Rounding::Down,
    };
    Ok(Picture { width, height, bytes: latent::to_bytes(values, rounding), seed: request.seed_of(picture) })
}

fn open_decoder<'a>(
    open: &'a Opener<'a>,
    part: &'a Part,
    [channels, height, width]: [usize; 3],
) -> Result<Network<'a>> {
    open.network(part, Shapes::from([("latent_sample".into(), vec![1, channels, height, width])]))
}
