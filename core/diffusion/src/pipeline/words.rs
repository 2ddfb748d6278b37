//! Prompts to token ids, with learned words (embeddings) among them.

use super::{Parts, Resolved, Result, encoder::Text, names::stem};
use crate::{
    family::{Conditioning, Encoder, Vocabulary},
    program::Program,
    prompt::{Piece, weighted, weighted_comfy},
    text::{
        chunks::{self, Chunks, Marks, Rules, equalize},
        condition::{SANA_INSTRUCTION, lower_text},
        emphasis::Emphasis,
        sequence::{Length, Sequence, instructed, sequence},
        tokenizer::Tokenizer,
    },
};
use sdrun::{EmbeddingFile, weights::embedding::Embedding};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

/// The language of prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Syntax {
    /// A1111's: `(a:1.2)`, `[a]`, `[a:b:0.5]`, `[a|b]`, `AND`, `BREAK`. Weights multiply states and keep their mean.
    #[default]
    A1111,
    /// ComfyUI's: `(a:1.2)`, `embedding:name`. Weights scale the distance to the empty prompt.
    ComfyUi,
    /// None, as in diffusers: what does not fit into a model's tokens is lost.
    Plain,
}

impl Syntax {
    /// The language of a program.
    pub fn of(program: Program) -> Self {
        match program {
            Program::A1111 => Self::A1111,
            Program::ComfyUi => Self::ComfyUi,
            Program::Diffusers => Self::Plain,
        }
    }

    /// Whether prompts can change during the steps and have parts.
    pub(super) fn has_schedules(self) -> bool {
        self == Self::A1111
    }

    /// What weights do to the states of chunks.
    pub(super) fn emphasis(self) -> Emphasis {
        match self {
            Self::A1111 => Emphasis::Original,
            Self::ComfyUi => Emphasis::ComfyUi,
            Self::Plain => Emphasis::None,
        }
    }

    /// What weights do to the states of T5. A1111 has no such models; Forge follows ComfyUI there.
    pub(super) fn sequence_emphasis(self) -> Emphasis {
        if self == Self::Plain { Emphasis::None } else { Emphasis::ComfyUi }
    }

    fn rules(self) -> Rules {
        match self {
            Self::A1111 => Rules::A1111,
            Self::ComfyUi => Rules::ComfyUi,
            Self::Plain => Rules::Diffusers,
        }
    }

    fn pieces(self, text: &str) -> Vec<Piece> {
        match self {
            Self::A1111 => weighted(text),
            Self::ComfyUi => weighted_comfy(text),
            Self::Plain => vec![Piece::Text(text.into(), 1.0)],
        }
    }
}

/// A word that an embedding file teaches the text encoders.
#[derive(Clone, Debug)]
pub struct Word {
    /// Its name in prompts.
    pub name: String,
    /// The file.
    pub file: PathBuf,
    vectors: usize,
}

impl Word {
    /// Opens an embedding. Its name is the file's without the ending.
    ///
    /// # Errors
    /// Errors of reading the file.
    pub fn open(file: &Path) -> Result<Self> {
        let vectors = Embedding::open(file)?.tokens().len();
        Ok(Word { name: stem(file), file: file.into(), vectors })
    }
}

/// All texts as ids for one encoder.
pub(super) struct Divided {
    pub(super) ids: Ids,
    /// Tokens of the longest text.
    pub(super) tokens: usize,
    /// Tokens that the model will not see.
    pub(super) lost: usize,
    /// The embeddings in use, with the ids that stand for them.
    pub(super) embeddings: Vec<EmbeddingFile>,
}

/// Ids of all texts; all have the same length.
pub(super) enum Ids {
    Chunks(Vec<Chunks>),
    Sequences(Vec<Sequence>),
}

/// Divides all texts alike.
pub(super) fn divided(
    texts: &[Text],
    tokenizer: &Tokenizer,
    encoder: &Encoder,
    parts: &Parts,
    request: &Resolved,
) -> Result<Divided> {
    let Some(least) = encoder.tokens else {
        return in_chunks(texts, tokenizer, encoder, &parts.words, request.syntax);
    };
    let (is_lower, instruction) = match parts.family.conditioning {
        Conditioning::PixArt => (true, None),
        Conditioning::Sana => (true, Some(SANA_INSTRUCTION)),
        _ => (false, None),
    };
    let lower =
        |Text { words, is_negative }: &Text| Text { words: lower_text(words), is_negative: *is_negative };
    let texts = if is_lower { texts.iter().map(lower).collect() } else { texts.to_vec() };
    in_sequences(&texts, tokenizer, least, instruction, request.syntax)
}

