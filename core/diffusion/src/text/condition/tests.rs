use super::{
    Condition, ConditionError, SANA_INSTRUCTION, Sd3, Sizes, chroma, flux, lower_text, pixart, plain, sana,
    sd3, sdxl, sdxl_refiner,
};
use crate::{
    prompt::Piece,
    text::{
        chunks::{Chunks, Marks, Rules, chunks},
        emphasis::Emphasis,
        encode::{EncodeError, Output, Request, States, encode_chunks, encode_sequence},
        sequence::{Length, Sequence, instructed, sequence},
        tokenizer::Tokenizer,
    },
};
use std::{collections::BTreeMap, convert::Infallible, sync::LazyLock};

/// What diffusers' pipelines compute with tiny encoders; see `tools/diffusion/text.py`.
#[derive(serde::Deserialize)]
struct Reference {
    prompt: String,
    families: BTreeMap<String, Family>,
}

#[derive(serde::Deserialize)]
struct Family {
    calls: Vec<Call>,
    hidden: Vec<f32>,
    pooled: Option<Vec<f32>>,
    mask: Option<Vec<f32>>,
    time_ids: Option<Vec<f32>>,
    negative: Option<Vec<f32>>,
    negative_pooled: Option<Vec<f32>>,
}

/// What an encoder is asked and what it answers.
#[derive(serde::Deserialize)]
struct Call {
    encoder: String,
    ids: Vec<i64>,
    mask: Option<Vec<i64>>,
    hidden: Vec<f32>,
    pooled: Vec<f32>,
}

static REFERENCE: LazyLock<Reference> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../../testdata/text/conditions.json")).unwrap());
static CLIP: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::clip().unwrap());
const T5: &[u8] = include_bytes!("../../../testdata/text/t5.model");
const GEMMA: &[u8] = include_bytes!("../../../testdata/text/gemma.json");

/// Places of T5 in the reference.
const PLACES: usize = 20;

fn pieces(prompt: &str) -> [Piece; 1] {
    [Piece::Text(prompt.into(), 1.0)]
}

fn clip(marks: Marks) -> Chunks {
    chunks(Rules::A1111, &pieces(&REFERENCE.prompt), &CLIP, marks, &[]).unwrap()
}

fn t5(prompt: &str) -> Sequence {
    let tokenizer = Tokenizer::sentence_piece(T5).unwrap();
    sequence(&pieces(prompt), &tokenizer, Length::Exactly(PLACES), 0).unwrap()
}

impl Family {
    fn of(name: &str) -> &'static Self {
        &REFERENCE.families[name]
    }

    /// Answers as the recorded encoder did, if it is asked the same.
    fn answer(&self, encoder: &str, request: &Request<'_>) -> Result<Output, Infallible> {
        let is_asked = |call: &&Call| call.encoder == encoder && call.ids.len() == request.ids.len();
        let call = self.calls.iter().find(is_asked).unwrap();
        assert_eq!((request.ids, request.batch), (&*call.ids, 1));
        assert_eq!(request.mask, call.mask.as_deref());
        Ok(Output { hidden: call.hidden.clone(), pooled: call.pooled.clone() })
    }

    fn clip(&self, encoder: &str, marks: Marks) -> States {
        encode_chunks(&clip(marks), Emphasis::None, 2, |request| {
            assert_eq!(request.layer, 2);
            self.answer(encoder, request)
        })
        .unwrap()
    }

    fn clip_l(&self) -> States {
        self.clip("clip_l", Marks::CLIP_L)
    }

    fn big_g(&self) -> States {
        self.clip("big_g", Marks::OPEN_CLIP)
    }

    fn t5(&self, sequence: &Sequence, masked: bool) -> States {
        encode_sequence(sequence, Emphasis::None, masked, |request| self.answer("t5", request)).unwrap()
    }

    fn check(&self, condition: &Condition) {
        assert_eq!(condition.hidden, self.hidden);
        assert_eq!(condition.pooled, self.pooled);
        assert_eq!(condition.time_ids, self.time_ids);
        let mask = condition.mask.as_ref().map(|mask| mask.iter().map(|bit| *bit as f32).collect::<Vec<_>>());
        assert_eq!(mask, self.mask);
        assert_eq!(condition.width() * condition.places, self.hidden.len());
    }
}

