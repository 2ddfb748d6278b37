//! Rows of a text encoder's token table that textual inversions replace.

use crate::{
    BoundTensor, Component, Transform, convert::convert_into, embedding::Embedding, keys::T5_TOKENS, unique,
};
use sdrun_abi::{DType, Error, Result};
use serde::Serialize;
use std::sync::Arc;

/// Where an embedding is in the token table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EmbeddingReport {
    /// The word.
    pub name: String,
    /// The token of its first vector; the others follow.
    pub token: usize,
    /// How many vectors it has.
    pub vectors: usize,
}

/// Replaced rows of a token table.
#[derive(Clone, Debug)]
pub(crate) struct TokenRows {
    pub(crate) id: u64,
    /// Name of the table in the state dict.
    pub(crate) table: String,
    pub(crate) report: EmbeddingReport,
    /// `[vectors, width]`, f32.
    values: Arc<[u8]>,
}

impl TokenRows {
    /// The vectors of `embedding` for the text encoder `component`, at row `token` of the token table among its `tensors`.
    ///
    /// Errors as [`WeightStack::with_embedding`](crate::WeightStack::with_embedding).
    pub(crate) fn new(
        embedding: &Embedding,
        component: Option<Component>,
        tensors: &[BoundTensor],
        token: usize,
    ) -> Result<Self> {
        let table = tensors.iter().find_map(|bound| match (&*bound.sources, &*bound.source_shape) {
            ([name], [rows, width]) if is_table(name) && bound.transform == Transform::Identity => {
                Some((name, *rows, *width))
            }
            _ => None,
        });
        let (Some(component), Some((table, rows, width))) = (component, table) else {
            return Err(Error::precondition(format!(
                "embedding {:?} belongs to a text encoder, and this model has no table of tokens",
                embedding.name
            )));
        };
        let vectors = embedding.for_encoder(component, width)?.ok_or_else(|| {
            let message = format!("embedding {:?} has no vectors for {component}", embedding.name);
            Error::invalid(message).with_hint("it was made for another encoder or another model")
        })?;
        let count = vectors.len();
        if token.checked_add(count).is_none_or(|end| end > rows) {
            return Err(Error::invalid(format!(
                "embedding {:?} has {count} vectors and needs tokens {token} to {}; the encoder has {rows} tokens",
                embedding.name,
                token.saturating_add(count - 1)
            ))
            .with_hint("choose tokens that no prompt contains otherwise"));
        }
        Ok(TokenRows {
            id: unique::id(),
            table: table.clone(),
            report: EmbeddingReport { name: embedding.name.clone(), token, vectors: count },
            values: vectors.values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        })
    }

    /// Overwrites the rows in the table `out` of type `dtype`.
    pub(crate) fn write(&self, dtype: DType, out: &mut [u8]) -> Result<()> {
        let EmbeddingReport { name, token, vectors } = &self.report;
        let row = self.values.len() / vectors / DType::F32.size() * dtype.size();
        let rows = out
            .get_mut(token * row..(token + vectors) * row)
            .ok_or_else(|| Error::internal("a token table shorter than its shape"))?;
        if dtype == DType::F32 {
            rows.copy_from_slice(&self.values);
            return Ok(());
        }
        convert_into(&self.values, DType::F32, dtype, rows)
            .map_err(|error| Error { message: format!("embedding {name:?}: {}", error.message), ..error })
    }
}

/// CLIP's table, and T5's by its own name in the state dict.
fn is_table(name: &str) -> bool {
    name == T5_TOKENS[0] || name.ends_with("embeddings.token_embedding.weight")
}
