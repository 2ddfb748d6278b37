//! Pictures with room to paint around them.

use image::{GrayImage, Luma, RgbImage};

use super::{Mask, PictureError, check_size, placed};

/// How many pixels to add on each side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sides {
    /// On the left.
    pub left: u32,
    /// Above.
    pub top: u32,
    /// On the right.
    pub right: u32,
    /// Below.
    pub bottom: u32,
}

/// Adds room on the sides of a picture and returns the mask of this room. The room repeats the edges of the picture. Where
/// it is not wholly repainted, this fits better than ComfyUI's grey.
///
/// The mask is that of ComfyUI's "Pad Image for Outpainting": it reaches into the picture by `feather` pixels with a share that
/// falls as the square of the distance, from sides with room only. It stops at the picture's edge if the picture is not larger
/// than two feathers. ComfyUI proposes a feather of 40.
///
/// # Errors
/// A size that [`PictureError::Size`] names.
pub fn outpaint(picture: &RgbImage, sides: Sides, feather: u32) -> Result<(RgbImage, Mask), PictureError> {
    let (width, height) = picture.dimensions();
    check_size(width, height)?;
    let wide = width.saturating_add(sides.left).saturating_add(sides.right);
    let high = height.saturating_add(sides.top).saturating_add(sides.bottom);
    check_size(wide, high)?;
    let feather = if feather < width.min(height).div_ceil(2) { feather } else { 0 };

    let masked = |x: u32, y: u32| {
        let (Some(x), Some(y)) = (x.checked_sub(sides.left), y.checked_sub(sides.top)) else { return 255 };
        if x >= width || y >= height {
            return 255;
        }
        let distances =
            [(sides.left, x), (sides.top, y), (sides.right, width - x), (sides.bottom, height - y)];
        let distance = distances.iter().filter(|(room, _)| *room > 0).map(|(_, distance)| *distance).min();
        match distance {
            Some(distance) if distance < feather => {
                let share = f64::from(feather - distance) / f64::from(feather);
                (share * share * 255.0).round() as u8
            }
            _ => 0,
        }
    };
    let picture = placed(picture, (sides.left.into(), sides.top.into()), (wide, high));
    let mask = GrayImage::from_fn(wide, high, |x, y| Luma([masked(x, y)]));
    Ok((picture, Mask::new(mask)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::picture::{
        Region,
        reference::{REFERENCE, bytes},
    };

    #[test]
    fn masks_are_those_of_comfy() {
        for case in &REFERENCE.outpaint {
            let [left, top, right, bottom] = case.sides;
            let picture = RgbImage::new(case.width, case.height);
            let (_, mask) = outpaint(&picture, Sides { left, top, right, bottom }, case.feather).unwrap();
            assert_eq!(mask.grey().as_raw(), &bytes(&case.bytes), "{:?} {}", case.sides, case.feather);
        }
    }

    #[test]
    fn too_much_room_is_an_error() {
        let picture = RgbImage::new(4, 4);
        let sides = Sides { left: u32::MAX, ..Sides::default() };
        assert_eq!(outpaint(&picture, sides, 40), Err(PictureError::Size { width: u32::MAX, height: 4 }));
        assert!(outpaint(&RgbImage::new(0, 0), Sides::default(), 40).is_err());
    }

    proptest! {
        #[test]
        fn the_picture_stays_and_its_edges_go_on(
            data in prop::collection::vec(any::<u8>(), 6 * 5 * 3), sides in [0u32..4, 0..4, 0..4, 0..4], feather: u32,
        ) {
            let picture = RgbImage::from_raw(6, 5, data).unwrap();
            let [left, top, right, bottom] = sides;
            let (out, mask) = outpaint(&picture, Sides { left, top, right, bottom }, feather).unwrap();
            prop_assert_eq!(out.dimensions(), mask.grey().dimensions());
            let middle = Region { x: left, y: top, width: 6, height: 5 };
            prop_assert_eq!(&middle.picture(&out).unwrap(), &picture);
            for (x, y, pixel) in out.enumerate_pixels() {
                let edge = picture.get_pixel(x.saturating_sub(left).min(5), y.saturating_sub(top).min(4));
                prop_assert_eq!(pixel, edge);
                let inside = (left..left + 6).contains(&x) && (top..top + 5).contains(&y);
                prop_assert!(inside || mask.grey().get_pixel(x, y).0[0] == 255);
            }
        }
    }
}