const SIZES: Sizes = Sizes { original: [1024, 768], crop: [8, 16], target: [512, 640] };
const SMALL: Sd3 = Sd3 { clip_l: 2, big_g: 3, joint: 6, without_t5: PLACES };

#[test]
fn sdxl_is_that_of_diffusers() {
    let family = Family::of("sdxl");
    let condition = sdxl(&family.clip_l(), family.big_g(), SIZES).unwrap();
    family.check(&condition);
    // A negative prompt that is not given is zero.
    let zeros = condition.zeroed();
    assert_eq!((Some(&zeros.hidden), &zeros.pooled), (family.negative.as_ref(), &family.negative_pooled));
    assert_eq!(zeros.time_ids, family.time_ids);
}

#[test]
fn the_refiner_is_that_of_diffusers() {
    let family = Family::of("sdxl_refiner");
    let [score, _] = super::AESTHETIC_SCORES;
    family.check(&sdxl_refiner(family.big_g(), SIZES, score).unwrap());
}

#[test]
fn sd3_is_that_of_diffusers() {
    let family = Family::of("sd3");
    let states = family.t5(&t5(&REFERENCE.prompt), false);
    family.check(&sd3(SMALL, Some(family.clip_l()), Some(family.big_g()), Some(states)).unwrap());
    let family = Family::of("sd3_without_t5");
    family.check(&sd3(SMALL, Some(family.clip_l()), Some(family.big_g()), None).unwrap());
}

/// A missing CLIP encoder is zeros of its size.
#[test]
fn sd3_without_clip() {
    let family = Family::of("sd3");
    let (clip_l, states) = (family.clip_l(), family.t5(&t5(&REFERENCE.prompt), false));
    let zeros = |width: usize| States { hidden: vec![0.0; 77 * width], places: 77, pooled: vec![0.0; width] };
    let expected = sd3(SMALL, Some(clip_l.clone()), Some(zeros(3)), Some(states.clone()));
    assert_eq!(sd3(SMALL, Some(clip_l), None, Some(states.clone())), expected);
    let condition = sd3(SMALL, None, None, Some(states.clone())).unwrap();
    assert_eq!(condition, sd3(SMALL, Some(zeros(2)), Some(zeros(3)), Some(states)).unwrap());
    assert_eq!((condition.places, condition.pooled), (77 + PLACES, Some(vec![0.0; 5])));
    assert_eq!(sd3(SMALL, None, None, None), Err(ConditionError::NoEncoder));
}

#[test]
fn flux_is_that_of_diffusers() {
    let family = Family::of("flux");
    let pooled = States { pooled: family.calls[0].pooled.clone(), ..States::default() };
    assert_eq!(family.calls[0].ids, clip(Marks::CLIP_L).chunks[0].ids);
    family.check(&flux(pooled, family.t5(&t5(&REFERENCE.prompt), false)).unwrap());
}

#[test]
fn chroma_is_that_of_diffusers() {
    let family = Family::of("chroma");
    let sequence = t5(&REFERENCE.prompt);
    family.check(&chroma(&sequence, family.t5(&sequence, true), 4));
}

#[test]
fn pixart_is_that_of_diffusers() {
    let family = Family::of("pixart");
    let sequence = t5(&lower_text(&REFERENCE.prompt));
    family.check(&pixart(&sequence, family.t5(&sequence, true)));
}

