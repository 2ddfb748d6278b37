//! Texts in EXIF data, which is a TIFF file without a picture (TIFF 6.0, Exif 2.32).
//!
//! A1111 puts its `parameters` into the user comment. The maker note, which each maker of cameras fills as it likes, holds sdrun's
//! own record.

use crate::metadata::{PARAMETERS, SDRUN};

/// Tag of the pointer to the folder with EXIF's own tags.
const EXIF: u16 = 0x8769;
const MAKER_NOTE: u16 = 0x927c;
const USER_COMMENT: u16 = 0x9286;

const BYTE: u16 = 1;
const ASCII: u16 = 2;
const LONG: u16 = 4;
const UNDEFINED: u16 = 7;

/// Start of a maker note of sdrun.
const MAKER: &[u8] = b"sdrun\0";
/// Start of a user comment in UTF-16.
const UNICODE: &[u8] = b"UNICODE\0";

/// EXIF data with the texts `parameters` and `sdrun`; `None` if there is none. Leaves out with a warning what does not fit into
/// `most` bytes.
pub(super) fn encode(texts: &[(&str, &str)], most: usize) -> Option<Vec<u8>> {
    let find = |name: &str| texts.iter().find(|(key, _)| *key == name).map(|(_, text)| *text);
    let note = find(SDRUN).map(|text| [MAKER, text.as_bytes()].concat());
    let comment = find(PARAMETERS).map(|text| {
        let units = text.encode_utf16().flat_map(u16::to_be_bytes);
        UNICODE.iter().copied().chain(units).collect::<Vec<u8>>()
    });
    // Folders list their tags in ascending order.
    let mut entries: Vec<(u16, Vec<u8>)> = [(MAKER_NOTE, note), (USER_COMMENT, comment)]
        .into_iter()
        .filter_map(|(tag, text)| Some((tag, text?)))
        .collect();
    while !entries.is_empty() {
        let tiff = tiff(&entries);
        if tiff.len() <= most {
            return Some(tiff);
        }
        // The record repeats what the parameters say.
        entries.remove(0);
        tracing::warn!(
            "the metadata is too long for such a file, so that a part of it is left out; PNG holds any length"
        );
    }
    None
}

/// A TIFF file whose EXIF folder has these entries.
fn tiff(entries: &[(u16, Vec<u8>)]) -> Vec<u8> {
    const FOLDER: u32 = 8;
    // A folder has 2 bytes of count, 12 per entry, and 4 of the next folder's place.
    const EXIF_FOLDER: u32 = FOLDER + 2 + 12 + 4;
    let mut out = b"MM\0\x2a".to_vec();
    let entry = |out: &mut Vec<u8>, tag: u16, kind: u16, count: usize, value: u32| {
        out.extend(tag.to_be_bytes());
        out.extend(kind.to_be_bytes());
        out.extend((count as u32).to_be_bytes());
        out.extend(value.to_be_bytes());
    };
    out.extend(FOLDER.to_be_bytes());
    out.extend(1u16.to_be_bytes());
    entry(&mut out, EXIF, LONG, 1, EXIF_FOLDER);
    out.extend(0u32.to_be_bytes());
    out.extend((entries.len() as u16).to_be_bytes());
    let mut place = EXIF_FOLDER as usize + 2 + 12 * entries.len() + 4;
    for (tag, content) in entries {
        entry(&mut out, *tag, UNDEFINED, content.len(), place as u32);
        place += content.len().next_multiple_of(2);
    }
    out.extend(0u32.to_be_bytes());
    for (_, content) in entries {
        out.extend(content);
        out.resize(out.len().next_multiple_of(2), 0);
    }
    out
}

