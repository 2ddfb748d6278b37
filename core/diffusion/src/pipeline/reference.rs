//! Pictures that a model edits: their latents are further tokens beside those of the new picture (FLUX.1 Kontext).

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

/// The tokens of a picture: rows and columns, and the place of the first of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Grid {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Row and column.
    pub(super) at: [usize; 2],
}

/// Where the tokens of each picture are. Each picture goes below or to the right of the ones before it, whichever keeps the whole
/// smaller (the rule of ComfyUI and stable-diffusion.cpp).
pub(super) fn grids(pictures: &[RgbImage], parts: &Parts) -> Vec<Grid> {
    let cell = (parts.family.latent.factor * parts.family.pack) as u32;
    let sizes = pictures.iter().map(size).map(|side| side.map(|pixels| (pixels / cell) as usize));
    placed(sizes)
}

/// The same for sizes `[width, height]` in tokens.
fn placed(sizes: impl Iterator<Item = [usize; 2]>) -> Vec<Grid> {
    let (mut width, mut height) = (0, 0);
    let place = |[columns, rows]: [usize; 2]| {
        let at = if rows + height > columns + width { [0, width] } else { [height, 0] };
        height = height.max(rows + at[0]);
        width = width.max(columns + at[1]);
        Grid { rows, columns, at }
    };
    sizes.map(place).collect()
}

impl Grid {
    /// How many tokens.
    pub(super) fn len(&self) -> usize {
        self.rows * self.columns
    }

    /// For each token `picture`, its row and its column.
    pub(super) fn ids(self, picture: f32) -> impl Iterator<Item = f32> {
        let Grid { rows, columns, at: [top, left] } = self;
        (0..rows)
            .flat_map(move |y| (0..columns).flat_map(move |x| [picture, (top + y) as f32, (left + x) as f32]))
    }
}

/// The tokens' values; empty if there is no reference.
pub(super) fn encoded(open: &Opener<'_>, parts: &Parts, request: &Resolved) -> Result<Vec<f32>> {
    let mut tokens = Vec::new();
    for picture in &request.references {
        let [width, height] = size(picture);
        let picture = Fit::Stretch.picture(picture, width, height)?;
        let (width, height) = (width as usize, height as usize);
        let mut encoder = Encoder::new(open, parts, [width, height]);
        let mut latents = encoder.encode(&latent::from_bytes(&picture))?.drawn(None);
        parts.family.latent.encoded(&mut latents);
        tokens.extend(latent::packed(&latents, parts.family.latent.shape(width, height)));
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::{Grid, placed, size};
    use image::RgbImage;

    #[test]
    fn references_keep_their_shape() {
        assert_eq!(size(&RgbImage::new(64, 64)), [1024, 1024]);
        assert_eq!(size(&RgbImage::new(4000, 3000)), [1184, 880]);
        assert_eq!(size(&RgbImage::new(100, 4000)), [672, 1568]);
        assert_eq!(size(&RgbImage::new(1568, 672)), [1568, 672]);
    }

    #[test]
    fn further_references_lie_below_or_beside_the_others() {
        let grid = |columns, rows, at| Grid { rows, columns, at };
        // The second square could go below or beside the first, and the rule puts it below.
        let squares = [grid(4, 4, [0, 0]), grid(4, 4, [4, 0]), grid(4, 4, [0, 4])];
        assert_eq!(placed([[4, 4]; 3].into_iter()), squares);
        assert_eq!(placed([[2, 6], [2, 6]].into_iter()), [grid(2, 6, [0, 0]), grid(2, 6, [0, 2])]);
        assert_eq!(grid(2, 1, [3, 5]).ids(1.0).collect::<Vec<_>>(), [1.0, 3.0, 5.0, 1.0, 3.0, 6.0]);
    }
}
