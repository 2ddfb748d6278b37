//! Runs a text encoder over chunks or a sequence.

use super::{
    chunks::{Chunk, Chunks},
    emphasis::{Emphasis, multiply, multiply_keeping_mean, scale_from_empty},
    sequence::Sequence,
};

/// What an encoder has to compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request<'a> {
    /// Token ids, row-major `[batch, ids.len() / batch]`.
    pub ids: &'a [i64],
    /// Number of rows. An engine with a smaller batch may run them one after the other.
    pub batch: usize,
    /// The attention mask, in the shape of `ids`. CLIP has none.
    pub mask: Option<&'a [i64]>,
    /// Which hidden states to return, counted from the last layer, which is 1.
    pub layer: usize,
}

/// What an encoder returns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    /// Hidden states, row-major `[batch, ids per row, width]`, as the engine gives them.
    pub hidden: Vec<f32>,
    /// Pooled states, row-major `[batch, width]`, or empty.
    pub pooled: Vec<f32>,
}

/// The states of one prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct States {
    /// Hidden states, row-major `[places, width]`.
    pub hidden: Vec<f32>,
    /// Number of places.
    pub places: usize,
    /// Pooled states of the first chunk, or empty.
    pub pooled: Vec<f32>,
}

impl States {
    /// Numbers per place.
    pub fn width(&self) -> usize {
        self.hidden.len() / self.places.max(1)
    }
}

/// Why encoding failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EncodeError<E: std::error::Error> {
    /// The engine's error.
    #[error(transparent)]
    Engine(E),
    /// The engine returned tensors of other sizes.
    #[error(
        "the text encoder returned {found} numbers for {rows} rows of {places} tokens, which do not divide evenly. Build its \
         engine again from a text encoder's graph."
    )]
    Shape {
        /// Size of the tensor.
        found: usize,
        /// Rows of the request.
        rows: usize,
        /// Ids per row.
        places: usize,
    },
}

/// Encodes chunks as one batch, applies weights, and joins the chunks' hidden states. `layer` is that of [`Request`].
///
/// # Errors
/// The engine's, and tensors whose sizes do not fit the request.
pub fn encode_chunks<E: std::error::Error>(
    prompt: &Chunks,
    emphasis: Emphasis,
    layer: usize,
    encoder: impl FnMut(&Request<'_>) -> Result<Output, E>,
) -> Result<States, EncodeError<E>> {
    let row = |chunk: &Chunk| Row { ids: chunk.ids.clone(), weights: chunk.weights.clone(), mask: None };
    let rows = prompt.chunks.iter().map(row).collect();
    encode(rows, row(&prompt.empty()), emphasis, layer, encoder)
}

/// Encodes a sequence. `masked` says whether the encoder takes the attention mask.
///
/// ComfyUI applies its emphasis to T5 too; diffusers applies none. The other rules treat the sequence as one chunk.
///
/// # Errors
/// The engine's, and tensors whose sizes do not fit the request.
pub fn encode_sequence<E: std::error::Error>(
    prompt: &Sequence,
    emphasis: Emphasis,
    masked: bool,
    encoder: impl FnMut(&Request<'_>) -> Result<Output, E>,
) -> Result<States, EncodeError<E>> {
    let row = |sequence: &Sequence| Row {
        ids: sequence.ids.clone(),
        weights: sequence.weights.clone(),
        mask: masked.then(|| sequence.mask.clone()),
    };
    encode(vec![row(prompt)], row(&prompt.empty()), emphasis, 1, encoder)
}

/// A row of a batch.
struct Row {
    ids: Vec<i64>,
    weights: Vec<f32>,
    mask: Option<Vec<i64>>,
}

/// Encodes rows of the same length. `empty` is the row of an empty prompt.
fn encode<E: std::error::Error>(
    mut rows: Vec<Row>,
    empty: Row,
    emphasis: Emphasis,
    layer: usize,
    mut encoder: impl FnMut(&Request<'_>) -> Result<Output, E>,
) -> Result<States, EncodeError<E>> {
    let (count, places) = (rows.len(), empty.ids.len());
    let has_weights = rows.iter().flat_map(|row| &row.weights).any(|weight| *weight != 1.0);
    let emphasis = if has_weights { emphasis } else { Emphasis::None };
    if emphasis == Emphasis::ComfyUi {
        rows.push(empty);
    }
    let ids: Vec<i64> = rows.iter().flat_map(|row| row.ids.iter().copied()).collect();
    let mask: Option<Vec<i64>> =
        rows.iter().map(|row| row.mask.as_deref()).collect::<Option<Vec<_>>>().map(|m| m.concat());
    let request = Request { ids: &ids, batch: rows.len(), mask: mask.as_deref(), layer };
    let Output { mut hidden, mut pooled } = encoder(&request).map_err(EncodeError::Engine)?;
    let shape = |found| EncodeError::Shape { found, rows: rows.len(), places };
    if hidden.is_empty() || !hidden.len().is_multiple_of(ids.len().max(1)) {
        return Err(shape(hidden.len()));
    }
    if !pooled.len().is_multiple_of(rows.len()) {
        return Err(shape(pooled.len()));
    }
    pooled.truncate(pooled.len() / rows.len());
    let size = hidden.len() / rows.len();
    let without_text = hidden.split_off(count * size);
    for (states, Row { weights, .. }) in hidden.chunks_mut(size).zip(&rows) {
        match emphasis {
            Emphasis::Original => multiply_keeping_mean(states, weights),
            Emphasis::NoNorm => multiply(states, weights),
            Emphasis::ComfyUi => scale_from_empty(states, weights, &without_text),
            Emphasis::None => {}
        }
    }
    Ok(States { hidden, places: count * places, pooled })
}
