//! Pictures as bytes of PNG, JPEG and WebP files, with the texts that generators store in them.

mod exif;
mod jpeg;
mod png;
mod xmp;

use crate::metadata::{PARAMETERS, Record, SDRUN};
use image::{
    DynamicImage, ExtendedColorType, GrayImage, ImageDecoder, ImageEncoder, ImageError, ImageFormat, Limits,
    RgbImage,
    codecs::{jpeg::JpegDecoder, jpeg::JpegEncoder, png::PngDecoder, webp::WebPDecoder, webp::WebPEncoder},
};
use std::io::{self, Cursor};

/// The largest picture that the command line reads, in pixels. A few bytes of WebP can stand for any number of pixels, so files give no
/// better limit.
pub const MOST_PIXELS: u64 = 1 << 27;
/// The best JPEG quality that still makes files small.
pub const JPEG_QUALITY: u8 = 90;

/// A kind of picture file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// PNG.
    Png,
    /// JPEG.
    Jpeg,
    /// WebP, lossless when written.
    WebP,
}

impl Format {
    /// The format of a lower-case ending.
    pub fn of_ending(ending: &str) -> Option<Self> {
        match ending {
            "png" => Some(Self::Png),
            "jpg" | "jpeg" => Some(Self::Jpeg),
            "webp" => Some(Self::WebP),
            _ => None,
        }
    }

    /// Its media type.
    pub fn media_type(self) -> &'static str {
        match self {
            Self::Png => "image/png",
            Self::Jpeg => "image/jpeg",
            Self::WebP => "image/webp",
        }
    }
}

/// Why bytes are no picture. The text goes on after the picture's name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// They are in none of the formats.
    #[error("is not a PNG, JPEG or WebP picture")]
    Unknown,
    /// They are damaged.
    #[error("is not a valid {format} file: {why}")]
    Damaged {
        /// The format's name.
        format: &'static str,
        /// What is wrong.
        why: String,
    },
    /// It has more pixels than sdrun reads.
    #[error("has {width} x {height} pixels; sdrun reads at most {} million here", most >> 20)]
    TooLarge {
        /// Its width.
        width: u32,
        /// Its height.
        height: u32,
        /// The most pixels.
        most: u64,
    },
}

/// A picture, turned as its EXIF orientation says.
pub struct File {
    image: DynamicImage,
    /// Keys and texts from PNG's text chunks, then EXIF's under the keys that PNG has for them.
    pub texts: Vec<(String, String)>,
}

/// Reads a picture of at most so many pixels. Of an animation, reads the first frame.
///
/// # Errors
/// For bytes that are not a whole picture, or too large a one.
pub fn decode(bytes: &[u8], most_pixels: u64) -> Result<File, FileError> {
    let damaged = |format| move |why: ImageError| FileError::Damaged { format, why: why.to_string() };
    match image::guess_format(bytes).map_err(|_| FileError::Unknown)? {
        ImageFormat::Png => {
            let damaged = damaged("PNG");
            let decoder =
                PngDecoder::with_limits(Cursor::new(bytes), limits(most_pixels)).map_err(damaged)?;
            decoded(decoder, most_pixels, damaged, png::texts(bytes))
        }
        ImageFormat::Jpeg => {
            let damaged = damaged("JPEG");
            // The decoder fills what is missing with grey.
            if !jpeg::is_whole(bytes) {
                return Err(FileError::Damaged { format: "JPEG", why: "its end is missing".into() });
            }
            decoded(
                JpegDecoder::new(Cursor::new(bytes)).map_err(damaged)?,
                most_pixels,
                damaged,
                jpeg::texts(bytes),
            )
        }
        ImageFormat::WebP => {
            let damaged = damaged("WebP");
            decoded(WebPDecoder::new(Cursor::new(bytes)).map_err(damaged)?, most_pixels, damaged, Vec::new())
        }
        _ => Err(FileError::Unknown),
    }
}

fn limits(most_pixels: u64) -> Limits {
    let mut limits = Limits::no_limits();
    // Up to four samples of 16 bits per pixel.
    limits.max_alloc = Some(8 * most_pixels);
    limits
}

fn decoded(
    mut decoder: impl ImageDecoder,
    most: u64,
    damaged: impl Fn(ImageError) -> FileError,
    mut texts: Vec<(String, String)>,
) -> Result<File, FileError> {
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) > most {
        return Err(FileError::TooLarge { width, height, most });
    }
    decoder.set_limits(limits(most)).map_err(&damaged)?;
    let orientation = decoder.orientation().map_err(&damaged)?;
    if let Some(exif) = decoder.exif_metadata().map_err(&damaged)? {
        texts.extend(exif::texts(&exif));
    }
    if let Some(xmp) = decoder.xmp_metadata().map_err(&damaged)? {
        texts.extend(xmp::parameters(&xmp).map(|text| (PARAMETERS.into(), text)));
    }
    let mut image = DynamicImage::from_decoder(decoder).map_err(&damaged)?;
    image.apply_orientation(orientation);
    Ok(File { image, texts })
}

impl File {
    /// The picture as it is.
    pub fn image(&self) -> &DynamicImage {
        &self.image
    }

    /// The picture on a white background, as A1111 reads pictures to start from.
    pub fn rgb(&self) -> RgbImage {
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
    pub fn mask(&self) -> GrayImage {
        if !self.image.color().has_alpha() {
            return self.image.to_luma8();
        }
        let image = self.image.to_luma_alpha8();
        let pixels = image.pixels().map(|pixel| over(pixel.0[0], pixel.0[1], 0));
        GrayImage::from_raw(image.width(), image.height(), pixels.collect()).unwrap_or_default()
    }

    /// How far each pixel is erased, as a mask: white where the picture is transparent. `None` if it is opaque everywhere.
    pub fn erased(&self) -> Option<GrayImage> {
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

/// The texts of a picture with this record: A1111's parameters, and sdrun's own record.
pub fn texts(record: &Record) -> [(&'static str, String); 2] {
    [(PARAMETERS, record.infotext().to_string()), (SDRUN, record.to_json())]
}

/// A picture as a file, with texts under the keys that PNG has for them. JPEG and WebP hold the keys `parameters` and `sdrun` only.
/// Texts that do not fit into the file are left out with a warning. `quality` is JPEG's, from 1 to 100.
///
/// # Errors
/// For a picture that is too large for the format.
pub fn encode(
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
