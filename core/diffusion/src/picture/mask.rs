//! Masks of inpainting.

use image::{GrayImage, RgbImage};

use super::{
    PictureError, check_mask,
    lines::{blur, each_line, gaussian},
};
use crate::latent::from_bytes;

/// The widest blur. A1111 offers up to 64.
const MAX_SIGMA: f32 = 256.0;

/// The lowest grey value that counts as masked when a mask must be binary. All programs draw the line here.
const MASKED: u8 = 128;

/// Which pixels of a picture to repaint: 255 wholly, 0 not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask(GrayImage);

impl Mask {
    /// Takes a grey picture as a mask.
    pub fn new(grey: GrayImage) -> Self {
        Self(grey)
    }

    /// The grey picture.
    pub fn grey(&self) -> &GrayImage {
        &self.0
    }

    /// The mask of everything else.
    pub fn inverted(&self) -> Self {
        self.changed(|data, _| data.iter_mut().for_each(|value| *value = 255 - *value))
    }

    /// The mask with a margin, and binary, as ComfyUI's `grow_mask_by` makes it. A pixel is masked if one is in the square of
    /// `by` pixels around it. So the margin is half of `by`, and one less to the left and above if `by` is even. 0 changes
    /// nothing.
    pub fn grown(&self, by: u32) -> Self {
        if by == 0 {
            return self.clone();
        }
        let before = (by / 2) as usize;
        let after = by as usize - 1 - before;
        self.changed(|data, width| each_line(data, width, |line| grow(line, before, after)))
    }

    /// The mask with soft edges. `sigma` is A1111's "mask blur" in pixels; 256 is the most. 0 or less changes nothing.
    ///
    /// As in A1111, the result is that of OpenCV's `GaussianBlur` with a kernel of `2 ⌊2.5 σ + 0.5⌋ + 1` pixels, for rows and
    /// then for columns.
    pub fn blurred(&self, sigma: f32) -> Self {
        if sigma.is_nan() || sigma <= 0.0 {
            return self.clone();
        }
        let sigma = f64::from(sigma.min(MAX_SIGMA));
        let weights = gaussian(sigma, (2.5 * sigma + 0.5) as usize);
        self.changed(|data, width| each_line(data, width, |line| blur(line, &weights)))
    }

    /// The mask for latents `[height, width]`, 0 or 1, from the nearest pixel of each. This is diffusers' rule.
    pub fn nearest(&self, [height, width]: [usize; 2]) -> Vec<f32> {
        self.latents([height, width], |rows, columns| self.masked(columns.start, rows.start))
    }

    /// The mask for latents `[height, width]`, 0 or 1, from the average of the pixels under each. A1111 and ComfyUI round like
    /// this, after filters of their own.
    pub fn rounded(&self, [height, width]: [usize; 2]) -> Vec<f32> {
        self.latents([height, width], |rows, columns| {
            let count = rows.len() * columns.len();
            let pixels = rows.flat_map(|y| columns.clone().map(move |x| (x, y)));
            let sum: usize = pixels.map(|(x, y)| usize::from(self.value(x, y))).sum();
            2 * sum > 255 * count
        })
    }

    /// The mask, 0 or 1, as channels `[factor², height, width]` for latents that cover squares of `factor` pixels: one channel for
    /// each place in the square, by rows.
    pub fn by_pixel(&self, factor: usize) -> Vec<f32> {
        let (width, height) = (self.0.width() as usize / factor, self.0.height() as usize / factor);
        let places = (0..factor).flat_map(|dy| (0..factor).map(move |dx| (dy, dx)));
        let mut out = Vec::with_capacity(self.0.len());
        for (dy, dx) in places {
            let cells = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
            out.extend(
                cells.map(|(x, y)| f32::from(u8::from(self.masked(x * factor + dx, y * factor + dy)))),
            );
        }
        out
    }

    /// Asks for each latent whether it is masked, given the rows and columns of pixels under it.
    fn latents(
        &self,
        [height, width]: [usize; 2],
        masked: impl Fn(std::ops::Range<usize>, std::ops::Range<usize>) -> bool,
    ) -> Vec<f32> {
        let (pixels_wide, pixels_high) = (self.0.width() as usize, self.0.height() as usize);
        if pixels_wide == 0 || pixels_high == 0 {
            return vec![0.0; height * width];
        }
        let under = |at: usize, latents: usize, pixels: usize| {
            at * pixels / latents..((at + 1) * pixels).div_ceil(latents)
        };
        let places = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
        places
            .map(|(x, y)| {
                f32::from(u8::from(masked(under(y, height, pixels_high), under(x, width, pixels_wide))))
            })
            .collect()
    }

    fn value(&self, x: usize, y: usize) -> u8 {
        self.0.as_raw()[y * self.0.width() as usize + x]
    }

    fn masked(&self, x: usize, y: usize) -> bool {
        self.value(x, y) >= MASKED
    }

    /// A mask of the same size. `change` gets its rows and its width.
    fn changed(&self, change: impl FnOnce(&mut [u8], usize)) -> Self {
        let mut grey = self.0.clone();
        let width = grey.width() as usize;
        change(&mut grey, width);
        Self(grey)
    }
}

