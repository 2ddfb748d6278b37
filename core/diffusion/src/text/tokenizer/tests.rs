use super::{Piece, PieceKind, Tokenizer, TokenizerError, Unigram};
use proptest::prelude::*;
use std::sync::LazyLock;

/// What other programs compute; see `tools/diffusion/text.py`.
#[derive(serde::Deserialize)]
struct Reference {
    texts: Vec<String>,
    clip: Vec<Vec<i64>>,
    t5: Vec<Vec<i64>>,
    bytes: Vec<Vec<i64>>,
    gemma: Vec<Vec<i64>>,
}

const T5: &[u8] = include_bytes!("../../../testdata/text/t5.model");
const GEMMA: &[u8] = include_bytes!("../../../testdata/text/gemma.json");
const WITH_BYTES: &[u8] = include_bytes!("../../../testdata/text/bytes.model");

static REFERENCE: LazyLock<Reference> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../../testdata/text/tokens.json")).unwrap());
static CLIP: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::clip().unwrap());

fn check(tokenizer: &Tokenizer, expected: &[Vec<i64>]) {
    assert!(expected.len() > 200 && expected.len() == REFERENCE.texts.len());
    for (text, expected) in REFERENCE.texts.iter().zip(expected) {
        assert_eq!(&tokenizer.ids(text).unwrap(), expected, "{text:?}");
    }
}

#[test]
fn ids_of_clip_are_those_of_transformers() {
    check(&CLIP, &REFERENCE.clip);
    assert_eq!(CLIP.ids("A person riding a motorcycle").unwrap(), [320, 2533, 6765, 320, 10297]);
    assert_eq!((CLIP.before(), CLIP.after(), CLIP.len()), (&[49406][..], &[49407][..], 49408));
}

#[test]
fn ids_of_t5_are_those_of_sentencepiece() {
    let tokenizer = Tokenizer::sentence_piece(T5).unwrap();
    check(&tokenizer, &REFERENCE.t5);
    assert_eq!((tokenizer.before(), tokenizer.after()), (&[][..], &[1][..]));
}

/// A small vocabulary of the form of Gemma's.
#[test]
fn ids_of_gemma_are_those_of_transformers() {
    let tokenizer = Tokenizer::json(GEMMA).unwrap();
    check(&tokenizer, &REFERENCE.gemma);
    assert_eq!((tokenizer.before(), tokenizer.after(), tokenizer.len()), (&[2][..], &[][..], 600));
}

/// A model with pieces for bytes, which keeps spaces.
#[test]
fn bytes_and_spaces_are_those_of_sentencepiece() {
    check(&Tokenizer::sentence_piece(WITH_BYTES).unwrap(), &REFERENCE.bytes);
}

/// The same vocabulary as a `tokenizer.json`, in the form that transformers writes.
fn json(unigram: &Unigram) -> String {
    let pieces: Vec<_> = unigram.pieces.iter().map(|piece| (&piece.text, piece.score)).collect();
    serde_json::json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "decoder": null,
        "model": {"type": "Unigram", "unk_id": 2, "vocab": pieces, "byte_fallback": false},
    })
    .to_string()
}

#[test]
fn a_tokenizer_json_gives_the_same_ids() {
    let json = Tokenizer::json(json(&Unigram::parse(T5).unwrap()).as_bytes()).unwrap();
    let model = Tokenizer::sentence_piece(T5).unwrap();
    for text in ["a golden castle in the rain", "neon", "zebra crossing, two dogs", ""] {
        assert_eq!(json.ids(text).unwrap(), model.ids(text).unwrap(), "{text}");
    }
    assert_eq!((json.before(), json.after()), (&[][..], &[1][..]));
}

