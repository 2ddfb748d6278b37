//! SentencePiece models of the kind Unigram, which T5 uses.
//!
//! Rules and field numbers are those of `sentencepiece_model.proto`, `normalizer.cc` and `unigram_model.cc`.

use super::{TokenizerError, charsmap::Charsmap};
use prost::Message;

/// Stands for a space in pieces.
const SPACE: char = '▁';

/// What a piece is for. The numbers are those of SentencePiece; GGUF's `tokenizer.ggml.token_type` has the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceKind {
    /// Text.
    Normal = 1,
    /// Stands for characters that no piece has.
    Unknown = 2,
    /// A mark such as the end of text. Never matches text.
    Control = 3,
    /// A symbol that is always one token.
    Symbol = 4,
    /// Never used.
    Unused = 5,
    /// A single byte. A vocabulary has none or all 256, in order.
    Byte = 6,
}

impl PieceKind {
    /// The kind with a number, or `None` if there is no such kind.
    pub fn of(number: i32) -> Option<Self> {
        use PieceKind::*;
        [Normal, Unknown, Control, Symbol, Unused, Byte].into_iter().find(|kind| *kind as i32 == number)
    }
}

/// An entry of the vocabulary. Its id is its place in [`Unigram::pieces`].
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// The text, with `▁` for a space.
    pub text: String,
    /// Logarithm of its probability.
    pub score: f32,
    /// What it is for.
    pub kind: PieceKind,
}

impl Piece {
    /// Makes a vocabulary from three lists of the same length, such as `tokenizer.ggml.tokens`, `tokenizer.ggml.scores` and
    /// `tokenizer.ggml.token_type` of a GGUF file.
    ///
    /// # Errors
    /// Lists of different lengths; kinds that do not exist.
    pub fn list(texts: Vec<String>, scores: &[f32], kinds: &[i32]) -> Result<Vec<Self>, TokenizerError> {
        let error = |reason| TokenizerError::SentencePiece { reason };
        let counts = [texts.len(), scores.len(), kinds.len()];
        if counts != [texts.len(); 3] {
            let [texts, scores, kinds] = counts;
            return Err(error(format!("it has {texts} pieces, {scores} scores and {kinds} kinds")));
        }
        let values = texts.into_iter().zip(scores).zip(kinds);
        let piece = |(id, ((text, score), kind)): (usize, ((String, &f32), &i32))| {
            let kind = PieceKind::of(*kind)
                .ok_or_else(|| error(format!("piece {id} has kind {kind}, which does not exist")))?;
            Ok(Self { text, score: *score, kind })
        };
        values.enumerate().map(piece).collect()
    }
}

/// A Unigram vocabulary (Kudo, 2018) with its rules, as plain data.
///
/// A GGUF file has the same values: [`Piece::list`] makes [`pieces`](Self::pieces); `tokenizer.ggml.precompiled_charsmap`,
/// `.add_space_prefix` and `.remove_extra_whitespaces` are the other fields.
#[derive(Clone, Debug, PartialEq)]
pub struct Unigram {
    /// The vocabulary.
    pub pieces: Vec<Piece>,
    /// SentencePiece's precompiled map of characters. If empty, characters stay as they are.
    pub charsmap: Vec<u8>,
    /// Whether a text begins with a space that it does not have.
    pub space_prefix: bool,
    /// Whether to drop spaces at both ends and to join runs of spaces.
    pub collapse_spaces: bool,
}

