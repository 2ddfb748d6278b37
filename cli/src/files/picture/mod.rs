//! Pictures in PNG, JPEG and WebP files, with the texts that generators store in them.

mod exif;
mod jpeg;
mod png;
pub(crate) mod tensor;
mod xmp;

use super::{damaged, is_special};
use image::{
    DynamicImage, ExtendedColorType, GrayImage, ImageDecoder, ImageEncoder, ImageError, ImageFormat, Limits,
    RgbImage,
    codecs::{jpeg::JpegDecoder, jpeg::JpegEncoder, png::PngDecoder, webp::WebPDecoder, webp::WebPEncoder},
};
use sdrun::{
    abi::Error,
    files::{Links, read_small},
};
use sdrun_diffusion::metadata::PARAMETERS;
use std::{
    io::{self, Cursor},
    path::Path,
};

/// The largest file to read, in bytes.
const MOST_BYTES: u64 = 1 << 30;
/// The largest picture to read. A few bytes of WebP can stand for any number of pixels, so files give no better limit.
const MOST_PIXELS: u64 = 1 << 27;
/// The best JPEG quality that still makes files small.
pub(crate) const JPEG_QUALITY: u8 = 90;

/// A kind of picture file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Png,
    Jpeg,
    /// Lossless when written.
    WebP,
}

impl Format {
    /// The format to write a file in, by its ending. Pipes and devices get PNG.
    ///
    /// # Errors
    /// `InvalidArgument` for other endings.
    pub(crate) fn of(path: &Path) -> Result<Self, Error> {
        let ending = path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
        match ending.as_deref().and_then(Self::of_ending) {
            Some(format) => Ok(format),
            None if is_special(path) => Ok(Self::Png),
            None => {
                let message = format!("{} does not end in .png, .jpg, .jpeg or .webp", path.display());
                Err(Error::invalid(message).with_file(path))
            }
        }
    }

    /// The format of a lower-case ending.
    pub(crate) fn of_ending(ending: &str) -> Option<Self> {
        match ending {
            "png" => Some(Self::Png),
            "jpg" | "jpeg" => Some(Self::Jpeg),
            "webp" => Some(Self::WebP),
            _ => None,
        }
    }
}

/// A picture from a file, turned as its EXIF orientation says.
pub(crate) struct Picture {
    image: DynamicImage,
    /// Keys and texts from PNG's text chunks, then EXIF's under the keys that PNG has for them.
    pub(crate) texts: Vec<(String, String)>,
}

/// Reads a picture. The file's content tells its format, not its name. Of an animation, reads the first frame.
///
/// # Errors
/// `DataLoss` for a file that is not a whole picture, or too large a one, and errors of opening the file.
pub(crate) fn read(path: &Path) -> Result<Picture, Error> {
    let bytes = read_small(path, Links::Follow, MOST_BYTES)?;
    let unknown = || damaged(path, "is not a PNG, JPEG or WebP picture");
    let broken = |what: &str, why: ImageError| damaged(path, format!("is not a valid {what} file: {why}"));
    match image::guess_format(&bytes).map_err(|_| unknown())? {
        ImageFormat::Png => {
            let broken = |why| broken("PNG", why);
            let decoder = PngDecoder::with_limits(Cursor::new(&bytes), limits()).map_err(broken)?;
            decode(decoder, path, broken, png::texts(&bytes))
        }
        ImageFormat::Jpeg => {
            let broken = |why| broken("JPEG", why);
            // The decoder fills what is missing with grey.
            if !jpeg::is_whole(&bytes) {
                return Err(damaged(path, "is not a valid JPEG file: its end is missing"));
            }
            decode(JpegDecoder::new(Cursor::new(&bytes)).map_err(broken)?, path, broken, jpeg::texts(&bytes))
        }
        ImageFormat::WebP => {
            let broken = |why| broken("WebP", why);
            decode(WebPDecoder::new(Cursor::new(&bytes)).map_err(broken)?, path, broken, Vec::new())
        }
        _ => Err(unknown()),
    }
}

fn limits() -> Limits {
    let mut limits = Limits::no_limits();
    // Up to four samples of 16 bits per pixel.
    limits.max_alloc = Some(8 * MOST_PIXELS);
    limits
}

fn decode(
    mut decoder: impl ImageDecoder,
    path: &Path,
    broken: impl Fn(ImageError) -> Error,
    mut texts: Vec<(String, String)>,
) -> Result<Picture, Error> {
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) > MOST_PIXELS {
        let most = MOST_PIXELS >> 20;
        return Err(damaged(
            path,
            format!("has {width} x {height} pixels; sdrun reads at most {most} million"),
        ));
    }
    decoder.set_limits(limits()).map_err(&broken)?;
    let orientation = decoder.orientation().map_err(&broken)?;
    if let Some(exif) = decoder.exif_metadata().map_err(&broken)? {
        texts.extend(exif::texts(&exif));
    }
    if let Some(xmp) = decoder.xmp_metadata().map_err(&broken)? {
        texts.extend(xmp::parameters(&xmp).map(|text| (PARAMETERS.into(), text)));
    }
    let mut image = DynamicImage::from_decoder(decoder).map_err(&broken)?;
    image.apply_orientation(orientation);
    Ok(Picture { image, texts })
}