#[test]
fn damaged_files_are_errors() {
    for content in ["", "{}", "[1]", "nonsense"] {
        assert!(matches!(Tokenizer::json(content.as_bytes()), Err(TokenizerError::Json { .. })));
    }
    // A merge without the prefix that all tokens should have makes the tokenizers crate panic.
    let merges = r###"{"model": {"type": "BPE", "continuing_subword_prefix": "##", "vocab": {"a": 0}, "merges": [["a", "a"]]}}"###;
    assert!(matches!(Tokenizer::json(merges.as_bytes()), Err(TokenizerError::Json { .. })));
    assert!(matches!(Tokenizer::sentence_piece(b"\xff\xff"), Err(TokenizerError::SentencePiece { .. })));
    // Without pieces there is none for unknown characters.
    assert!(matches!(Tokenizer::sentence_piece(b""), Err(TokenizerError::SentencePiece { .. })));
    // `trainer_spec { model_type: BPE }`
    assert!(matches!(
        Tokenizer::sentence_piece(b"\x12\x02\x18\x02"),
        Err(TokenizerError::Unsupported { .. })
    ));
    let mut unigram = Unigram::parse(T5).unwrap();
    unigram.pieces[9].score = f32::NAN;
    assert!(matches!(Tokenizer::unigram(unigram), Err(TokenizerError::SentencePiece { .. })));
}

/// Marks are never made from text: a prompt cannot end itself.
#[test]
fn control_pieces_do_not_match_text() {
    let ids = Tokenizer::sentence_piece(T5).unwrap().ids("</s><pad>").unwrap();
    assert!(!ids.contains(&0) && !ids.contains(&1), "{ids:?}");
}

/// The lists of a GGUF file make the same vocabulary.
#[test]
fn lists_make_a_vocabulary() {
    let unigram = Unigram::parse(T5).unwrap();
    let texts: Vec<String> = unigram.pieces.iter().map(|piece| piece.text.clone()).collect();
    let scores: Vec<f32> = unigram.pieces.iter().map(|piece| piece.score).collect();
    let mut kinds: Vec<i32> = unigram.pieces.iter().map(|piece| piece.kind as i32).collect();
    assert_eq!(Piece::list(texts.clone(), &scores, &kinds).unwrap(), unigram.pieces);
    assert!(Piece::list(texts.clone(), &scores[1..], &kinds).is_err());
    kinds[5] = 7;
    let error = Piece::list(texts, &scores, &kinds).unwrap_err().to_string();
    assert!(error.contains("piece 5 has kind 7"), "{error}");
}

#[test]
fn kinds_have_the_numbers_of_sentencepiece() {
    assert_eq!(PieceKind::of(4), Some(PieceKind::Symbol));
    assert_eq!((PieceKind::of(0), PieceKind::of(7)), (None, None));
}

proptest! {
    /// Every text has ids of the vocabulary. Only CLIP's own marks give the special ones.
    #[test]
    fn any_text_has_ids(text in "\\PC{0,60}|[ -~\\s]{0,60}") {
        let ids = CLIP.ids(&text).unwrap();
        prop_assert!(ids.iter().all(|id| (0..49406).contains(id)) || text.contains("<|") || text.contains('&'));
        prop_assert_eq!(ids.is_empty(), super::clip::clean(&text).is_empty());
        let model = Tokenizer::sentence_piece(T5).unwrap();
        let size = model.len() as i64;
        prop_assert!(model.ids(&text).unwrap().iter().all(|id| (2..size).contains(id)));
    }

    /// Damaged models are errors or work; they never panic.
    #[test]
    fn damaged_models_do_not_panic(at in 0..T5.len(), byte: u8, text in "\\PC{0,20}") {
        let mut damaged = T5.to_vec();
        damaged[at] = byte;
        if let Ok(tokenizer) = Tokenizer::sentence_piece(&damaged) {
            let _ = tokenizer.ids(&text);
        }
    }

    /// A map of characters of any content neither panics nor loops.
    #[test]
    fn any_map_of_characters_is_harmless(mut map in prop::collection::vec(any::<u8>(), 0..200), text in "\\PC{0,20}") {
        if let Some(size) = map.get_mut(..4) {
            size.copy_from_slice(&[100, 0, 0, 0]);
        }
        let pieces = [("<unk>", PieceKind::Unknown), ("a", PieceKind::Normal)]
            .map(|(text, kind)| Piece { text: text.into(), score: 0.0, kind });
        let unigram = Unigram { pieces: pieces.into(), charsmap: map, space_prefix: true, collapse_spaces: true };
        if let Ok(tokenizer) = Tokenizer::unigram(unigram) {
            prop_assert!(tokenizer.ids(&text).unwrap().iter().all(|id| *id < 2));
        }
    }
}
