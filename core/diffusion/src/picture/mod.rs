//! Pictures and masks on their way to and from the networks, without the networks: sizes, masks, borders, hints of ControlNets,
//! tiles.
//!
//! Sizes are in pixels, width first, as in the crate [`image`]; shapes of tensors have the height first. A1111 and ComfyUI are
//! the programs whose rules these functions follow, so that the same settings give the same result.

mod canny;
mod fill;
mod fit;
mod hints;
mod lines;
mod mask;
mod outpaint;
#[cfg(test)]
mod reference;
mod region;
mod tiles;

pub use canny::{canny, grey};
pub use fill::fill;
pub use fit::Fit;
pub use hints::Hint;
pub use mask::{Mask, masked};
pub use outpaint::{Sides, outpaint};
pub use region::{Region, overlay};
pub use tiles::{Layout, TileError, Tiles};

use image::{ImageBuffer, Pixel, RgbImage};

/// The longest side of a picture. It bounds what a wrong number can allocate.
pub const MAX_SIDE: u32 = 32768;

/// Why a picture cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PictureError {
    /// A side is 0 or too long.
    #[error("a picture cannot be {width} x {height} pixels: each side must be 1 to {MAX_SIDE}")]
    Size {
        /// Its width.
        width: u32,
        /// Its height.
        height: u32,
    },
    /// A mask belongs to another picture.
    #[error("the mask is {} x {} pixels, but its picture {} x {}: resize one of them", mask.0, mask.1, picture.0, picture.1)]
    Mask {
        /// Width and height of the mask.
        mask: (u32, u32),
        /// Width and height of the picture.
        picture: (u32, u32),
    },
    /// A region is empty or reaches beyond its picture.
    #[error(
        "the region of {} x {} pixels at ({}, {}) is not inside the picture of {} x {}: choose a smaller one",
        region.width, region.height, region.x, region.y, picture.0, picture.1
    )]
    Region {
        /// The region.
        region: Region,
        /// Width and height of the picture.
        picture: (u32, u32),
    },
}

/// Checks a size.
fn check_size(width: u32, height: u32) -> Result<(), PictureError> {
    let sides = 1..=MAX_SIDE;
    if sides.contains(&width) && sides.contains(&height) {
        Ok(())
    } else {
        Err(PictureError::Size { width, height })
    }
}

/// Checks that a mask is for this picture, and that the picture is not empty.
fn check_mask(picture: &RgbImage, mask: &Mask) -> Result<(), PictureError> {
    check_size(picture.width(), picture.height())?;
    if picture.dimensions() == mask.grey().dimensions() {
        Ok(())
    } else {
        Err(PictureError::Mask { mask: mask.grey().dimensions(), picture: picture.dimensions() })
    }
}

/// A picture of another size, in which `image` lies at `(left, top)`. Pixels beside it repeat its edges. It must not be empty.
fn placed<P: Pixel>(
    image: &ImageBuffer<P, Vec<P::Subpixel>>,
    (left, top): (i64, i64),
    (width, height): (u32, u32),
) -> ImageBuffer<P, Vec<P::Subpixel>> {
    let inside =
        |at: u32, start: i64, side: u32| (i64::from(at) - start).clamp(0, i64::from(side) - 1) as u32;
    ImageBuffer::from_fn(width, height, |x, y| {
        *image.get_pixel(inside(x, left, image.width()), inside(y, top, image.height()))
    })
}
