//! Results of other programs, from `tools/diffusion/pictures.py`.

use std::sync::LazyLock;

use image::{GrayImage, RgbImage};
use serde::Deserialize;

use super::Mask;

pub(super) static REFERENCE: LazyLock<Reference> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../testdata/pictures.json")).unwrap());

#[derive(Deserialize)]
pub(super) struct Reference {
    pub(super) canny: Vec<Canny>,
    pub(super) blur: Vec<Blur>,
    pub(super) grow: Vec<Grow>,
    pub(super) latents: Latents,
    pub(super) regions: Vec<Region>,
    pub(super) fit: Fits,
    pub(super) fill: Vec<Fill>,
    pub(super) outpaint: Vec<Outpaint>,
}

#[derive(Deserialize)]
pub(super) struct Image {
    width: u32,
    height: u32,
    bytes: String,
}

#[derive(Deserialize)]
pub(super) struct Canny {
    pub(super) picture: Image,
    pub(super) grey: String,
    pub(super) edges: Vec<Edges>,
}

#[derive(Deserialize)]
pub(super) struct Edges {
    pub(super) low: u16,
    pub(super) high: u16,
    pub(super) bits: String,
}

#[derive(Deserialize)]
pub(super) struct Blur {
    pub(super) mask: Image,
    pub(super) sigma: f32,
    pub(super) bytes: String,
}

#[derive(Deserialize)]
pub(super) struct Grow {
    pub(super) mask: Image,
    pub(super) by: u32,
    pub(super) bytes: String,
}

#[derive(Deserialize)]
pub(super) struct Latents {
    pub(super) mask: Image,
    pub(super) nearest: Vec<Latent>,
    pub(super) averages: Vec<Latent>,
}

#[derive(Deserialize)]
pub(super) struct Latent {
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) bytes: String,
}

/// An array in the file. Boxes are left, top, right, bottom; the last two are excluded.
#[derive(Deserialize)]
pub(super) struct Region {
    pub(super) size: (u32, u32),
    pub(super) masked: [u32; 4],
    pub(super) padding: u32,
    pub(super) target: (u32, u32),
    pub(super) region: [u32; 4],
}

#[derive(Deserialize)]
pub(super) struct Fits {
    pub(super) picture: Image,
    pub(super) cases: Vec<Fit>,
}

#[derive(Deserialize)]
pub(super) struct Fit {
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) modes: Vec<String>,
}

#[derive(Deserialize)]
pub(super) struct Fill {
    pub(super) picture: Image,
    pub(super) mask: Image,
    pub(super) bytes: String,
}

#[derive(Deserialize)]
pub(super) struct Outpaint {
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) sides: [u32; 4],
    pub(super) feather: u32,
    pub(super) bytes: String,
}

impl Image {
    pub(super) fn rgb(&self) -> RgbImage {
        RgbImage::from_raw(self.width, self.height, bytes(&self.bytes)).unwrap()
    }

    pub(super) fn mask(&self) -> Mask {
        Mask::new(GrayImage::from_raw(self.width, self.height, bytes(&self.bytes)).unwrap())
    }
}

/// The bytes that hexadecimal digits stand for.
pub(super) fn bytes(digits: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(digit).collect()
}
