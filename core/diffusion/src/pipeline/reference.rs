//! A picture that a model edits: its latents are further tokens beside those of the new picture (FLUX.1 Kontext).

use super::{Resolved, Result, autoencoder::Encoder, network::Opener, parts::Parts};
use crate::{latent, picture::Fit};
use image::RgbImage;

/// Widths that the model was trained with, from the tallest to the widest picture. The heights are the same in the opposite order.
const SIDES: [u32; 17] =
    [672, 688, 720, 752, 800, 832, 880, 944, 1024, 1104, 1184, 1248, 1328, 1392, 1456, 1504, 1568];

/// The trained size `[width, height]` whose shape is closest to that of a picture (diffusers' and ComfyUI's rule).
pub(super) fn size(picture: &RgbImage) -> [u32; 2] {
    let shape = f64::from(picture.width()) / f64::from(picture.height().max(1));
    let sizes = SIDES.iter().zip(SIDES.iter().rev()).map(|(width, height)| [*width, *height]);
    let far = |[width, height]: &[u32; 2]| (shape - f64::from(*width) / f64::from(*height)).abs();
    sizes.min_by(|a, b| far(a).total_cmp(&far(b))).unwrap_or([1024, 1024])
}

/// Tokens of the reference `[rows, columns]`, or 0 if there is none.
pub(super) fn tokens(request: &Resolved, parts: &Parts) -> [usize; 2] {
    let family = parts.family;
    let cell = (family.latent.factor * family.pack) as u32;
    request.reference.as_ref().map_or([0, 0], |picture| {
        let [width, height] = size(picture);
        [(height / cell) as usize, (width / cell) as usize]
    })
}

/// The tokens' values; empty if there is no reference.
pub(super) fn encoded(open: &Opener<'_>, parts: &Parts, request: &Resolved) -> Result<Vec<f32>> {
    let Some(picture) = &request.reference else { return Ok(Vec::new()) };
    let [width, height] = size(picture);
    let picture = Fit::Stretch.picture(picture, width, height)?;
    let (width, height) = (width as usize, height as usize);
    let mut encoder = Encoder::new(open, parts, [width, height]);
    let mut latents = encoder.encode(&latent::from_bytes(&picture))?.drawn(None);
    parts.family.latent.encoded(&mut latents);
    Ok(latent::packed(&latents, parts.family.latent.shape(width, height)))
}

#[cfg(test)]
mod tests {
    use super::size;
    use image::RgbImage;

    #[test]
    fn references_keep_their_shape() {
        assert_eq!(size(&RgbImage::new(64, 64)), [1024, 1024]);
        assert_eq!(size(&RgbImage::new(4000, 3000)), [1184, 880]);
        assert_eq!(size(&RgbImage::new(100, 4000)), [672, 1568]);
        assert_eq!(size(&RgbImage::new(1568, 672)), [1568, 672]);
    }
}
