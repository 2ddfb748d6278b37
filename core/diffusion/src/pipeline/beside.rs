//! What some denoisers take beside the noisy latents: a mask and a picture, edges, depths.

use super::{
    Error, Resolved, Result,
    autoencoder::{Encoded, Encoder},
    parts::Parts,
    start::Canvas,
};
use crate::{
    family::Beside as Kind,
    latent::{self, Latent},
    picture::{Fit, Mask, masked},
    program::Program,
};
use image::{GrayImage, Luma, RgbImage, imageops};

/// These channels for pictures of one size.
pub(super) struct Beside {
    kind: Kind,
    /// The mask or the depths.
    plane: Vec<f32>,
    picture: Option<Encoded>,
}

impl Beside {
    /// Makes them for a picture of `[width, height]`; `None` if the family takes none. Without a mask, all of the picture is under it.
    pub(super) fn new(
        parts: &Parts,
        request: &Resolved,
        canvas: Option<&Canvas>,
        [width, height]: [usize; 2],
        encoder: &mut Encoder<'_>,
    ) -> Result<Option<Self>> {
        let kind = parts.family.beside;
        let [_, rows, columns] = parts.family.latent.shape(width, height);
        let (pixels_wide, pixels_high) = (width as u32, height as u32);
        let hint = || match request.controls.first() {
            Some(control) => Ok(Fit::Stretch.picture(&control.hint, pixels_wide, pixels_high)?),
            None => Err(Error::invalid(format!("{} draws after a picture: give one", parts.family.title))),
        };
        let (plane, picture) = match kind {
            Kind::Nothing => return Ok(None),
            Kind::Picture => (Vec::new(), Some(encoder.encode(&latent::from_bytes(&hint()?))?)),
            Kind::Depth => (depths(&hint()?, [rows, columns]), None),
            Kind::MaskAndPicture | Kind::PictureAndMask => {
                let (picture, mask) =
                    match canvas.and_then(|canvas| Some((&canvas.picture, canvas.mask.as_ref()?))) {
                        Some((picture, mask)) => (
                            Fit::Stretch.picture(picture, pixels_wide, pixels_high)?,
                            Fit::Stretch.mask(mask, pixels_wide, pixels_high)?,
                        ),
                        None => (
                            RgbImage::new(pixels_wide, pixels_high),
                            Mask::new(GrayImage::from_pixel(pixels_wide, pixels_high, Luma([255]))),
                        ),
                    };
                let plane = match kind {
                    Kind::PictureAndMask => mask.by_pixel(parts.family.latent.factor),
                    _ => cells(&mask, request.like, [rows, columns]),
                };
                (plane, Some(encoder.encode(&masked(&picture, &mask)?)?))
            }
        };
        Ok(Some(Beside { kind, plane, picture }))
    }

    /// Their values, `[channels, height, width]`. `sample` is noise for the latents of the picture.
    pub(super) fn values(&self, latent: &Latent, sample: Option<&[f32]>) -> Vec<f32> {
        let mut picture = self.picture.as_ref().map(|picture| picture.drawn(sample)).unwrap_or_default();
        latent.encoded(&mut picture);
        match self.kind {
            Kind::PictureAndMask => [picture, self.plane.clone()].concat(),
            _ => [self.plane.clone(), picture].concat(),
        }
    }
}

/// The mask of latents.
pub(super) fn cells(mask: &Mask, like: Option<Program>, size: [usize; 2]) -> Vec<f32> {
    match like {
        Some(Program::Diffusers) => mask.nearest(size),
        _ => mask.rounded(size),
    }
}

/// Depths of latents from a picture that is white where things are near. As in diffusers, they reach from -1 to 1.
fn depths(picture: &RgbImage, size: [usize; 2]) -> Vec<f32> {
    let grey = imageops::grayscale(picture);
    let plane: Vec<f32> = grey.as_raw().iter().map(|byte| f32::from(*byte)).collect();
    let mut depths = latent::cubic(&plane, [grey.height() as usize, grey.width() as usize], size);
    let (low, high) =
        depths.iter().fold((f32::MAX, f32::MIN), |(low, high), depth| (low.min(*depth), high.max(*depth)));
    let range = if high > low { high - low } else { 1.0 };
    depths.iter_mut().for_each(|depth| *depth = 2.0 * (*depth - low) / range - 1.0);
    depths
}
