//! The vocabulary of a text encoder, where its file holds one.

use super::{Checkpoint, Source};
use sdrun_abi::Result;

/// A vocabulary, as a file holds it.
#[derive(Clone, Debug, PartialEq)]
pub enum Vocabulary {
    /// The content of a SentencePiece model (tensor `spiece_model` of ComfyUI's files).
    SentencePiece(Vec<u8>),
    /// The content of a `tokenizer.json` (tensor `tokenizer_json`).
    Json(Vec<u8>),
    /// The values of a Unigram model (`tokenizer.ggml.…` of GGUF files).
    Pieces {
        /// The texts, with `▁` for a space.
        texts: Vec<String>,
        /// Logarithms of their probabilities.
        scores: Vec<f32>,
        /// SentencePiece's numbers for what they are.
        kinds: Vec<i32>,
        /// SentencePiece's precompiled map of characters; empty without one.
        charsmap: Vec<u8>,
        /// Whether a text begins with a space that it does not have.
        space_prefix: bool,
        /// Whether runs of spaces are one.
        collapse_spaces: bool,
    },
}

impl Checkpoint {
    /// The vocabulary that the file holds beside its weights; `None` if it holds none that sdrun knows.
    ///
    /// # Errors
    /// Errors of reading the file.
    pub fn vocabulary(&self) -> Result<Option<Vocabulary>> {
        for Source { container, .. } in &self.sources {
            for key in container.keys() {
                let of: fn(Vec<u8>) -> Vocabulary = match key.rsplit('.').next() {
                    Some("spiece_model") => Vocabulary::SentencePiece,
                    Some("tokenizer_json") => Vocabulary::Json,
                    _ => continue,
                };
                return Ok(Some(of(container.read(key, None)?.data().to_vec())));
            }
            if let Some(found) = container.vocabulary() {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}