impl Picture {
    /// The picture on a white background, as A1111 reads pictures to start from.
    pub(crate) fn rgb(&self) -> RgbImage {
        if !self.image.color().has_alpha() {
            return self.image.to_rgb8();
        }
        let image = self.image.to_rgba8();
        let pixels = image.pixels().flat_map(|pixel| {
            let [red, green, blue, alpha] = pixel.0;
            [red, green, blue].map(|value| over(value, alpha, 255))
        });
        RgbImage::from_raw(image.width(), image.height(), pixels.collect()).unwrap_or_default()
    }

    /// The picture's brightness on a black background, as a mask: transparent pixels count as black.
    pub(crate) fn mask(&self) -> GrayImage {
        if !self.image.color().has_alpha() {
            return self.image.to_luma8();
        }
        let image = self.image.to_luma_alpha8();
        let pixels = image.pixels().map(|pixel| over(pixel.0[0], pixel.0[1], 0));
        GrayImage::from_raw(image.width(), image.height(), pixels.collect()).unwrap_or_default()
    }

    /// How far each pixel is erased, as a mask: white where the picture is transparent. `None` if it is opaque everywhere.
    pub(crate) fn erased(&self) -> Option<GrayImage> {
        if !self.image.color().has_alpha() {
            return None;
        }
        let image = self.image.to_luma_alpha8();
        let pixels: Vec<u8> = image.pixels().map(|pixel| 255 - pixel.0[1]).collect();
        let any = pixels.iter().any(|&erased| erased > 0);
        any.then(|| GrayImage::from_raw(image.width(), image.height(), pixels).unwrap_or_default())
    }
}

/// A sample over a background.
fn over(value: u8, alpha: u8, background: u8) -> u8 {
    let [value, alpha, background] = [value, alpha, background].map(u32::from);
    ((value * alpha + background * (255 - alpha) + 127) / 255) as u8
}

/// Pixels as a picture to write: `[height, width, 3]` bytes.
///
/// # Errors
/// `InvalidArgument` if the sizes are too large for a picture file, or are not those of the bytes.
pub(crate) fn rgb(width: usize, height: usize, bytes: Vec<u8>) -> Result<RgbImage, Error> {
    let sizes = u32::try_from(width).ok().zip(u32::try_from(height).ok());
    let image = sizes.and_then(|(width, height)| RgbImage::from_raw(width, height, bytes));
    image.ok_or_else(|| Error::invalid(format!("{width} x {height} pixels do not fit into a picture file")))
}

/// Writes a picture in the format of its ending, with texts under the keys that PNG has for them. JPEG and WebP hold the keys
/// `parameters` and `sdrun` only. Texts that do not fit into the file are left out with a warning.
///
/// # Errors
/// As [`Format::of`], [`super::write`], and `InvalidArgument` for a picture that is too large for the format.
pub(crate) fn write(
    path: &Path,
    picture: &RgbImage,
    quality: u8,
    texts: &[(&str, &str)],
) -> anyhow::Result<()> {
    let bytes = encode(Format::of(path)?, picture, quality, texts)
        .map_err(|why| Error::invalid(format!("cannot write {}: {why}", path.display())).with_file(path))?;
    super::write(path, |out| out.write_all(&bytes))
}

fn encode(
    format: Format,
    picture: &RgbImage,
    quality: u8,
    texts: &[(&str, &str)],
) -> Result<Vec<u8>, ImageError> {
    let mut bytes = Vec::new();
    let (width, height) = picture.dimensions();
    match format {
        Format::Png => png::write(&mut bytes, picture, texts).map_err(io::Error::other)?,
        Format::Jpeg => {
            let mut encoder = JpegEncoder::new_with_quality(&mut bytes, quality);
            if let Some(exif) = exif::encode(texts, jpeg::MOST_EXIF) {
                encoder.set_exif_metadata(exif).map_err(ImageError::Unsupported)?;
            }
            encoder.write_image(picture, width, height, ExtendedColorType::Rgb8)?;
        }
        Format::WebP => {
            let mut encoder = WebPEncoder::new_lossless(&mut bytes);
            if let Some(exif) = exif::encode(texts, u32::MAX as usize) {
                encoder.set_exif_metadata(exif).map_err(ImageError::Unsupported)?;
            }
            encoder.write_image(picture, width, height, ExtendedColorType::Rgb8)?;
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
