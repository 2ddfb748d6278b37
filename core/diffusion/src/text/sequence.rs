//! Sequences: token ids for encoders that take a whole prompt, such as T5.

use super::tokenizer::{Tokenizer, TokenizerError};
use crate::prompt::Piece;

/// How long a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// Cut or padded to this many ids, as in diffusers.
    Exactly(usize),
    /// Padded to this many ids and never cut, as in ComfyUI.
    AtLeast(usize),
}

impl Length {
    /// SD 3's T5 in diffusers.
    pub const SD3: Self = Self::Exactly(256);
    /// SD 3's T5 in ComfyUI.
    pub const SD3_COMFY: Self = Self::AtLeast(77);
    /// Flux.1 dev and Chroma.
    pub const FLUX_DEV: Self = Self::Exactly(512);
    /// Flux.1 schnell.
    pub const FLUX_SCHNELL: Self = Self::Exactly(256);
    /// Flux.1 in ComfyUI and Forge.
    pub const FLUX_COMFY: Self = Self::AtLeast(256);
    /// Chroma.
    pub const CHROMA: Self = Self::Exactly(512);
    /// PixArt-Sigma.
    pub const PIXART: Self = Self::Exactly(300);

    /// The same with `count` more ids.
    pub fn and(self, count: usize) -> Self {
        match self {
            Self::Exactly(length) => Self::Exactly(length + count),
            Self::AtLeast(length) => Self::AtLeast(length + count),
        }
    }
}

/// A prompt as ids of one length.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    /// The ids: marks before the text, text, marks after it, padding.
    pub ids: Vec<i64>,
    /// The weight of each id; 1 for marks and padding.
    pub weights: Vec<f32>,
    /// 1 for text and marks, 0 for padding.
    pub mask: Vec<i64>,
    /// Tokens that did not fit.
    pub lost: usize,
    /// How many ids after the first belong to an instruction and are only for the encoder: the denoiser does not get their states.
    pub instruction: usize,
    marks: Marks,
}

impl Sequence {
    /// Pads it to this many ids.
    pub fn pad_to(&mut self, count: usize) {
        let count = count.max(self.ids.len());
        self.ids.resize(count, self.marks.pad);
        self.weights.resize(count, 1.0);
        self.mask.resize(count, 0);
    }

    /// A sequence of the same length for an empty prompt.
    pub fn empty(&self) -> Self {
        self.marks.around(&[], Length::Exactly(self.ids.len()))
    }
}

/// Makes a sequence. `pad` is the padding id; T5's is 0.
///
/// Each piece is tokenized alone, as in ComfyUI. `BREAK` has no meaning. If a length is too short for the marks, they are cut too.
///
/// # Errors
/// The tokenizer's.
pub fn sequence(
    pieces: &[Piece],
    tokenizer: &Tokenizer,
    length: Length,
    pad: i64,
) -> Result<Sequence, TokenizerError> {
    let mut text: Vec<(i64, f32)> = Vec::new();
    for piece in pieces {
        if let Piece::Text(words, weight) = piece {
            text.extend(tokenizer.ids(words)?.into_iter().map(|id| (id, *weight as f32)));
        }
    }
    let marks = Marks { before: tokenizer.before().into(), after: tokenizer.after().into(), pad };
    Ok(marks.around(&text, length))
}

/// Makes a sequence of an instruction to the encoder and a prompt, for which `length` counts. As in diffusers, the denoiser gets the
/// state of the instruction's last id, which may be part of the prompt's first word.
///
/// # Errors
/// The tokenizer's.
pub fn instructed(
    instruction: &str,
    pieces: &[Piece],
    tokenizer: &Tokenizer,
    length: Length,
    pad: i64,
) -> Result<Sequence, TokenizerError> {
    let ids = tokenizer.ids(instruction)?;
    let hidden = ids.len().saturating_sub(1);
    let mut pieces = pieces.to_vec();
    match pieces.first_mut() {
        Some(Piece::Text(words, 1.0)) => words.insert_str(0, instruction),
        _ => pieces.insert(0, Piece::Text(instruction.into(), 1.0)),
    }
    let mut made = sequence(&pieces, tokenizer, length.and(hidden), pad)?;
    made.instruction = hidden;
    made.marks.before.extend(ids);
    Ok(made)
}

/// Ids that are no text.
#[derive(Clone, Debug, PartialEq)]
struct Marks {
    before: Vec<i64>,
    after: Vec<i64>,
    pad: i64,
}

impl Marks {
    /// Puts marks around ids with weights, and pads them.
    fn around(&self, text: &[(i64, f32)], length: Length) -> Sequence {
        let (least, most) = match length {
            Length::Exactly(count) => (count, count),
            Length::AtLeast(count) => (count, usize::MAX),
        };
        let room = most.saturating_sub(self.before.len() + self.after.len());
        let mark = |id: &i64| (*id, 1.0);
        let mut all: Vec<(i64, f32)> = self.before.iter().map(mark).collect();
        all.extend(text.iter().take(room));
        all.extend(self.after.iter().map(mark));
        all.truncate(most);
        let count = all.len();
        all.resize(count.max(least), (self.pad, 1.0));
        let mask = (0..all.len()).map(|at| i64::from(at < count)).collect();
        let (ids, weights) = all.into_iter().unzip();
        let lost = text.len().saturating_sub(room);
        Sequence { ids, weights, mask, lost, instruction: 0, marks: self.clone() }
    }
}