impl Unigram {
    /// Reads the content of a SentencePiece model.
    pub(super) fn parse(content: &[u8]) -> Result<Self, TokenizerError> {
        let error = |reason: String| TokenizerError::SentencePiece { reason };
        let model = ModelProto::decode(content).map_err(|e| error(e.to_string()))?;
        let trainer = model.trainer.unwrap_or_default();
        let normalizer = model.normalizer.unwrap_or_default();
        let unsupported = |what| Err(TokenizerError::Unsupported { what });
        if trainer.model_type.unwrap_or(UNIGRAM) != UNIGRAM {
            return unsupported("is not of the kind Unigram");
        }
        if trainer.treat_whitespace_as_suffix == Some(true) {
            return unsupported("puts spaces after words");
        }
        if normalizer.escape_whitespaces == Some(false) {
            return unsupported("keeps spaces as they are");
        }
        let normal = PieceKind::Normal as i32;
        let kinds: Vec<i32> = model.pieces.iter().map(|piece| piece.kind.unwrap_or(normal)).collect();
        let scores: Vec<f32> = model.pieces.iter().map(|piece| piece.score.unwrap_or_default()).collect();
        let texts = model.pieces.into_iter().map(|piece| piece.piece.unwrap_or_default()).collect();
        Ok(Self {
            pieces: Piece::list(texts, &scores, &kinds)?,
            charsmap: normalizer.precompiled_charsmap.unwrap_or_default(),
            space_prefix: normalizer.add_dummy_prefix.unwrap_or(true),
            collapse_spaces: normalizer.remove_extra_whitespaces.unwrap_or(true),
        })
    }

    /// Id of the end of text, `</s>`.
    pub(super) fn end(&self) -> Option<i64> {
        let end = |piece: &Piece| piece.kind == PieceKind::Control && piece.text == "</s>";
        self.pieces.iter().position(end).and_then(|id| i64::try_from(id).ok())
    }

    /// Makes the tokenizer.
    pub(super) fn tokenizer(self) -> Result<SentencePiece, TokenizerError> {
        let error = |reason: String| TokenizerError::SentencePiece { reason };
        let charsmap = match &*self.charsmap {
            [] => None,
            data => {
                Some(Charsmap::parse(data).ok_or_else(|| error("its map of characters is damaged".into()))?)
            }
        };
        if let Some(id) = self.pieces.iter().position(|piece| !piece.score.is_finite()) {
            return Err(error(format!("the score of piece {id} is not a number")));
        }
        let unknown = self.pieces.iter().position(|piece| piece.kind == PieceKind::Unknown);
        let unknown = unknown.ok_or_else(|| error("it has no piece for unknown characters".into()))?;
        let of_kind = |kind| self.pieces.iter().zip(0..).filter(move |(piece, _)| piece.kind == kind);
        let bytes: Vec<i64> = of_kind(PieceKind::Byte).map(|(_, id)| id).collect();
        let bytes = match &*bytes {
            [] => None,
            ids => Some(
                <[i64; 256]>::try_from(ids)
                    .map(Box::new)
                    .map_err(|_| error(format!("it has {} bytes instead of 256", ids.len())))?,
            ),
        };
        let mut symbols: Vec<String> = of_kind(PieceKind::Symbol)
            .map(|(piece, _)| piece.text.clone())
            .filter(|s| !s.is_empty())
            .collect();
        symbols.sort_by_key(|symbol| std::cmp::Reverse(symbol.len()));
        let entry = |(id, piece): (usize, Piece)| match piece.kind {
            PieceKind::Normal => (piece.text, f64::from(piece.score)),
            // A symbol always wins: the logarithms of the pieces that could replace it are negative.
            PieceKind::Symbol => (piece.text, 0.0),
            // A normalized text has no spaces, so it never contains this name.
            _ => (format!(" {id}"), 0.0),
        };
        let vocabulary = self.pieces.into_iter().enumerate().map(entry).collect();
        let model = tokenizers::models::unigram::Unigram::from(vocabulary, Some(unknown), false)
            .map_err(|e| error(e.to_string()))?;
        let (space_prefix, collapse) = (self.space_prefix, self.collapse_spaces);
        let normalizer = Normalizer { charsmap, symbols, space_prefix, collapse };
        Ok(SentencePiece { normalizer, inner: tokenizers::Tokenizer::new(model), unknown, bytes })
    }
}

