//! Chunks: how token ids fill the 77 places of a CLIP encoder.
//!
//! A chunk is a start of text, up to 75 tokens, an end of text, and padding. Long prompts take several chunks; each is encoded
//! alone and their hidden states are joined.

mod a1111;
mod comfy;

use super::tokenizer::{Tokenizer, TokenizerError};
use crate::prompt::Piece;

/// Places of a chunk.
pub const LENGTH: usize = 77;

/// Tokens of a chunk between start and end.
pub const ROOM: usize = LENGTH - 2;

/// Whose rules divide a prompt into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rules {
    /// A1111 and Forge. A chunk that is full ends at its last comma if that is at most 20 tokens back; the rest moves on. `BREAK`
    /// ends a chunk. Names of embeddings are found anywhere, the longest first, whatever their case. An embedding that does not
    /// fit starts a new chunk.
    A1111,
    /// ComfyUI. Text of one weight stays together if it has fewer than 8 tokens. `embedding:name` is an embedding.
    ComfyUi,
    /// diffusers: one chunk, what does not fit is lost. Names of embeddings are found anywhere. `BREAK` has no meaning.
    Diffusers,
}

/// The ids of an encoder that are no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    /// Start of text.
    pub start: i64,
    /// End of text.
    pub end: i64,
    /// Padding.
    pub pad: i64,
}

impl Marks {
    /// OpenAI's CLIP ViT-L, in SD 1, SDXL, SD 3 and Flux: pads with the end of text.
    pub const CLIP_L: Self = Self { start: 49406, end: 49407, pad: 49407 };
    /// OpenCLIP ViT-H in SD 2 and ViT-bigG in SDXL and SD 3: pads with 0.
    pub const OPEN_CLIP: Self = Self { start: 49406, end: 49407, pad: 0 };
}

/// An embedding (textual inversion) that a prompt may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Embedding {
    /// The name, usually the file's without its extension.
    pub name: String,
    /// How many vectors it has. Each takes the place of a token.
    pub vectors: usize,
}

/// A chunk.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    /// [`LENGTH`] ids. Places of embeddings hold 0.
    pub ids: Vec<i64>,
    /// The weight of each place; 1 for marks.
    pub weights: Vec<f32>,
    /// Places of embeddings.
    pub vectors: Vec<Placed>,
}

/// Where a vector of an embedding goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Index in [`Chunk::ids`].
    pub position: usize,
    /// Index in the list of embeddings.
    pub embedding: usize,
    /// Index of the vector in the embedding.
    pub vector: usize,
}

/// The chunks of a prompt; at least one.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunks {
    /// The chunks.
    pub chunks: Vec<Chunk>,
    /// Tokens that the chunks hold, without marks.
    pub tokens: usize,
    /// Tokens that did not fit.
    pub lost: usize,
    /// Names after `embedding:` that are not in the list. They are left out, as in ComfyUI.
    pub missing: Vec<String>,
    marks: Marks,
}

/// Why a prompt cannot be divided into chunks.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ChunkError {
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// An embedding has more vectors than a chunk has room for.
    #[error(
        "the embedding {name:?} has {vectors} vectors, but a chunk has room for {ROOM}. Take it out of the prompt."
    )]
    EmbeddingTooLong {
        /// Its name.
        name: String,
        /// Its size.
        vectors: usize,
    },
}

