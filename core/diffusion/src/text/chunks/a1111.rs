//! A1111's chunks (`tokenize_line` in `modules/sd_hijack_clip.py`).

use super::{Builder, ChunkError, Embedding, ROOM, Token, vectors};
use crate::{prompt::Piece, text::tokenizer::Tokenizer};

/// How far back a comma may be where a full chunk ends; A1111's default.
const BACKTRACK: usize = 20;

/// A part of a prompt.
pub(super) enum Item {
    Token(Token),
    /// The vectors of an embedding, which stay in one chunk.
    Embedding(Vec<Token>),
    Break,
}

impl Item {
    /// The tokens of the item.
    pub(super) fn tokens(self) -> Vec<Token> {
        match self {
            Self::Token(token) => vec![token],
            Self::Embedding(tokens) => tokens,
            Self::Break => Vec::new(),
        }
    }
}

/// Tokenizes pieces and finds embeddings. As in A1111, a name is found by its tokens, and within one piece.
pub(super) fn items(
    pieces: &[Piece],
    tokenizer: &Tokenizer,
    embeddings: &[Embedding],
) -> Result<Vec<Item>, ChunkError> {
    let mut names = Vec::new();
    for (index, embedding) in embeddings.iter().enumerate() {
        names.push((tokenizer.ids(&embedding.name)?, index, embedding));
    }
    names.retain(|(ids, ..)| !ids.is_empty());
    names.sort_by_key(|(ids, ..)| std::cmp::Reverse(ids.len()));
    let mut items = Vec::new();
    for piece in pieces {
        let Piece::Text(text, weight) = piece else {
            items.push(Item::Break);
            continue;
        };
        let (ids, weight) = (tokenizer.ids(text)?, *weight as f32);
        let mut rest = &*ids;
        while let Some((first, others)) = rest.split_first() {
            let found = names.iter().find_map(|(name, index, embedding)| {
                Some((rest.strip_prefix(&**name)?, vectors(*index, embedding, weight)))
            });
            let (item, after) = match found {
                Some((after, tokens)) => (Item::Embedding(tokens), after),
                None => (Item::Token(Token { id: *first, weight, vector: None }), others),
            };
            items.push(item);
            rest = after;
        }
    }
    Ok(items)
}

/// Fills chunks.
pub(super) fn fill(
    builder: &mut Builder,
    pieces: &[Piece],
    tokenizer: &Tokenizer,
    embeddings: &[Embedding],
) -> Result<(), ChunkError> {
    let comma = tokenizer.ids(",")?;
    let is_comma = |token: &Token| token.vector.is_none() && comma == [token.id];
    for item in items(pieces, tokenizer, embeddings)? {
        let starts_with_comma = matches!(&item, Item::Token(token) if is_comma(token));
        let tokens = match item {
            Item::Break => {
                builder.next();
                continue;
            }
            item => item.tokens(),
        };
        if let (true, Some(Token { vector: Some((index, _)), .. })) = (tokens.len() > ROOM, tokens.first()) {
            let name = embeddings.get(*index).map(|embedding| embedding.name.clone()).unwrap_or_default();
            return Err(ChunkError::EmbeddingTooLong { name, vectors: tokens.len() });
        }
        if builder.current.len() == ROOM {
            let after_comma = builder.current.iter().rposition(is_comma).map(|at| at + 1);
            let near = after_comma.filter(|at| ROOM + 1 - at <= BACKTRACK && !starts_with_comma);
            let moved = near.map(|at| builder.current.split_off(at)).unwrap_or_default();
            builder.next();
            builder.current = moved;
        }
        if builder.current.len() + tokens.len() > ROOM {
            builder.next();
        }
        builder.current.extend(tokens);
    }
    Ok(())
}