#[test]
fn sana_is_that_of_diffusers() {
    let family = Family::of("sana");
    let tokenizer = Tokenizer::json(GEMMA).unwrap();
    let condition = |sequence: &Sequence| {
        let states =
            encode_sequence(sequence, Emphasis::None, true, |request| family.answer("gemma", request));
        sana(sequence, states.unwrap())
    };
    let length = Length::Exactly(PLACES);
    let prompt = pieces(&lower_text(&REFERENCE.prompt));
    let with = instructed(SANA_INSTRUCTION, &prompt, &tokenizer, length, 0).unwrap();
    assert!(with.ids.len() > 200 + PLACES && with.lost == 0);
    family.check(&condition(&with));
    let without = sequence(&pieces("rain"), &tokenizer, length, 0).unwrap();
    assert_eq!(Some(condition(&without).hidden), family.negative);
    // The empty prompt keeps the instruction; a weight does not reach it.
    let count = with.instruction + 2;
    assert_eq!(with.empty().ids[..count - 1], with.ids[..count - 1]);
    let heavy = [Piece::Text("rain".into(), 1.5)];
    let heavy = instructed(SANA_INSTRUCTION, &heavy, &tokenizer, length, 0).unwrap();
    assert!(heavy.weights[..count].iter().all(|weight| *weight == 1.0) && heavy.weights[count] == 1.5);
    // Padding beyond the usual length is hidden.
    let mut padded = with.clone();
    padded.pad_to(with.ids.len() + 3);
    assert_eq!(padded.mask.iter().sum::<i64>(), with.mask.iter().sum::<i64>());
    assert_eq!(padded.ids.len(), with.ids.len() + 3);
    let long = instructed(SANA_INSTRUCTION, &pieces(&"rain ".repeat(40)), &tokenizer, length, 0).unwrap();
    assert!(long.lost > 0 && long.ids.len() == with.ids.len() && long.mask.iter().all(|bit| *bit == 1));
}

#[test]
fn states_that_do_not_fit_are_errors() {
    let states =
        |places, width| States { hidden: vec![1.0; places * width], places, pooled: vec![1.0; width] };
    let lengths = sdxl(&states(77, 2), states(154, 3), SIZES).unwrap_err();
    assert!(matches!(lengths, ConditionError::Lengths { places: 77, other: 154, .. }), "{lengths}");
    let bare = States { pooled: vec![], ..states(77, 3) };
    assert!(matches!(sdxl(&states(77, 2), bare, SIZES), Err(ConditionError::NotPooled { .. })));
    let wide = sd3(SMALL, Some(states(77, 4)), Some(states(77, 3)), None);
    assert_eq!(wide, Err(ConditionError::TooWide { found: 7, limit: 6 }));
}

/// An encoder whose states and pooled states show the ids.
fn encoder(request: &Request<'_>) -> Result<Output, Infallible> {
    let row = request.ids.len() / request.batch;
    Ok(Output {
        hidden: request.ids.iter().flat_map(|id| [*id as f32, 1.0]).collect(),
        pooled: request.ids.chunks(row).map(|ids| ids[1] as f32).collect(),
    })
}

#[test]
fn chunks_are_joined_and_the_first_is_pooled() {
    let prompt = [Piece::Text("cat".into(), 1.0), Piece::Break, Piece::Text("dog".into(), 1.0)];
    let prompt = chunks(Rules::A1111, &prompt, &CLIP, Marks::OPEN_CLIP, &[]).unwrap();
    let states = encode_chunks(&prompt, Emphasis::Original, 1, encoder).unwrap();
    assert_eq!(
        (states.places, states.width(), states.pooled),
        (154, 2, vec![prompt.chunks[0].ids[1] as f32])
    );
    let ids: Vec<f32> =
        prompt.chunks.iter().flat_map(|chunk| chunk.ids.iter().map(|id| *id as f32)).collect();
    assert_eq!(states.hidden.iter().step_by(2).copied().collect::<Vec<_>>(), ids);
    let condition = plain(States { hidden: states.hidden.clone(), places: 154, pooled: vec![] });
    assert_eq!((condition.hidden, condition.places, condition.pooled), (states.hidden, 154, None));
}

