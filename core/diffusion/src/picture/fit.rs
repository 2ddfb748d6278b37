//! Resizes pictures and masks to the size that a model works at.

use image::{
    ImageBuffer, Pixel, RgbImage,
    imageops::{FilterType, resize},
};

use super::{Mask, PictureError, check_size, placed};

list! {
    /// How a picture gets another size. These are A1111's resize modes, in the order of their numbers from 0.
    Fit {
        /// Changes the ratio of the sides.
        Stretch,
        /// Covers the size and cuts off the rest on two sides.
        Crop,
        /// Fits into the size and repeats the edges on two sides.
        Fill,
    }
}

impl Fit {
    /// Resizes a picture with Lanczos3.
    ///
    /// # Errors
    /// A size that [`PictureError::Size`] names. [`Fit::Crop`] also fails if the picture is too long for its cut-off part.
    pub fn picture(self, picture: &RgbImage, width: u32, height: u32) -> Result<RgbImage, PictureError> {
        self.resized(picture, (width, height), FilterType::Lanczos3)
    }

    /// Resizes a mask with a triangle filter, which adds no values outside those of the mask.
    ///
    /// # Errors
    /// As [`Self::picture`].
    pub fn mask(self, mask: &Mask, width: u32, height: u32) -> Result<Mask, PictureError> {
        self.resized(mask.grey(), (width, height), FilterType::Triangle).map(Mask::new)
    }

    fn resized<P: Pixel<Subpixel = u8> + 'static>(
        self,
        image: &ImageBuffer<P, Vec<u8>>,
        target: (u32, u32),
        filter: FilterType,
    ) -> Result<ImageBuffer<P, Vec<u8>>, PictureError> {
        check_size(image.width(), image.height())?;
        check_size(target.0, target.1)?;
        let (width, height) = self.scaled(image.dimensions(), target);
        check_size(width, height)?;
        let image = resize(image, width, height, filter);
        let start = |target: u32, side: u32| i64::from(target / 2) - i64::from(side / 2);
        Ok(placed(&image, (start(target.0, width), start(target.1, height)), target))
    }

    /// The size to which a picture is resized before it is cut or filled.
    fn scaled(self, (width, height): (u32, u32), target: (u32, u32)) -> (u32, u32) {
        let other = |a: u32, b: u32, c: u32| {
            u32::try_from(u64::from(a) * u64::from(b) / u64::from(c)).unwrap_or(u32::MAX).max(1)
        };
        let by_width = (target.0, other(height, target.0, width));
        let by_height = (other(width, target.1, height), target.1);
        let target_is_wider =
            u64::from(target.0) * u64::from(height) > u64::from(width) * u64::from(target.1);
        match self {
            Self::Stretch => target,
            Self::Crop if target_is_wider => by_width,
            Self::Fill if !target_is_wider => by_width,
            Self::Crop | Self::Fill => by_height,
        }
    }
}

#[cfg(test)]
mod tests {
    use image::{GrayImage, Rgb};
    use proptest::prelude::*;

    use super::*;
    use crate::picture::reference::{REFERENCE, bytes};

    #[test]
    fn modes_are_those_of_a1111_within_rounding() {
        let picture = REFERENCE.fit.picture.rgb();
        for case in &REFERENCE.fit.cases {
            for (fit, expected) in Fit::ALL.iter().zip(&case.modes) {
                let out = fit.picture(&picture, case.width, case.height).unwrap();
                let far = out.iter().zip(bytes(expected)).map(|(a, b)| a.abs_diff(b)).max().unwrap();
                assert!(far <= 1, "{fit:?} {} x {}: off by {far}", case.width, case.height);
            }
        }
    }

    #[test]
    fn impossible_sizes_are_errors() {
        let picture = RgbImage::new(4, 4);
        for (width, height) in [(0, 4), (4, 0), (MAX, 4), (u32::MAX, u32::MAX)] {
            let error = Fit::Stretch.picture(&picture, width, height).unwrap_err();
            assert_eq!(error, PictureError::Size { width, height });
        }
        assert!(Fit::Fill.picture(&RgbImage::new(0, 3), 8, 8).is_err());
        // 1 x 2000 pixels cover a square of 512 with a height of 1,024,000.
        let error = Fit::Crop.picture(&RgbImage::new(1, 2000), 512, 512).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a picture cannot be 512 x 1024000 pixels: each side must be 1 to 32768"
        );
    }
    const MAX: u32 = crate::picture::MAX_SIDE + 1;

    proptest! {
        #[test]
        fn one_colour_stays(size in (1u32..40, 1u32..40), target in (1u32..40, 1u32..40), colour: [u8; 3], mode in 0usize..3) {
            let picture = RgbImage::from_pixel(size.0, size.1, Rgb(colour));
            let out = Fit::ALL[mode].picture(&picture, target.0, target.1).unwrap();
            prop_assert_eq!(out.dimensions(), target);
            prop_assert!(out.pixels().all(|pixel| pixel.0 == colour));
        }

        #[test]
        fn the_same_size_changes_nothing(width in 1u32..20, height in 1u32..20, mode in 0usize..3, seed: u8) {
            let grey = GrayImage::from_fn(width, height, |x, y| [(x * 31 + y * 7) as u8 ^ seed].into());
            let mask = Mask::new(grey);
            prop_assert_eq!(Fit::ALL[mode].mask(&mask, width, height).unwrap(), mask);
        }
    }
}
