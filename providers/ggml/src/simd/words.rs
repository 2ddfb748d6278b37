//! Numbers as 32-bit words, and words as numbers.

/// What a word of 32 bits holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Words {
    /// One f32.
    F32,
    /// Two bf16; only where [`Level::multiplies_bf16`](super::Level::multiplies_bf16).
    Bf16,
    /// Four integers of 8 bits with a scale that others share; only where
    /// [`Level::multiplies_bytes`](super::Level::multiplies_bytes).
    Bytes,
}

impl Words {
    /// Elements in a word.
    pub(crate) fn elements(self) -> usize {
        match self {
            Words::F32 => 1,
            Words::Bf16 => 2,
            Words::Bytes => 4,
        }
    }
}

/// The bits of f32 elements.
pub(crate) fn as_words(values: &[f32]) -> &[u32] {
    // SAFETY: every bit pattern is a u32, of the same size and alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), values.len()) }
}

/// The bits of f32 elements, for writing.
pub(crate) fn as_words_mut(values: &mut [f32]) -> &mut [u32] {
    // SAFETY: as above, and every u32 is the bits of an f32.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), values.len()) }
}

/// The f32 elements whose bits these words are.
pub(crate) fn as_floats(words: &[u32]) -> &[f32] {
    // SAFETY: every bit pattern is an f32, of the same size and alignment.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len()) }
}

/// The bytes of words.
pub(crate) fn as_bytes(words: &[u32]) -> &[u8] {
    // SAFETY: every word is four bytes.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len() * 4) }
}
