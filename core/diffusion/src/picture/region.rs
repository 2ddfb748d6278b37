//! Repaints only a part of a picture, at a size of its own.

use image::{ImageBuffer, Pixel, RgbImage, imageops::crop_imm};

use super::{Fit, Mask, PictureError, check_mask};

/// A rectangle in a picture, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its leftmost column.
    pub x: u32,
    /// Its topmost row.
    pub y: u32,
    /// Columns.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

impl Region {
    /// The whole of a picture.
    pub fn whole(picture: &RgbImage) -> Self {
        Self { x: 0, y: 0, width: picture.width(), height: picture.height() }
    }

    /// The region to repaint for A1111's "only masked": all pixels of the mask above 0 and `padding` more on each side, grown
    /// to the ratio of the size `target` as far as the picture has room. `None` if no pixel is masked.
    ///
    /// A1111 uses a blurred mask here and a padding of 32. It brings the region to `target` with [`Fit::Fill`].
    pub fn around(mask: &Mask, padding: u32, target: (u32, u32)) -> Option<Self> {
        let (width, height) = mask.grey().dimensions();
        let (left, top, right, bottom) = bounds(mask)?;
        let span = |first: u32, last: u32, side: u32| {
            (first.saturating_sub(padding), last.saturating_add(1).saturating_add(padding).min(side))
        };
        let (mut columns, mut rows) = (span(left, right, width), span(top, bottom, height));
        let length = |(start, end): (u32, u32)| f64::from(end - start);
        let ratio = f64::from(target.0) / f64::from(target.1);
        // In floating point, for A1111's rounding.
        if length(columns) / length(rows) > ratio {
            rows = longer(rows, (length(columns) / ratio - length(rows)) as u32, height);
        } else {
            columns = longer(columns, (length(rows) * ratio - length(columns)) as u32, width);
        }
        Some(Self { x: columns.0, y: rows.0, width: columns.1 - columns.0, height: rows.1 - rows.0 })
    }

    /// This part of a picture.
    ///
    /// # Errors
    /// An empty region, or one that is not inside the picture.
    pub fn picture(&self, picture: &RgbImage) -> Result<RgbImage, PictureError> {
        self.cut(picture)
    }

    /// This part of a mask.
    ///
    /// # Errors
    /// As [`Self::picture`].
    pub fn mask(&self, mask: &Mask) -> Result<Mask, PictureError> {
        self.cut(mask.grey()).map(Mask::new)
    }

    fn cut<P: Pixel + 'static>(
        &self,
        image: &ImageBuffer<P, Vec<P::Subpixel>>,
    ) -> Result<ImageBuffer<P, Vec<P::Subpixel>>, PictureError> {
        let inside = |start: u32, length: u32, side: u32| {
            length > 0 && start.checked_add(length).is_some_and(|end| end <= side)
        };
        let (width, height) = image.dimensions();
        if inside(self.x, self.width, width) && inside(self.y, self.height, height) {
            Ok(crop_imm(image, self.x, self.y, self.width, self.height).to_image())
        } else {
            Err(PictureError::Region { region: *self, picture: (width, height) })
        }
    }
}

/// The first and last column and row of pixels above 0: left, top, right, bottom.
fn bounds(mask: &Mask) -> Option<(u32, u32, u32, u32)> {
    let masked = mask.grey().enumerate_pixels().filter(|(_, _, pixel)| pixel.0[0] > 0);
    masked.fold(None, |bounds, (x, y, _)| {
        let (left, top, right, bottom) = bounds.unwrap_or((x, y, x, y));
        Some((left.min(x), top.min(y), right.max(x), bottom.max(y)))
    })
}

/// Makes a span longer by `by`, half of it before the start, and moves it to lie within `side`.
fn longer((start, end): (u32, u32), by: u32, side: u32) -> (u32, u32) {
    let length = (end - start).saturating_add(by).min(side);
    let start = start.saturating_sub(by / 2).min(side - length);
    (start, start + length)
}