/// Sets each pixel to 255 if one from `before` pixels before it to `after` pixels after it is masked, else to 0.
fn grow(line: &mut [u8], before: usize, after: usize) {
    let source = line.to_vec();
    let mut ahead = source.iter().enumerate().peekable();
    let mut last = None;
    for (at, out) in line.iter_mut().enumerate() {
        while let Some((index, value)) = ahead.next_if(|(index, _)| *index <= at.saturating_add(after)) {
            last = if *value >= MASKED { Some(index) } else { last };
        }
        *out = if last.is_some_and(|index| index.saturating_add(before) >= at) { 255 } else { 0 };
    }
}

/// The picture that models with inpainting channels get beside the mask, `[3, height, width]` from -1 to 1. Masked pixels
/// are 0, which is middle grey.
///
/// # Errors
/// A mask of another size, or an empty picture.
pub fn masked(picture: &RgbImage, mask: &Mask) -> Result<Vec<f32>, PictureError> {
    check_mask(picture, mask)?;
    let mut out = from_bytes(picture);
    for channel in out.chunks_exact_mut(mask.0.len()) {
        for (value, grey) in channel.iter_mut().zip(mask.0.iter()) {
            *value = if *grey >= MASKED { 0.0 } else { *value };
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::picture::reference::{REFERENCE, bytes};

    #[test]
    fn blurs_are_those_of_opencv() {
        for case in &REFERENCE.blur {
            assert_eq!(
                case.mask.mask().blurred(case.sigma).grey().as_raw(),
                &bytes(&case.bytes),
                "σ {}",
                case.sigma
            );
        }
    }

    #[test]
    fn growth_is_that_of_comfy() {
        for case in &REFERENCE.grow {
            assert_eq!(
                case.mask.mask().grown(case.by).grey().as_raw(),
                &bytes(&case.bytes),
                "by {}",
                case.by
            );
        }
    }

    #[test]
    fn latents_are_nearest_or_rounded() {
        let mask = REFERENCE.latents.mask.mask();
        let floats = |digits: &str| bytes(digits).into_iter().map(f32::from).collect::<Vec<_>>();
        for case in &REFERENCE.latents.nearest {
            assert_eq!(mask.nearest([case.height, case.width]), floats(&case.bytes));
        }
        for case in &REFERENCE.latents.averages {
            assert_eq!(mask.rounded([case.height, case.width]), floats(&case.bytes));
        }
    }

    #[test]
    fn masked_pixels_are_middle_grey() {
        let picture = RgbImage::from_raw(2, 1, vec![0, 255, 51, 0, 255, 51]).unwrap();
        let mask = Mask::new(GrayImage::from_raw(2, 1, vec![128, 127]).unwrap());
        assert_eq!(masked(&picture, &mask).unwrap(), [0.0, -1.0, 0.0, 1.0, 0.0, -0.6]);
        let error = masked(&picture, &Mask::new(GrayImage::new(1, 1))).unwrap_err().to_string();
        assert_eq!(error, "the mask is 1 x 1 pixels, but its picture 2 x 1: resize one of them");
    }

    fn masks() -> impl Strategy<Value = Mask> {
        (1u32..24, 1u32..24).prop_flat_map(|(width, height)| {
            let value = prop_oneof![3 => Just(0u8), 1 => any::<u8>()];
            prop::collection::vec(value, (width * height) as usize)
                .prop_map(move |data| Mask::new(GrayImage::from_raw(width, height, data).unwrap()))
        })
    }

    proptest! {
        #[test]
        fn inverting_twice_changes_nothing(mask in masks()) {
            prop_assert_eq!(mask.inverted().inverted(), mask);
        }

        #[test]
        fn any_number_is_taken(mask in masks(), by: u32, sigma: f32, height in 0usize..9, width in 0usize..9) {
            prop_assert_eq!(mask.grown(by).grey().dimensions(), mask.grey().dimensions());
            prop_assert_eq!(mask.blurred(sigma).grey().dimensions(), mask.grey().dimensions());
            prop_assert_eq!(mask.nearest([height, width]).len(), height * width);
            prop_assert_eq!(mask.rounded([height, width]).len(), height * width);
        }

        #[test]
        fn growth_never_unmasks(mask in masks(), by in 1u32..9) {
            let grown = mask.grown(by);
            prop_assert!(mask.grey().iter().zip(grown.grey().iter()).all(|(old, new)| *old < MASKED || *new == 255));
        }

        #[test]
        fn both_rules_agree_without_scaling(mask in masks()) {
            let size = [mask.grey().height() as usize, mask.grey().width() as usize];
            prop_assert_eq!(mask.nearest(size), mask.rounded(size));
        }
    }

    #[test]
    fn empty_masks_stay_empty() {
        let empty = Mask::new(GrayImage::new(0, 5));
        assert_eq!(empty.grown(3).blurred(2.0).inverted(), empty);
        assert_eq!(empty.rounded([1, 2]), [0.0, 0.0]);
    }
}