/// Divides a prompt into chunks.
///
/// For [`Rules::A1111`], `pieces` come from [`weighted`](crate::prompt::weighted); for [`Rules::ComfyUi`] from
/// [`weighted_comfy`](crate::prompt::weighted_comfy); diffusers takes a prompt as one piece.
///
/// # Errors
/// The tokenizer's, and an embedding that is longer than a chunk where rules do not divide it.
pub fn chunks(
    rules: Rules,
    pieces: &[Piece],
    tokenizer: &Tokenizer,
    marks: Marks,
    embeddings: &[Embedding],
) -> Result<Chunks, ChunkError> {
    let mut builder = Builder::new(marks);
    match rules {
        Rules::A1111 => a1111::fill(&mut builder, pieces, tokenizer, embeddings)?,
        Rules::ComfyUi => comfy::fill(&mut builder, pieces, tokenizer, embeddings)?,
        Rules::Diffusers => {
            let items = a1111::items(pieces, tokenizer, embeddings)?;
            let tokens: Vec<Token> = items.into_iter().flat_map(a1111::Item::tokens).collect();
            let kept = tokens.len().min(ROOM);
            builder.lost = tokens.len() - kept;
            builder.current.extend(tokens.into_iter().take(kept));
        }
    }
    Ok(builder.finish())
}

/// Gives prompts, such as a prompt and its negative one, the same number of chunks. Shorter ones get chunks without text, as in A1111.
pub fn equalize(prompts: &mut [Chunks]) {
    let count = prompts.iter().map(|prompt| prompt.chunks.len()).max().unwrap_or_default();
    for prompt in prompts {
        let empty = prompt.empty();
        prompt.chunks.resize(count, empty);
    }
}

impl Chunks {
    /// A chunk without text.
    pub fn empty(&self) -> Chunk {
        chunk(&[], self.marks)
    }

    /// Puts ids in the places of embeddings: `id` receives an embedding's index and the index of a vector.
    ///
    /// Encoders that find the end of text by the highest id (those of OpenAI and OpenCLIP) need ids below it.
    pub fn place(&mut self, id: impl Fn(usize, usize) -> i64) {
        for chunk in &mut self.chunks {
            for placed in &chunk.vectors {
                if let Some(place) = chunk.ids.get_mut(placed.position) {
                    *place = id(placed.embedding, placed.vector);
                }
            }
        }
    }
}

/// A token of a prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Token {
    id: i64,
    weight: f32,
    /// Index of the embedding and of its vector.
    vector: Option<(usize, usize)>,
}

/// The vectors of an embedding as tokens.
fn vectors(index: usize, embedding: &Embedding, weight: f32) -> Vec<Token> {
    (0..embedding.vectors).map(|vector| Token { id: 0, weight, vector: Some((index, vector)) }).collect()
}

/// Chunks in the making.
struct Builder {
    marks: Marks,
    done: Vec<Vec<Token>>,
    current: Vec<Token>,
    lost: usize,
    missing: Vec<String>,
}

impl Builder {
    fn new(marks: Marks) -> Self {
        Self { marks, done: Vec::new(), current: Vec::new(), lost: 0, missing: Vec::new() }
    }

    /// Ends the current chunk.
    fn next(&mut self) {
        self.done.push(std::mem::take(&mut self.current));
    }

    fn finish(mut self) -> Chunks {
        if !self.current.is_empty() || self.done.is_empty() {
            self.next();
        }
        Chunks {
            chunks: self.done.iter().map(|tokens| chunk(tokens, self.marks)).collect(),
            tokens: self.done.iter().map(Vec::len).sum(),
            lost: self.lost,
            missing: self.missing,
            marks: self.marks,
        }
    }
}

/// Puts marks around at most [`ROOM`] tokens.
fn chunk(tokens: &[Token], marks: Marks) -> Chunk {
    let mark = |id| Token { id, weight: 1.0, vector: None };
    let mut all = vec![mark(marks.start)];
    all.extend(tokens);
    all.push(mark(marks.end));
    all.resize(LENGTH, mark(marks.pad));
    let placed = |(position, token): (usize, &Token)| {
        token.vector.map(|(embedding, vector)| Placed { position, embedding, vector })
    };
    Chunk {
        ids: all.iter().map(|token| token.id).collect(),
        weights: all.iter().map(|token| token.weight).collect(),
        vectors: all.iter().enumerate().filter_map(placed).collect(),
    }
}

#[cfg(test)]
mod tests;
