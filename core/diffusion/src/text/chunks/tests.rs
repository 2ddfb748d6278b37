use super::{Chunks, Embedding, LENGTH, Marks, Placed, ROOM, Rules, chunks, equalize};
use crate::{
    prompt::{Piece, weighted, weighted_comfy},
    text::{
        chunks::ChunkError,
        sequence::{Length, sequence},
        tokenizer::Tokenizer,
    },
};
use proptest::prelude::*;
use std::sync::LazyLock;

/// What Python computes from a description of the rules; see `tools/diffusion/text.py`.
#[derive(serde::Deserialize)]
struct Reference {
    embeddings: Vec<(String, usize)>,
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
    rules: String,
    prompt: Option<String>,
    /// Without text: `BREAK`.
    pieces: Vec<Option<(String, f64)>>,
    pad: i64,
    ids: Vec<Vec<i64>>,
    /// Runs of equal weights.
    weights: Vec<Vec<(f64, usize)>>,
    /// Position, embedding, vector.
    vectors: Vec<Vec<(usize, usize, usize)>>,
    #[serde(default)]
    lost: usize,
    #[serde(default)]
    missing: Vec<String>,
}

static CLIP: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::clip().unwrap());
static REFERENCE: LazyLock<Reference> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../../testdata/text/chunks.json")).unwrap());

fn embeddings() -> Vec<Embedding> {
    let embedding = |(name, vectors): &(String, usize)| Embedding { name: name.clone(), vectors: *vectors };
    REFERENCE.embeddings.iter().map(embedding).collect()
}

fn check(rules: Rules, name: &str, least: usize) {
    let cases: Vec<_> = REFERENCE.cases.iter().filter(|case| case.rules == name).collect();
    assert!(cases.len() >= least);
    for case in cases {
        let pieces: Vec<Piece> = case
            .pieces
            .iter()
            .map(|piece| piece.clone().map_or(Piece::Break, |(text, weight)| Piece::Text(text, weight)))
            .collect();
        if let Some(prompt) = &case.prompt {
            assert_eq!(weighted_comfy(prompt), pieces, "{prompt:?}");
        }
        let marks = Marks { pad: case.pad, ..Marks::CLIP_L };
        let actual = chunks(rules, &pieces, &CLIP, marks, &embeddings()).unwrap();
        assert_eq!((actual.lost, &actual.missing), (case.lost, &case.missing), "{pieces:?}");
        let ids: Vec<_> = actual.chunks.iter().map(|chunk| chunk.ids.clone()).collect();
        assert_eq!(ids, case.ids, "{pieces:?}");
        for (index, chunk) in actual.chunks.iter().enumerate() {
            let weights: Vec<f32> = case.weights[index]
                .iter()
                .flat_map(|(weight, count)| std::iter::repeat_n(*weight as f32, *count))
                .collect();
            assert_eq!(chunk.weights, weights, "{pieces:?}");
            let place = |(position, embedding, vector): &(usize, usize, usize)| Placed {
                position: *position,
                embedding: *embedding,
                vector: *vector,
            };
            let places: Vec<Placed> = case.vectors[index].iter().map(place).collect();
            assert_eq!(chunk.vectors, places, "{pieces:?}");
        }
    }
}

#[test]
fn chunks_of_a1111() {
    check(Rules::A1111, "a1111", 40);
}

#[test]
fn chunks_of_comfy() {
    check(Rules::ComfyUi, "comfy", 25);
}

#[test]
fn chunks_of_diffusers() {
    check(Rules::Diffusers, "diffusers", 7);
}

fn a1111(prompt: &str, embeddings: &[Embedding]) -> Result<Chunks, ChunkError> {
    chunks(Rules::A1111, &weighted(prompt), &CLIP, Marks::OPEN_CLIP, embeddings)
}

#[test]
fn the_shorter_prompt_gets_empty_chunks() {
    let mut prompts = ["a BREAK b BREAK c", "d"].map(|prompt| a1111(prompt, &[]).unwrap());
    equalize(&mut prompts);
    let [long, short] = prompts;
    assert_eq!((long.chunks.len(), short.chunks.len()), (3, 3));
    let mut empty = vec![0; LENGTH];
    empty[..2].copy_from_slice(&[49406, 49407]);
    assert_eq!(short.chunks[2].ids, empty);
    assert_eq!(short.chunks[1], a1111("", &[]).unwrap().chunks[0]);
}

