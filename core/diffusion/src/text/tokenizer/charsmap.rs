//! SentencePiece's precompiled map of characters, which for T5 is close to NFKC.

/// Replaces prefixes of a text.
///
/// The format is a `u32` with the size of a trie in bytes, the trie, and the replacements, each ended by a zero byte
/// (`normalizer.cc` of SentencePiece). The trie is an array of `u32` units in the layout of Darts-clone. All numbers are
/// little-endian.
pub(super) struct Charsmap {
    units: Vec<u32>,
    replacements: String,
}

impl Charsmap {
    /// Reads a map. `None` if the data is damaged.
    pub(super) fn parse(data: &[u8]) -> Option<Self> {
        let (size, rest) = data.split_first_chunk()?;
        let (trie, replacements) = rest.split_at_checked(u32::from_le_bytes(*size) as usize)?;
        let units = trie.as_chunks().0.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
        Some(Self { units, replacements: std::str::from_utf8(replacements).ok()?.into() })
    }

    /// The longest prefix of `text` that the map replaces: its length in bytes and the replacement.
    pub(super) fn longest(&self, text: &str) -> Option<(usize, &str)> {
        let mut found = None;
        let mut position = offset(*self.units.first()?);
        for (index, byte) in text.bytes().enumerate() {
            position ^= usize::from(byte);
            let Some(unit) = self.units.get(position).filter(|unit| label(**unit) == u32::from(byte)) else {
                break;
            };
            position ^= offset(*unit);
            if has_value(*unit) {
                found = self.units.get(position).map(|unit| (index + 1, value(*unit)));
            }
        }
        let (length, start) = found.filter(|(length, _)| text.is_char_boundary(*length))?;
        self.replacements.get(start..)?.split('\0').next().map(|replacement| (length, replacement))
    }
}

/// Distance to a unit's children.
fn offset(unit: u32) -> usize {
    ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize
}

/// The byte that leads to a unit. Units with values have a high bit that no byte equals.
fn label(unit: u32) -> u32 {
    unit & ((1 << 31) | 0xff)
}

/// Whether a key ends here; the value is in the first child.
fn has_value(unit: u32) -> bool {
    unit & (1 << 8) != 0
}

/// Where the replacement starts.
fn value(unit: u32) -> usize {
    (unit & !(1 << 31)) as usize
}