/// `instruction` comes before each prompt, but not before negative ones.
fn in_sequences(
    texts: &[Text],
    tokenizer: &Tokenizer,
    least: usize,
    instruction: Option<&str>,
    syntax: Syntax,
) -> Result<Divided> {
    let length = match syntax {
        Syntax::Plain => Length::Exactly(least),
        Syntax::A1111 | Syntax::ComfyUi => Length::AtLeast(least),
    };
    let of = |text: &Text| -> Result<Sequence> {
        let pieces = syntax.pieces(&text.words);
        Ok(match instruction.filter(|_| !text.is_negative) {
            Some(instruction) => instructed(instruction, &pieces, tokenizer, length, PAD)?,
            None => sequence(&pieces, tokenizer, length, PAD)?,
        })
    };
    let mut all = texts.iter().map(of).collect::<Result<Vec<_>>>()?;
    let longest = all.iter().map(|sequence| sequence.ids.len()).max().unwrap_or(least);
    all.iter_mut().for_each(|sequence| sequence.pad_to(longest));
    let shown = |sequence: &Sequence| sequence.mask.iter().filter(|bit| **bit != 0).count();
    let count = |sequence: &Sequence| shown(sequence).saturating_sub(sequence.instruction);
    let tokens = all.iter().map(count).max().unwrap_or(0);
    let lost = all.iter().map(|sequence| sequence.lost).max().unwrap_or(0);
    Ok(Divided { ids: Ids::Sequences(all), tokens, lost, embeddings: Vec::new() })
}

/// The id that pads the sequences of T5 and Gemma.
const PAD: i64 = 0;

fn in_chunks(
    texts: &[Text],
    tokenizer: &Tokenizer,
    encoder: &Encoder,
    words: &[Word],
    syntax: Syntax,
) -> Result<Divided> {
    let ends = |ids: &[i64], default| ids.first().copied().unwrap_or(default);
    let start = ends(tokenizer.before(), Marks::CLIP_L.start);
    let end = ends(tokenizer.after(), Marks::CLIP_L.end);
    let pad = if encoder.vocabulary == Vocabulary::OpenClip { Marks::OPEN_CLIP.pad } else { end };
    let marks = Marks { start, end, pad };
    let known: Vec<chunks::Embedding> = words
        .iter()
        .map(|word| chunks::Embedding { name: word.name.clone(), vectors: word.vectors })
        .collect();
    let divide =
        |text: &Text| chunks::chunks(syntax.rules(), &syntax.pieces(&text.words), tokenizer, marks, &known);
    let mut all = texts.iter().map(divide).collect::<Result<Vec<_>, _>>()?;
    let tokens = all.iter().map(|prompt| prompt.tokens).max().unwrap_or(0);
    let lost = all.iter().map(|prompt| prompt.lost).max().unwrap_or(0);
    let embeddings = placed(&mut all, words, start.min(end));
    equalize(&mut all);
    Ok(Divided { ids: Ids::Chunks(all), tokens, lost, embeddings })
}

/// Gives each embedding in use ids below `end` that no text contains, the highest first. The encoder's table holds its vectors there.
fn placed(all: &mut [Chunks], words: &[Word], end: i64) -> Vec<EmbeddingFile> {
    let chunks = || all.iter().flat_map(|prompt| &prompt.chunks);
    let used: BTreeSet<usize> = chunks().flat_map(|c| &c.vectors).map(|placed| placed.embedding).collect();
    let mut taken: BTreeSet<i64> = chunks().flat_map(|c| c.ids.iter().copied()).collect();
    let mut first = vec![0; words.len()];
    let mut files = Vec::new();
    for index in used {
        let count = words[index].vectors as i64;
        let free = (0..=end - count).rev().find(|at| taken.range(*at..at + count).next().is_none());
        first[index] = free.unwrap_or_default();
        taken.extend(first[index]..first[index] + count);
        files.push(EmbeddingFile { file: words[index].file.clone(), token: first[index] as usize });
    }
    all.iter_mut().for_each(|prompt| prompt.place(|embedding, vector| first[embedding] + vector as i64));
    files
}
