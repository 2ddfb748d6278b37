//! Text to token ids.
//!
//! CLIP's vocabulary is built in. Other vocabularies come from the user's files: `tokenizer.json`, a SentencePiece model
//! (`spiece.model`), or the values that a GGUF file of T5 stores.

mod charsmap;
mod clip;
mod sentencepiece;

pub use sentencepiece::{Piece, PieceKind, Unigram};

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Why a tokenizer cannot be made or used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TokenizerError {
    /// The file is not a `tokenizer.json`, or uses an unknown part.
    #[error("tokenizer.json cannot be read: {reason}. Use the file that belongs to the text encoder.")]
    Json {
        /// What the reader found.
        reason: String,
    },
    /// The file is not a SentencePiece model, or is damaged.
    #[error(
        "the SentencePiece model cannot be read: {reason}. Use the file that belongs to the text encoder."
    )]
    SentencePiece {
        /// What the reader found.
        reason: String,
    },
    /// The SentencePiece model is valid but of a kind that this reader lacks.
    #[error(
        "the SentencePiece model {what}, which is not supported. Use the encoder's tokenizer.json instead."
    )]
    Unsupported {
        /// What is not supported.
        what: &'static str,
    },
    /// Tokenization failed, for instance because the vocabulary has no token for unknown text.
    #[error(
        "the text cannot be tokenized: {reason}. Use the tokenizer file that belongs to the text encoder."
    )]
    Text {
        /// What the tokenizer said.
        reason: String,
    },
}

/// A kind of tokenizer.
enum Kind {
    Clip(tokenizers::Tokenizer),
    SentencePiece(sentencepiece::SentencePiece),
    Json(tokenizers::Tokenizer),
}

/// Turns text into token ids.
pub struct Tokenizer {
    kind: Kind,
    before: Vec<i64>,
    after: Vec<i64>,
}

impl Tokenizer {
    /// CLIP's tokenizer, with the built-in vocabulary of 49,408 tokens. Unpacking it takes a fraction of a second, so keep it.
    ///
    /// A text is cleaned as in OpenAI's `simple_tokenizer.py`: HTML entities are resolved twice, whitespace is collapsed, letters
    /// become lower case. Unicode is composed (NFC). The rest of `ftfy`, which OpenAI's program calls, is left out, as in
    /// transformers.
    pub fn clip() -> Result<Self, TokenizerError> {
        Ok(Self { kind: Kind::Clip(clip::tokenizer()?), before: vec![clip::START], after: vec![clip::END] })
    }

    /// Reads the content of a `tokenizer.json` of Hugging Face's tokenizers. Its truncation and padding are ignored.
    ///
    /// # Errors
    /// Content that the tokenizers crate cannot read.
    pub fn json(content: &[u8]) -> Result<Self, TokenizerError> {
        let error = |reason| TokenizerError::Json { reason };
        let mut inner = contained(|| tokenizers::Tokenizer::from_bytes(content)).map_err(error)?;
        inner.with_truncation(None).map_err(|e| error(e.to_string()))?;
        inner.with_padding(None);
        // The file's post-processor says which ids go around a text.
        let encode = |special| contained(|| inner.encode("a", special)).map_err(error);
        let ids: Vec<i64> = encode(false)?.get_ids().iter().map(|id| i64::from(*id)).collect();
        let around: Vec<i64> = encode(true)?.get_ids().iter().map(|id| i64::from(*id)).collect();
        let at = (0..=around.len()).find(|at| around.get(*at..).is_some_and(|rest| rest.starts_with(&ids)));
        let (before, rest) = around.split_at(at.unwrap_or_default());
        let after = rest.get(ids.len()..).unwrap_or_default().into();
        Ok(Self { before: before.into(), after, kind: Kind::Json(inner) })
    }

    /// Reads the content of a SentencePiece model of the kind Unigram, such as T5's `spiece.model`.
    ///
    /// # Errors
    /// Damaged content, another kind of model.
    pub fn sentence_piece(content: &[u8]) -> Result<Self, TokenizerError> {
        Self::unigram(Unigram::parse(content)?)
    }

    /// Makes a tokenizer from a Unigram vocabulary.
    ///
    /// # Errors
    /// A vocabulary without a piece for unknown characters, scores that are no numbers, a damaged map of characters.
    pub fn unigram(unigram: Unigram) -> Result<Self, TokenizerError> {
        let after = unigram.end().into_iter().collect();
        Ok(Self { kind: Kind::SentencePiece(unigram.tokenizer()?), before: Vec::new(), after })
    }

    /// The ids of a text, without those of [`before`](Self::before) and [`after`](Self::after).
    ///
    /// # Errors
    /// Text that the vocabulary cannot express.
    pub fn ids(&self, text: &str) -> Result<Vec<i64>, TokenizerError> {
        let encode = |inner: &tokenizers::Tokenizer, text: &str| {
            let encoding = inner.encode(text, false)?;
            Ok(encoding.get_ids().iter().map(|id| i64::from(*id)).collect())
        };
        contained(|| match &self.kind {
            Kind::Clip(inner) => encode(inner, &clip::clean(text)),
            Kind::SentencePiece(model) => model.ids(text),
            Kind::Json(inner) => encode(inner, text),
        })
        .map_err(|reason| TokenizerError::Text { reason })
    }

    /// Ids that the encoder expects before a text, such as CLIP's start of text.
    pub fn before(&self) -> &[i64] {
        &self.before
    }

    /// Ids that the encoder expects after a text, such as the end of text.
    pub fn after(&self) -> &[i64] {
        &self.after
    }

    /// Size of the vocabulary.
    pub fn len(&self) -> usize {
        match &self.kind {
            Kind::Clip(inner) | Kind::Json(inner) => inner.get_vocab_size(true),
            Kind::SentencePiece(model) => model.inner.get_vocab_size(true),
        }
    }

    /// Whether the vocabulary is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Runs code of the tokenizers crate on data from a file. The crate panics on some damaged files; this makes it an error.
fn contained<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!("its content contradicts itself ({})", text.unwrap_or("no details")))
        }
    }
}

#[cfg(test)]
mod tests;
