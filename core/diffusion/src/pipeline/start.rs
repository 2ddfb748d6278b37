//! Pictures to start from: img2img, inpainting, outpainting.

use super::{
    Error, Resolved, Result,
    autoencoder::{Encoded, Encoder},
    beside::cells,
    parts::Parts,
};
use crate::{
    latent,
    picture::{Fit, Mask, Region, fill, overlay},
};
use image::RgbImage;
use serde::{Deserialize, Serialize};

/// A picture to start from.
#[derive(Clone, Debug, PartialEq)]
pub struct Start {
    /// The picture, of any size.
    pub picture: RgbImage,
    /// How it is brought to the size of the request.
    pub fit: Fit,
    /// How much to change it: above 0, at most 1.
    pub strength: f64,
    /// Which part to change; `None` is all of it.
    pub inpaint: Option<Inpaint>,
}

/// Which part of a picture to change. Every other pixel keeps its bits.
#[derive(Clone, Debug, PartialEq)]
pub struct Inpaint {
    /// The part; it has the size of the picture.
    pub mask: Mask,
    /// How soft its edge is: the deviation of a Gaussian, in pixels.
    pub blur: f32,
    /// What is under the mask at the start.
    pub content: Content,
    /// Draw only the masked part and this many pixels around it, at the size of the request.
    pub only_masked: Option<u32>,
}

/// What is under a mask at the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Content {
    /// The picture.
    #[default]
    Original,
    /// Blurred surroundings.
    Surroundings,
    /// Noise.
    Noise,
    /// Nothing: latents of 0.
    Nothing,
}

impl Start {
    /// Fails if a setting is out of range.
    pub(super) fn check(&self) -> Result<()> {
        if !(self.strength > 0.0 && self.strength <= 1.0) {
            let message = format!("the strength {} is not above 0 and at most 1", self.strength);
            return Err(Error::invalid(message));
        }
        let Some(Inpaint { mask, .. }) = &self.inpaint else { return Ok(()) };
        if mask.grey().dimensions() != self.picture.dimensions() {
            let ((mask_width, mask_height), (width, height)) =
                (mask.grey().dimensions(), self.picture.dimensions());
            let message = format!(
                "the mask has {mask_width} x {mask_height} pixels and the picture {width} x {height}: give a mask of the \
                 picture's size"
            );
            return Err(Error::invalid(message));
        }
        if mask.grey().pixels().all(|pixel| pixel.0 == [0]) {
            return Err(Error::invalid(
                "the mask is black everywhere, so nothing would change: paint white what to draw anew",
            ));
        }
        Ok(())
    }
}

/// A picture and its mask at the size of the request, and how the result goes back.
pub(super) struct Canvas {
    /// What the autoencoder encodes.
    pub(super) picture: RgbImage,
    /// The blurred mask of `picture`.
    pub(super) mask: Option<Mask>,
    back: Option<Back>,
}

struct Back {
    original: RgbImage,
    mask: Mask,
    region: Region,
}

impl Canvas {
    pub(super) fn new(start: &Start, request: &Resolved) -> Result<Self> {
        let (width, height) = (request.width as u32, request.height as u32);
        let Some(Inpaint { mask, blur, content, only_masked }) = &start.inpaint else {
            let picture = start.fit.picture(&start.picture, width, height)?;
            return Ok(Canvas { picture, mask: None, back: None });
        };
        // The overlay happens at the size of the original only if a region of it is drawn.
        let (original, mask) = match only_masked {
            Some(_) => (start.picture.clone(), mask.clone()),
            None => (start.fit.picture(&start.picture, width, height)?, start.fit.mask(mask, width, height)?),
        };
        let mask = mask.blurred(*blur);
        let region = only_masked.and_then(|padding| Region::around(&mask, padding, (width, height)));
        let region = region.unwrap_or_else(|| Region::whole(&original));
        let mut picture = Fit::Fill.picture(&region.picture(&original)?, width, height)?;
        let drawn_mask = Fit::Fill.mask(&region.mask(&mask)?, width, height)?;
        if *content == Content::Surroundings {
            picture = fill(&picture, &drawn_mask)?;
        }
        Ok(Canvas { picture, mask: Some(drawn_mask), back: Some(Back { original, mask, region }) })
    }

    /// The whole result: what was drawn, over the original.
    pub(super) fn finished(&self, drawn: RgbImage) -> Result<RgbImage> {
        match &self.back {
            Some(Back { original, mask, region }) => Ok(overlay(original, &drawn, mask, *region)?),
            None => Ok(drawn),
        }
    }
}

/// What the denoiser and the sampler take of a start picture.
pub(super) struct Begun {
    /// Latents of the picture.
    pub(super) latents: Encoded,
    /// For each number of the latents, how much of it to draw anew; `None` is all of it.
    pub(super) mask: Option<Vec<f32>>,
    /// What is under the mask.
    pub(super) content: Content,
}

impl Begun {
    /// Encodes the picture.
    pub(super) fn new(
        parts: &Parts,
        request: &Resolved,
        canvas: &Canvas,
        start: &Start,
        encoder: &mut Encoder<'_>,
    ) -> Result<Self> {
        let [channels, height, width] = parts.family.latent.shape(request.width, request.height);
        let latents = encoder.encode(&latent::from_bytes(&canvas.picture))?;
        let mask = canvas.mask.as_ref();
        let mask = mask.map(|mask| cells(mask, request.like, [height, width]).repeat(channels));
        let content = start.inpaint.as_ref().map_or(Content::Original, |inpaint| inpaint.content);
        Ok(Begun { latents, mask, content })
    }

    /// Latents to start from. `noise` is the start noise.
    pub(super) fn clean(&self, parts: &Parts, noise: &[f32], sample: Option<&[f32]>) -> Vec<f32> {
        let mut clean = self.latents.drawn(sample);
        parts.family.latent.encoded(&mut clean);
        if let Some(mask) = &self.mask {
            let under = |at: usize| match self.content {
                Content::Noise => Some(noise[at]),
                Content::Nothing => Some(0.0),
                Content::Original | Content::Surroundings => None,
            };
            for (at, (value, share)) in clean.iter_mut().zip(mask).enumerate() {
                *value = under(at).filter(|_| *share > 0.5).unwrap_or(*value);
            }
        }
        clean
    }
}