#[test]
fn embeddings_get_the_callers_ids() {
    let mut prompt = a1111("a easynegative b", &embeddings()).unwrap();
    prompt.place(|embedding, vector| (100 * embedding + vector) as i64);
    assert_eq!(prompt.chunks[0].ids[1..9], [320, 100, 101, 102, 103, 104, 105, 321]);
}

#[test]
fn an_embedding_that_fits_no_chunk_is_an_error() {
    let huge = [Embedding { name: "huge".into(), vectors: 76 }];
    let error = a1111("a huge cat", &huge).unwrap_err();
    assert_eq!(error, ChunkError::EmbeddingTooLong { name: "huge".into(), vectors: 76 });
    // ComfyUI divides it.
    let pieces = weighted_comfy("embedding:huge");
    let divided = chunks(Rules::ComfyUi, &pieces, &CLIP, Marks::CLIP_L, &huge).unwrap();
    assert_eq!(divided.chunks.iter().map(|chunk| chunk.vectors.len()).collect::<Vec<_>>(), [75, 1]);
}

#[test]
fn names_of_files_are_embeddings_in_comfy() {
    let pieces = weighted_comfy("embedding:style.safetensors");
    let found = chunks(Rules::ComfyUi, &pieces, &CLIP, Marks::CLIP_L, &embeddings()).unwrap();
    assert_eq!((found.chunks[0].vectors.len(), found.missing), (1, vec![]));
}

/// The ids between the marks.
fn text(chunks: &Chunks) -> Vec<i64> {
    let is_vector = |chunk: &super::Chunk, at| chunk.vectors.iter().any(|placed| placed.position == at);
    let mut ids = Vec::new();
    for chunk in &chunks.chunks {
        let end = (1..LENGTH).find(|at| chunk.ids[*at] == 49407 && !is_vector(chunk, *at)).unwrap();
        ids.extend(&chunk.ids[1..end]);
    }
    ids
}

proptest! {
    /// Every chunk has 77 ids between start and end, every weight belongs to a token, and every token is in a chunk or reported.
    #[test]
    fn no_token_is_lost(
        mut words in prop::collection::vec("[a-df-z]{1,9}|,|BREAK|\\(|\\)|:1.3\\)|easynegative|style|é|embedding:style", 0..140),
        named: bool,
    ) {
        // Without the names of embeddings, which all have an "e", the ids are simply those of the text.
        words.retain(|word| named || !word.contains('e'));
        let prompt = words.join(" ");
        for rules in [Rules::A1111, Rules::ComfyUi, Rules::Diffusers] {
            let mut pieces = if rules == Rules::ComfyUi { weighted_comfy(&prompt) } else { weighted(&prompt) };
            // One weight per piece, so that weights tell pieces apart.
            for (index, piece) in pieces.iter_mut().enumerate() {
                if let Piece::Text(_, weight) = piece {
                    *weight = 2.0 + index as f64;
                }
            }
            let result = chunks(rules, &pieces, &CLIP, Marks::CLIP_L, &embeddings()).unwrap();
            for chunk in &result.chunks {
                prop_assert_eq!((chunk.ids.len(), chunk.weights.len(), chunk.ids[0]), (LENGTH, LENGTH, 49406));
                prop_assert_eq!(chunk.ids[LENGTH - 1], 49407);
                let marked = chunk.ids.iter().zip(&chunk.weights).all(|(id, weight)| (*id >= 49406) == (*weight == 1.0));
                prop_assert!(marked, "{:?}", chunk);
            }
            let kept = text(&result);
            prop_assert_eq!(kept.len(), result.tokens);
            // The same pieces without division.
            let whole = sequence(&pieces, &CLIP, Length::AtLeast(0), 0).unwrap();
            let expected = &whole.ids[1..whole.ids.len() - 1];
            if !named {
                prop_assert_eq!(&kept, &expected[..expected.len() - result.lost]);
                let weights: Vec<f32> = result
                    .chunks
                    .iter()
                    .flat_map(|chunk| chunk.weights.iter().copied().filter(|weight| *weight != 1.0))
                    .collect();
                prop_assert_eq!(&weights[..], &whole.weights[1..=weights.len()]);
            }
            if rules == Rules::Diffusers {
                prop_assert!(result.chunks.len() == 1 && (result.lost == 0 || kept.len() == ROOM));
            } else {
                prop_assert_eq!(result.lost, 0);
            }
        }
    }
}
