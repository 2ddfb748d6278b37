//! What lies under a mask before it is repainted.

use image::{Rgb, RgbImage};

use super::{Mask, PictureError, check_mask, lines::each_line};

/// Standard deviations of the blurs, and how often each is laid over what is there.
const LAYERS: [(f64, usize); 6] = [(256.0, 1), (64.0, 1), (16.0, 2), (4.0, 4), (2.0, 2), (0.0, 1)];

/// Fills the masked pixels with the colours around them, as A1111's "masked content: fill" does.
///
/// From wide to narrow, blurs of what is not masked are laid over one another. Pixels where the mask is 0 keep their bytes. A
/// picture that is masked everywhere becomes black.
///
/// # Errors
/// A mask of another size, or an empty picture.
pub fn fill(picture: &RgbImage, mask: &Mask) -> Result<RgbImage, PictureError> {
    check_mask(picture, mask)?;
    // Red, green and blue times the share that is not masked, and this share.
    let source: Vec<[f32; 4]> = picture
        .pixels()
        .zip(mask.grey().iter())
        .map(|(pixel, grey)| {
            let share = f32::from(255 - grey) / 255.0;
            let [red, green, blue] = pixel.0.map(|value| f32::from(value) * share);
            [red, green, blue, share]
        })
        .collect();
    let mut out = vec![[0.0; 4]; source.len()];
    for (sigma, times) in LAYERS {
        let mut layer = source.clone();
        each_line(&mut layer, picture.width() as usize, |line| blur(line, sigma));
        for _ in 0..times {
            for (below, above) in out.iter_mut().zip(&layer) {
                let rest = 1.0 - above[3];
                *below = std::array::from_fn(|i| above[i] + rest * below[i]);
            }
        }
    }
    let mut values = out.into_iter();
    Ok(RgbImage::from_fn(picture.width(), picture.height(), |_, _| {
        let [red, green, blue, share] = values.next().unwrap_or_default();
        Rgb([red, green, blue].map(|value| if share > 0.0 { (value / share).round() as u8 } else { 0 }))
    }))
}

/// Approximates a Gaussian as Pillow does: three box filters whose outermost weights are fractions (Gwosdek et al., 2011). The
/// border repeats the outermost pixel.
fn blur(line: &mut [[f32; 4]], sigma: f64) {
    if sigma <= 0.0 || line.is_empty() {
        return;
    }
    let variance = sigma * sigma / 3.0;
    let radius = (((12.0 * variance + 1.0).sqrt() - 1.0) / 2.0).floor();
    let edge = (2.0 * radius + 1.0) * (radius * (radius + 1.0) - 3.0 * variance)
        / (6.0 * (variance - (radius + 1.0) * (radius + 1.0)));
    let scale = 1.0 / (2.0 * (radius + edge) + 1.0);
    let radius = radius as isize;
    for _ in 0..3 {
        let source = line.to_vec();
        let at = |place: isize, channel: usize| {
            f64::from(source[place.clamp(0, source.len() as isize - 1) as usize][channel])
        };
        for channel in 0..4 {
            let mut sum: f64 = (-radius..=radius).map(|place| at(place, channel)).sum();
            for (place, out) in (0..).zip(line.iter_mut()) {
                let ends = at(place - radius - 1, channel) + at(place + radius + 1, channel);
                out[channel] = ((sum + edge * ends) * scale) as f32;
                sum += at(place + radius + 1, channel) - at(place - radius, channel);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use image::GrayImage;
    use proptest::prelude::*;

    use super::*;
    use crate::picture::reference::{REFERENCE, bytes};

    /// Pillow keeps layers as bytes, so a thin one has few colours. Here they are exact.
    #[test]
    fn fills_are_close_to_those_of_a1111() {
        for case in &REFERENCE.fill {
            let out = fill(&case.picture.rgb(), &case.mask.mask()).unwrap();
            let far: Vec<u8> = out.iter().zip(bytes(&case.bytes)).map(|(a, b)| a.abs_diff(b)).collect();
            let mean = far.iter().map(|far| f64::from(*far)).sum::<f64>() / far.len() as f64;
            assert!(far.iter().all(|far| *far <= 4) && mean < 0.5, "mean {mean}, {:?}", far.iter().max());
        }
    }

    #[test]
    fn a_wholly_masked_picture_is_black() {
        let picture = RgbImage::from_pixel(3, 2, Rgb([200, 100, 50]));
        let mask = Mask::new(GrayImage::from_pixel(3, 2, [255].into()));
        assert_eq!(fill(&picture, &mask).unwrap(), RgbImage::new(3, 2));
    }

    proptest! {
        #[test]
        fn fills_lie_between_the_colours_around(
            data in prop::collection::vec((any::<[u8; 3]>(), prop_oneof![Just(0u8), Just(255u8)]), 4 * 5),
        ) {
            let pixels = data.iter().flat_map(|(colour, _)| *colour).collect();
            let picture = RgbImage::from_raw(4, 5, pixels).unwrap();
            let mask = Mask::new(GrayImage::from_raw(4, 5, data.iter().map(|(_, grey)| *grey).collect()).unwrap());
            let out = fill(&picture, &mask).unwrap();
            let shown: Vec<_> = data.iter().filter(|(_, grey)| *grey == 0).map(|(colour, _)| *colour).collect();
            for (pixel, (colour, grey)) in out.pixels().zip(&data) {
                prop_assert!(*grey == 255 || pixel.0 == *colour);
                for (channel, value) in pixel.0.iter().enumerate() {
                    let around = || shown.iter().map(|colour| colour[channel]);
                    let range = around().min().unwrap_or(0)..=around().max().unwrap_or(0);
                    prop_assert!(range.contains(value));
                }
            }
        }
    }
}