/// Texts in EXIF data: `parameters` from the user comment, `sdrun` from a maker note of sdrun, and `prompt` from ComfyUI, which
/// stores `prompt:` and its graph in the first free tag that holds text.
pub(super) fn texts(exif: &[u8]) -> Vec<(String, String)> {
    // Some writers of WebP repeat JPEG's name of the segment.
    let Some(tiff) = Tiff::new(exif.strip_prefix(b"Exif\0\0").unwrap_or(exif)) else { return Vec::new() };
    let first = tiff.number(&tiff.bytes[4..]).map_or(Vec::new(), |place| tiff.folder(place));
    let own = first.iter().find(|entry| entry.tag == EXIF).and_then(|entry| tiff.number(entry.content));
    let own = own.map_or(Vec::new(), |place| tiff.folder(place));
    let text = |entry: &Entry<'_>| match (entry.tag, entry.content) {
        (USER_COMMENT, content) => Some((PARAMETERS, comment(content, tiff.big_endian))),
        (MAKER_NOTE, content) => content.strip_prefix(MAKER).map(|text| (SDRUN, utf8(text))),
        (_, content) => content.strip_prefix(b"prompt:").map(|text| ("prompt", utf8(text))),
    };
    first.iter().chain(&own).filter_map(text).map(|(key, text)| (key.to_string(), text)).collect()
}

/// A TIFF file.
struct Tiff<'a> {
    bytes: &'a [u8],
    big_endian: bool,
}

/// An entry of a folder whose content is bytes or one number.
struct Entry<'a> {
    tag: u16,
    content: &'a [u8],
}

impl<'a> Tiff<'a> {
    fn new(bytes: &'a [u8]) -> Option<Self> {
        let big_endian = match bytes.get(..4)? {
            b"MM\0\x2a" => true,
            b"II\x2a\0" => false,
            _ => return None,
        };
        Some(Tiff { bytes, big_endian })
    }

    fn short(&self, bytes: &[u8]) -> Option<u16> {
        let bytes = *bytes.first_chunk()?;
        Some(if self.big_endian { u16::from_be_bytes(bytes) } else { u16::from_le_bytes(bytes) })
    }

    /// The number at the start of `bytes`.
    fn number(&self, bytes: &[u8]) -> Option<u32> {
        let bytes = *bytes.first_chunk()?;
        Some(if self.big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) })
    }

    /// The entries of the folder at `place`, as far as they lie inside the file.
    fn folder(&self, place: u32) -> Vec<Entry<'a>> {
        let folder = self.bytes.get(place as usize..).unwrap_or_default();
        let count = self.short(folder).unwrap_or_default();
        let entries = folder.get(2..).unwrap_or_default().as_chunks::<12>().0;
        entries.iter().take(count.into()).filter_map(|entry| self.entry(entry)).collect()
    }

    fn entry(&self, entry: &'a [u8; 12]) -> Option<Entry<'a>> {
        let (tag, kind) = (self.short(entry)?, self.short(&entry[2..])?);
        let count = self.number(&entry[4..])? as usize;
        let content = match (kind, count) {
            (LONG, 1) => &entry[8..],
            // Four bytes or fewer stand in the entry itself.
            (BYTE | ASCII | UNDEFINED, 0..=4) => &entry[8..8 + count],
            (BYTE | ASCII | UNDEFINED, _) => {
                let place = self.number(&entry[8..])? as usize;
                self.bytes.get(place..place.checked_add(count)?)?
            }
            _ => return None,
        };
        Some(Entry { tag, content })
    }
}

/// The text of a user comment, which starts with 8 bytes that name its encoding.
fn comment(content: &[u8], big_endian: bool) -> String {
    match content.split_at_checked(8) {
        Some((UNICODE, text)) => utf16(text, big_endian),
        Some((b"ASCII\0\0\0" | b"\0\0\0\0\0\0\0\0", text)) => utf8(text),
        _ => utf8(content),
    }
}

fn utf8(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').into()
}

/// Text in UTF-16. A1111 always writes it big-endian, others in the TIFF file's byte order. So in a little-endian file without a
/// mark, the order is the one that gives more ASCII.
fn utf16(bytes: &[u8], big_endian: bool) -> String {
    let zeros = |first: usize| bytes.iter().skip(first).step_by(2).filter(|&&byte| byte == 0).count();
    let little = bytes.starts_with(&[0xff, 0xfe]) || (!big_endian && zeros(1) > zeros(0));
    let order = if little { u16::from_le_bytes } else { u16::from_be_bytes };
    let units: Vec<u16> = bytes.as_chunks().0.iter().map(|pair| order(*pair)).collect();
    String::from_utf16_lossy(&units).trim_start_matches('\u{feff}').trim_end_matches('\0').into()
}
