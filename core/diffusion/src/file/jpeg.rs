//! The segments of a JPEG file, as far as the crate `image` does not look at them.

/// Bytes of EXIF that fit into one segment, behind its length and `Exif\0\0`.
pub(super) const MOST_EXIF: usize = 0xffff - 2 - 6;

const SCAN: u8 = 0xda;
const COMMENT: u8 = 0xfe;

/// Whether a file reaches the marker that ends its picture.
pub(super) fn is_whole(file: &[u8]) -> bool {
    // An embedded preview has such a marker too, so look behind the last segment only. In a scan, 0 follows each 0xff.
    segments(file)
        .last()
        .is_some_and(|(marker, _, rest)| marker == SCAN && rest.windows(2).any(|pair| pair == [0xff, 0xd9]))
}

/// Keys and texts of comments, as stable-diffusion.cpp writes them: a key, 0, and the text.
pub(super) fn texts(file: &[u8]) -> Vec<(String, String)> {
    let comments = segments(file).filter(|(marker, ..)| *marker == COMMENT);
    let pairs = comments.filter_map(|(_, comment, _)| {
        let text = String::from_utf8_lossy(comment);
        let (key, text) = text.trim_end_matches('\0').split_once('\0')?;
        Some((key.to_string(), text.to_string()))
    });
    pairs.collect()
}

/// The segments up to the first scan: marker, content and what follows.
fn segments(file: &[u8]) -> impl Iterator<Item = (u8, &[u8], &[u8])> {
    let mut rest = file.strip_prefix(&[0xff, 0xd8]).unwrap_or_default();
    let mut ended = false;
    std::iter::from_fn(move || {
        if ended {
            return None;
        }
        // Any number of 0xff may stand before a marker.
        let start = rest.iter().position(|&byte| byte != 0xff)?;
        let (&marker, after) = rest[start..].split_first()?;
        let (length, _) = after.split_first_chunk()?;
        let length = usize::from(u16::from_be_bytes(*length));
        let content = after.get(2..length)?;
        rest = &after[length..];
        ended = marker == SCAN || start == 0;
        (start > 0).then_some((marker, content, rest))
    })
}
