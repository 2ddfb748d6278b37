//! ComfyUI's chunks (`SDTokenizer.tokenize_with_weights` in `comfy/sd1_clip.py`).

use super::{Builder, ChunkError, Embedding, ROOM, Token, vectors};
use crate::{prompt::Piece, text::tokenizer::Tokenizer};

/// A group with fewer tokens is never divided.
const LARGE: usize = 8;

/// What stands before the name of an embedding.
const IDENTIFIER: &str = "embedding:";

/// Extensions that may follow the name of an embedding.
const EXTENSIONS: [&str; 3] = [".safetensors", ".pt", ".bin"];

/// Fills chunks.
pub(super) fn fill(
    builder: &mut Builder,
    pieces: &[Piece],
    tokenizer: &Tokenizer,
    embeddings: &[Embedding],
) -> Result<(), ChunkError> {
    for piece in pieces {
        let Piece::Text(text, weight) = piece else {
            builder.next();
            continue;
        };
        let weight = *weight as f32;
        for part in parts(text) {
            let mut text = part;
            let rest;
            if let Some(after) = part.strip_prefix(IDENTIFIER) {
                let found = named(after, embeddings);
                match found.index.and_then(|index| Some((index, embeddings.get(index)?))) {
                    Some((index, embedding)) => add(builder, vectors(index, embedding, weight)),
                    None => builder.missing.push(found.name),
                }
                rest = found.rest;
                text = &rest;
            }
            let ids = tokenizer.ids(text)?;
            add(builder, ids.into_iter().map(|id| Token { id, weight, vector: None }).collect());
        }
    }
    Ok(())
}

/// Splits a text before each `embedding:` that follows a space or a new line.
fn parts(text: &str) -> Vec<&str> {
    let (mut parts, mut start) = (Vec::new(), 0);
    for (at, _) in text.match_indices(IDENTIFIER) {
        let Some(before) = text.get(start..at).and_then(|part| part.strip_suffix([' ', '\n'])) else {
            continue;
        };
        parts.push(before);
        start = at;
    }
    parts.extend(text.get(start..));
    parts.retain(|part| !part.is_empty());
    parts
}

/// What follows `embedding:`.
struct Named {
    name: String,
    /// The embedding, if there is one of this name.
    index: Option<usize>,
    /// Text after the name.
    rest: String,
}

/// Finds an embedding by the first word of a text. Commas around the name do not belong to it, unless a name has them.
fn named(text: &str, embeddings: &[Embedding]) -> Named {
    let mut words = text.split_whitespace();
    let word = words.next().unwrap_or_default();
    let rest = words.collect::<Vec<_>>().join(" ");
    let find = |name: &str| {
        let stem = EXTENSIONS.iter().find_map(|extension| name.strip_suffix(extension));
        embeddings.iter().position(|embedding| embedding.name == name || Some(&*embedding.name) == stem)
    };
    let bare = word.trim_matches(',');
    match find(word) {
        None if bare.len() < word.len() => {
            let after = word.len() - word.trim_end_matches(',').len();
            let rest = format!("{} {rest}", ",".repeat(after));
            Named { name: bare.into(), index: find(bare), rest }
        }
        index => Named { name: word.into(), index, rest },
    }
}

/// Adds a group of tokens. A small group that does not fit starts a new chunk; a large one is divided.
fn add(builder: &mut Builder, mut group: Vec<Token>) {
    let is_large = group.len() >= LARGE;
    while !group.is_empty() {
        let free = ROOM.saturating_sub(builder.current.len());
        if group.len() <= free {
            builder.current.append(&mut group);
        } else {
            if is_large {
                builder.current.extend(group.drain(..free));
            }
            builder.next();
        }
    }
}