/// Pastes the generated region into the original picture through the whole picture's mask. A blurred mask makes the seam soft.
///
/// `generated` is brought to the size of the region. Pixels outside the region, and those where the mask is 0, stay exactly the
/// original's.
///
/// # Errors
/// A mask of another size than the original, a region outside it, an empty picture.
pub fn overlay(
    original: &RgbImage,
    generated: &RgbImage,
    mask: &Mask,
    region: Region,
) -> Result<RgbImage, PictureError> {
    check_mask(original, mask)?;
    let shares = region.mask(mask)?;
    let generated = Fit::Crop.picture(generated, region.width, region.height)?;
    let mut out = original.clone();
    for (x, y, share) in shares.grey().enumerate_pixels() {
        let share = u32::from(share.0[0]);
        let new = generated.get_pixel(x, y);
        let old = out.get_pixel_mut(region.x + x, region.y + y);
        old.apply2(new, |old, new| {
            ((u32::from(old) * (255 - share) + u32::from(new) * share + 127) / 255) as u8
        });
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use image::{GrayImage, Luma};
    use proptest::prelude::*;

    use super::*;
    use crate::picture::reference::REFERENCE;

    #[test]
    fn regions_are_those_of_a1111() {
        for case in &REFERENCE.regions {
            let [left, top, right, bottom] = case.masked;
            let mut grey = GrayImage::new(case.size.0, case.size.1);
            grey.put_pixel(left, bottom - 1, Luma([255]));
            grey.put_pixel(right - 1, top, Luma([1]));
            let out = Region::around(&Mask::new(grey), case.padding, case.target).unwrap();
            let corners = [out.x, out.y, out.x + out.width, out.y + out.height];
            assert_eq!(corners, case.region, "{:?} in {:?} for {:?}", case.masked, case.size, case.target);
        }
    }

    #[test]
    fn nothing_masked_is_no_region() {
        assert_eq!(Region::around(&Mask::new(GrayImage::new(8, 8)), 4, (64, 64)), None);
        assert_eq!(Region::around(&Mask::new(GrayImage::new(0, 0)), 4, (64, 64)), None);
    }

    #[test]
    fn regions_outside_are_errors() {
        let picture = RgbImage::new(8, 6);
        for region in [
            Region { x: 4, y: 0, width: 5, height: 1 },
            Region { x: 0, y: 0, width: 0, height: 1 },
            Region { x: 1, y: 1, width: u32::MAX, height: 1 },
        ] {
            assert_eq!(region.picture(&picture), Err(PictureError::Region { region, picture: (8, 6) }));
        }
    }

    /// Two pictures, a mask and a size to generate at.
    fn cases() -> impl Strategy<Value = (RgbImage, RgbImage, Mask, (u32, u32))> {
        (1u32..20, 1u32..20, 1u32..30, 1u32..30).prop_flat_map(|(width, height, x, y)| {
            let pixels = (width * height) as usize;
            let mask = prop::collection::vec(prop_oneof![2 => Just(0u8), 1 => any::<u8>()], pixels);
            let old = prop::collection::vec(any::<u8>(), pixels * 3);
            let new = prop::collection::vec(any::<u8>(), (x * y * 3) as usize);
            (old, new, mask).prop_map(move |(old, new, mask)| {
                let mask = Mask::new(GrayImage::from_raw(width, height, mask).unwrap());
                let old = RgbImage::from_raw(width, height, old).unwrap();
                (old, RgbImage::from_raw(x, y, new).unwrap(), mask, (x, y))
            })
        })
    }

    proptest! {
        #[test]
        fn what_is_not_masked_keeps_its_bytes((old, new, mask, target) in cases(), sigma in 0f32..3.0, padding in 0u32..9) {
            let mask = mask.blurred(sigma);
            for region in [Some(Region::whole(&old)), Region::around(&mask, padding, target)].into_iter().flatten() {
                let out = overlay(&old, &new, &mask, region).unwrap();
                for (x, y, share) in mask.grey().enumerate_pixels() {
                    prop_assert!(share.0[0] != 0 || out.get_pixel(x, y) == old.get_pixel(x, y));
                }
            }
        }

        #[test]
        fn what_is_masked_is_new((old, new, mask, target) in cases(), padding in 0u32..9) {
            let mask = Mask::new(GrayImage::from_fn(mask.grey().width(), mask.grey().height(), |x, y| {
                Luma([if mask.grey().get_pixel(x, y).0[0] > 0 { 255 } else { 0 }])
            }));
            if let Some(region) = Region::around(&mask, padding, target) {
                let out = region.picture(&overlay(&old, &new, &mask, region).unwrap()).unwrap();
                let new = Fit::Crop.picture(&new, region.width, region.height).unwrap();
                for (x, y, share) in region.mask(&mask).unwrap().grey().enumerate_pixels() {
                    prop_assert!(share.0[0] == 0 || out.get_pixel(x, y) == new.get_pixel(x, y));
                }
            }
        }

        #[test]
        fn a_part_laid_back_changes_nothing((old, _, mask, target) in cases(), padding in 0u32..9) {
            if let Some(region) = Region::around(&mask, padding, target) {
                prop_assert_eq!(overlay(&old, &region.picture(&old).unwrap(), &mask, region).unwrap(), old);
            }
        }

        #[test]
        fn any_target_gives_a_region_inside((old, _, mask, _) in cases(), padding: u32, target: (u32, u32)) {
            if let Some(region) = Region::around(&mask, padding, target) {
                prop_assert!(region.picture(&old).is_ok());
            }
        }
    }
}