/// A tokenizer that follows SentencePiece.
pub(super) struct SentencePiece {
    normalizer: Normalizer,
    pub(super) inner: tokenizers::Tokenizer,
    /// Id of unknown characters.
    unknown: usize,
    /// Ids of the 256 bytes. If present, unknown characters become bytes.
    bytes: Option<Box<[i64; 256]>>,
}

impl SentencePiece {
    pub(super) fn ids(&self, text: &str) -> tokenizers::Result<Vec<i64>> {
        let encoding = self.inner.encode(self.normalizer.normalize(text), false)?;
        let mut ids = Vec::new();
        for (id, token) in encoding.get_ids().iter().zip(encoding.get_tokens()) {
            match &self.bytes {
                Some(bytes) if *id as usize == self.unknown => {
                    ids.extend(token.bytes().map(|byte| bytes[usize::from(byte)]));
                }
                _ => ids.push(i64::from(*id)),
            }
        }
        Ok(ids)
    }
}

/// SentencePiece's normalization.
struct Normalizer {
    charsmap: Option<Charsmap>,
    /// Symbols that stay as they are, longest first.
    symbols: Vec<String>,
    space_prefix: bool,
    collapse: bool,
}

impl Normalizer {
    /// Replaces characters and turns spaces into `▁`.
    fn normalize(&self, text: &str) -> String {
        let mut out = String::new();
        let mut rest = text;
        // Spaces at the start are dropped like those that follow a space.
        let mut after_space = self.collapse;
        while let Some((length, mut new)) = self.prefix(rest) {
            rest = rest.get(length..).unwrap_or_default();
            if after_space {
                new = new.trim_start_matches(' ');
            }
            if new.is_empty() {
                continue;
            }
            if out.is_empty() && self.space_prefix {
                out.push(SPACE);
            }
            out.extend(new.chars().map(|c| if c == ' ' { SPACE } else { c }));
            after_space = self.collapse && new.ends_with(' ');
        }
        if self.collapse {
            out.truncate(out.trim_end_matches(SPACE).len());
        }
        out
    }

    /// How many bytes the next replacement takes from `text`, and the new text. `None` at the end.
    fn prefix<'a>(&'a self, text: &'a str) -> Option<(usize, &'a str)> {
        let first = text.chars().next()?.len_utf8();
        if let Some(symbol) = self.symbols.iter().find(|symbol| text.starts_with(&***symbol)) {
            return Some((symbol.len(), symbol));
        }
        let mapped = self.charsmap.as_ref().and_then(|map| map.longest(text));
        mapped.or_else(|| Some((first, text.get(..first)?)))
    }
}

/// `TrainerSpec.ModelType.UNIGRAM`.
const UNIGRAM: i32 = 1;

#[derive(Clone, PartialEq, Message)]
struct ModelProto {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<PieceProto>,
    #[prost(message, optional, tag = "2")]
    trainer: Option<TrainerProto>,
    #[prost(message, optional, tag = "3")]
    normalizer: Option<NormalizerProto>,
}

#[derive(Clone, PartialEq, Message)]
struct PieceProto {
    #[prost(string, optional, tag = "1")]
    piece: Option<String>,
    #[prost(float, optional, tag = "2")]
    score: Option<f32>,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct TrainerProto {
    #[prost(int32, optional, tag = "3")]
    model_type: Option<i32>,
    #[prost(bool, optional, tag = "24")]
    treat_whitespace_as_suffix: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
struct NormalizerProto {
    #[prost(bytes = "vec", optional, tag = "2")]
    precompiled_charsmap: Option<Vec<u8>>,
    #[prost(bool, optional, tag = "3")]
    add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4")]
    remove_extra_whitespaces: Option<bool>,
    #[prost(bool, optional, tag = "5")]
    escape_whitespaces: Option<bool>,
}
