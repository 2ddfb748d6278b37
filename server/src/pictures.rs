//! Pictures in requests and replies.

use crate::fault::Fault;
use base64::{Engine, engine::general_purpose::STANDARD};
use image::RgbImage;
use sdrun_diffusion::file::{self, File};

/// The largest picture that a request may hold, in pixels: more than cameras make, and less than fills the memory.
const MOST_PIXELS: u64 = 64 << 20;

/// Reads a picture in base64, with or without `data:image/png;base64,` before it. `what` names it in errors.
///
/// # Errors
/// 400 for text that is no base64 and bytes that are no picture.
pub(crate) fn decode(what: &str, text: &str) -> Result<File, Fault> {
    let text = match text.strip_prefix("data:") {
        Some(rest) => rest.split_once(',').map_or("", |(_, data)| data),
        None => text,
    };
    let bytes = STANDARD
        .decode(text.trim())
        .map_err(|why| Fault::invalid(format!("{what} is no picture in base64: {why}")))?;
    of_bytes(what, &bytes)
}

/// Reads a picture.
///
/// # Errors
/// 400 for bytes that are no picture.
pub(crate) fn of_bytes(what: &str, bytes: &[u8]) -> Result<File, Fault> {
    file::decode(bytes, MOST_PIXELS).map_err(|why| Fault::invalid(format!("{what} {why}")))
}

/// Reads pictures on white ground.
///
/// # Errors
/// As [`decode`].
pub(crate) fn rgb_all(what: &str, texts: &[String]) -> Result<Vec<RgbImage>, Fault> {
    texts.iter().map(|text| Ok(decode(what, text)?.rgb())).collect()
}

/// Bytes in base64.
pub(crate) fn encode(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}
