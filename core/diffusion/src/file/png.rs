//! PNG with its text chunks, which the crate `image` does not know.

use image::RgbImage;
use png::{BitDepth, ColorType, Decoder, Encoder, EncodingError, Limits};
use std::io::{Cursor, Write};

/// Bytes that the decoder, and each text, may use.
const MOST_BYTES: usize = 64 << 20;

/// Writes a picture with texts.
pub(super) fn write(
    out: impl Write,
    picture: &RgbImage,
    texts: &[(&str, &str)],
) -> Result<(), EncodingError> {
    let mut encoder = Encoder::new(out, picture.width(), picture.height());
    encoder.set_color(ColorType::Rgb);
    encoder.set_depth(BitDepth::Eight);
    for &(key, text) in texts {
        if is_plain(text) {
            encoder.add_text_chunk(key.into(), text.into())?;
        } else {
            encoder.add_itxt_chunk(key.into(), text.into())?;
        }
    }
    let mut writer = encoder.write_header()?;
    writer.write_image_data(picture)?;
    writer.finish()
}

/// Whether a `tEXt` chunk can hold a text: it is Latin-1 and cannot be mistaken for UTF-8.
fn is_plain(text: &str) -> bool {
    let latin: Option<Vec<u8>> = text.chars().map(|c| u8::try_from(c).ok()).collect();
    text.is_ascii() || latin.is_some_and(|bytes| std::str::from_utf8(&bytes).is_err())
}

/// Keys and texts of a PNG file, also of those behind the picture. Stops where the file is damaged.
pub(super) fn texts(file: &[u8]) -> Vec<(String, String)> {
    let decoder = Decoder::new_with_limits(Cursor::new(file), Limits { bytes: MOST_BYTES });
    let Ok(mut reader) = decoder.read_info() else { return Vec::new() };
    // Texts that were read before a fault are there all the same.
    let _ = reader.finish();
    let info = reader.info();
    let mut texts = Vec::new();
    for chunk in &info.uncompressed_latin1_text {
        texts.push((chunk.keyword.clone(), latin_or_utf8(&chunk.text)));
    }
    for mut chunk in info.compressed_latin1_text.iter().cloned() {
        if let Ok(text) = chunk.decompress_text_with_limit(MOST_BYTES).and_then(|()| chunk.get_text()) {
            texts.push((chunk.keyword, latin_or_utf8(&text)));
        }
    }
    for mut chunk in info.utf8_text.iter().cloned() {
        if let Ok(text) = chunk.decompress_text_with_limit(MOST_BYTES).and_then(|()| chunk.get_text()) {
            texts.push((chunk.keyword, text));
        }
    }
    texts
}

/// The text of a `tEXt` chunk. The format says Latin-1, but some programs write UTF-8.
fn latin_or_utf8(text: &str) -> String {
    let bytes: Option<Vec<u8>> = text.chars().map(|c| u8::try_from(c).ok()).collect();
    bytes.and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_else(|| text.into())
}
