//! Hints of ControlNets that need no network.

use image::{
    Rgb, RgbImage,
    imageops::{FilterType, resize},
};

use super::{Fit, PictureError, canny, grey};
use crate::names;

/// How a picture becomes the hint of a ControlNet. A1111 calls this the preprocessor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Hint {
    /// The picture is a hint already.
    None,
    /// White edges on black.
    Canny {
        /// See [`canny`].
        low: u16,
        /// See [`canny`].
        high: u16,
    },
    /// The negative: for black lines on white.
    Invert,
    /// Pixels with a channel below 127 become white, others black: for dark lines on any light ground.
    Scribble,
    /// Pixels with all channels above this become white, others black.
    Threshold {
        /// The highest value that becomes black.
        above: u8,
    },
    /// Removes details, so that the network makes up new ones.
    Tile {
        /// The picture is shrunk by this factor and enlarged again. 1 or less changes nothing.
        rate: f32,
    },
}

/// Names: A1111's, then those of ComfyUI's nodes. Values are each program's usual ones.
const HINTS: &[(Hint, &[&str])] = &[
    (Hint::None, &["none", "passthrough"]),
    (Hint::Canny { low: 100, high: 200 }, &["canny", "CannyEdgePreprocessor"]),
    (Hint::Invert, &["invert", "invert (from white bg & black line)", "ImageInvert"]),
    (Hint::Scribble, &["scribble", "scribble_thr", "ScribblePreprocessor"]),
    (Hint::Threshold { above: 127 }, &["threshold"]),
    (Hint::Tile { rate: 1.0 }, &["tile_resample"]),
    (Hint::Tile { rate: 8.0 }, &["tile", "TilePreprocessor"]),
];

impl Hint {
    /// Finds a hint by a name in any spelling.
    pub fn named(name: &str) -> Option<Self> {
        names::find(HINTS, name)
    }

    /// The first name of each.
    pub fn names() -> impl Iterator<Item = &'static str> {
        HINTS.iter().map(|(_, names)| names[0])
    }

    /// Makes the hint of this size. The picture is resized first, so that lines are as thin as the network knows them (A1111's
    /// "pixel perfect").
    ///
    /// # Errors
    /// As [`Fit::picture`].
    pub fn picture(
        self,
        picture: &RgbImage,
        fit: Fit,
        width: u32,
        height: u32,
    ) -> Result<RgbImage, PictureError> {
        let picture = fit.picture(picture, width, height)?;
        Ok(match self {
            Self::None => picture,
            Self::Canny { low, high } => {
                let edges = canny(&grey(&picture), low, high);
                mapped(&picture, |x, y, _| [edges.get_pixel(x, y).0[0]; 3])
            }
            Self::Invert => mapped(&picture, |_, _, pixel| pixel.map(|value| 255 - value)),
            Self::Scribble => mapped(&picture, |_, _, pixel| white(pixel.iter().any(|value| *value < 127))),
            Self::Threshold { above } => {
                mapped(&picture, |_, _, pixel| white(pixel.iter().all(|value| *value > above)))
            }
            Self::Tile { rate } if rate > 1.0 => {
                let smaller = |side: u32| ((side as f32 / rate) as u32).max(1);
                let small = resize(&picture, smaller(width), smaller(height), FilterType::Triangle);
                resize(&small, width, height, FilterType::Triangle)
            }
            Self::Tile { .. } => picture,
        })
    }
}

fn white(is_white: bool) -> [u8; 3] {
    [if is_white { 255 } else { 0 }; 3]
}

fn mapped(picture: &RgbImage, colour: impl Fn(u32, u32, [u8; 3]) -> [u8; 3]) -> RgbImage {
    RgbImage::from_fn(picture.width(), picture.height(), |x, y| Rgb(colour(x, y, picture.get_pixel(x, y).0)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::picture::reference::REFERENCE;

    #[test]
    fn names_of_other_programs() {
        for (owner, names) in HINTS {
            assert!(names.iter().all(|name| Hint::named(name) == Some(*owner)), "{owner:?}");
        }
        assert_eq!(Hint::named("Tile Resample"), Some(Hint::Tile { rate: 1.0 }));
        assert_eq!(Hint::named("depth"), None);
    }

    fn hint(hint: Hint, pixels: &[[u8; 3]]) -> Vec<[u8; 3]> {
        let picture = RgbImage::from_raw(pixels.len() as u32, 1, pixels.concat()).unwrap();
        let out = hint.picture(&picture, Fit::Stretch, picture.width(), 1).unwrap();
        out.pixels().map(|pixel| pixel.0).collect()
    }

    #[test]
    fn limits_are_those_of_a1111() {
        const BLACK: [u8; 3] = [0; 3];
        const WHITE: [u8; 3] = [255; 3];
        let pixels = [[126, 255, 255], [127, 127, 127], [128, 128, 128]];
        assert_eq!(hint(Hint::None, &pixels), pixels);
        assert_eq!(hint(Hint::Scribble, &pixels), [WHITE, BLACK, BLACK]);
        assert_eq!(hint(Hint::Threshold { above: 127 }, &pixels), [BLACK, BLACK, WHITE]);
        assert_eq!(hint(Hint::Invert, &pixels), [[129, 0, 0], [128; 3], [127; 3]]);
    }

    #[test]
    fn canny_looks_at_the_brightness() {
        let picture = REFERENCE.canny[0].picture.rgb();
        let (width, height) = picture.dimensions();
        let out = Hint::named("canny").unwrap().picture(&picture, Fit::Crop, width, height).unwrap();
        let edges = canny(&grey(&picture), 100, 200);
        assert!(out.pixels().zip(edges.pixels()).all(|(out, edge)| out.0 == [edge.0[0]; 3]));
    }

    #[test]
    fn tiles_lose_details_but_not_the_rest() {
        let checks = RgbImage::from_fn(32, 32, |x, y| Rgb([if (x + y) % 2 == 0 { 255 } else { 1 }; 3]));
        let out = Hint::Tile { rate: 8.0 }.picture(&checks, Fit::Stretch, 32, 32).unwrap();
        assert!(out.iter().all(|value| value.abs_diff(128) <= 2));
    }

    proptest! {
        #[test]
        fn any_picture_gives_the_size_asked_for(
            from in (1u32..12, 1u32..12), to in (1u32..12, 1u32..12), rate: f32, low: u16, high: u16, above: u8,
        ) {
            let picture = RgbImage::from_fn(from.0, from.1, |x, y| Rgb([(x * 50) as u8, (y * 90) as u8, 7]));
            let hints = [Hint::Canny { low, high }, Hint::Threshold { above }, Hint::Tile { rate }];
            for hint in hints.into_iter().chain(HINTS.iter().map(|(hint, _)| *hint)) {
                prop_assert_eq!(hint.picture(&picture, Fit::Crop, to.0, to.1).unwrap().dimensions(), to);
            }
        }
    }
}