/// Every rule of emphasis reaches the states; ComfyUI's measures from the empty prompt.
#[test]
fn weights_change_states() {
    let prompt = |weight| {
        chunks(Rules::ComfyUi, &[Piece::Text("cat".into(), weight)], &CLIP, Marks::OPEN_CLIP, &[]).unwrap()
    };
    let first = |weight, emphasis| {
        let mut batch = 0;
        let states = encode_chunks(&prompt(weight), emphasis, 1, |request| {
            batch = request.batch;
            encoder(request)
        });
        (states.unwrap().hidden[2..4].to_vec(), batch)
    };
    let cat = prompt(1.0).chunks[0].ids[1] as f32;
    assert_eq!(first(2.0, Emphasis::NoNorm), (vec![2.0 * cat, 2.0], 1));
    // The empty prompt has the end of text there.
    assert_eq!(first(2.0, Emphasis::ComfyUi), (vec![2.0 * cat - 49407.0, 1.0], 2));
    assert_eq!(first(1.0, Emphasis::ComfyUi), (vec![cat, 1.0], 1));
    assert_eq!(first(2.0, Emphasis::None), (vec![cat, 1.0], 1));
    let (kept, _) = first(2.0, Emphasis::Original);
    assert!(kept[0] < 2.0 * cat && kept[0] > cat, "{kept:?}");
}

/// The mask of the empty prompt that ComfyUI's emphasis needs covers its own marks.
#[test]
fn sequences_have_weights_and_masks() {
    let tokenizer = Tokenizer::sentence_piece(T5).unwrap();
    let prompt = [Piece::Text("golden".into(), 1.0), Piece::Text("castle".into(), 0.5)];
    let prompt = sequence(&prompt, &tokenizer, Length::AtLeast(6), 0).unwrap();
    let count = prompt.mask.iter().filter(|bit| **bit == 1).count();
    assert!((3..=6).contains(&count) && prompt.ids[count - 1] == 1);
    encode_sequence(&prompt, Emphasis::ComfyUi, true, |request| {
        assert_eq!((request.batch, &request.ids[6..]), (2, &[1, 0, 0, 0, 0, 0][..]));
        assert_eq!(request.mask.unwrap()[6..], [1, 0, 0, 0, 0, 0]);
        encoder(request)
    })
    .unwrap();
}

#[test]
fn sequences_are_cut_or_not() {
    let long = "castle ".repeat(400);
    let cut = t5(&long);
    assert_eq!((cut.ids.len(), cut.ids[PLACES - 1], cut.lost), (PLACES, 1, 400 - (PLACES - 1)));
    let tokenizer = Tokenizer::sentence_piece(T5).unwrap();
    let whole = sequence(&pieces(&long), &tokenizer, Length::FLUX_COMFY, 0).unwrap();
    assert_eq!((whole.ids.len(), whole.lost), (401, 0));
    let none = sequence(&pieces("a"), &tokenizer, Length::Exactly(0), 0).unwrap();
    assert_eq!((none.ids.len(), none.lost), (0, 1));
}

#[test]
fn outputs_of_other_sizes_are_errors() {
    let prompt = clip(Marks::CLIP_L);
    for (hidden, pooled) in [(0, 0), (78, 0)] {
        let output = Output { hidden: vec![0.0; hidden], pooled: vec![0.0; pooled] };
        let result = encode_chunks(&prompt, Emphasis::None, 1, |_| Ok::<_, Infallible>(output.clone()));
        assert!(matches!(result, Err(EncodeError::Shape { .. })));
    }
    let two = chunks(Rules::A1111, &[Piece::Break, Piece::Break], &CLIP, Marks::CLIP_L, &[]).unwrap();
    let odd = Output { hidden: vec![0.0; 154], pooled: vec![0.0; 3] };
    let result = encode_chunks(&two, Emphasis::None, 1, |_| Ok::<_, Infallible>(odd.clone()));
    assert!(matches!(result, Err(EncodeError::Shape { found: 3, .. })));
}
