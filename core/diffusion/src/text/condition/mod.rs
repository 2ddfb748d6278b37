//! Conditions: what a denoiser takes of a prompt, by family of models.
//!
//! | family | encoders and their layers | condition |
//! |---|---|---|
//! | SD 1 | CLIP-L, layer 1 or the clip skip, with final LayerNorm | [`plain`] |
//! | SD 2 | OpenCLIP-H, layer 2 with final LayerNorm | [`plain`] |
//! | SDXL | CLIP-L and bigG, layer 2 without LayerNorm, whatever the clip skip | [`sdxl`] |
//! | SDXL refiner | bigG, layer 2 without LayerNorm | [`sdxl_refiner`] |
//! | SD 3 | CLIP-L and bigG, layer 2 without LayerNorm; T5 | [`sd3`] |
//! | Flux.1 | CLIP-L for its pooled states; T5 | [`flux`] |
//! | Chroma | T5 with mask | [`chroma`] |
//! | PixArt | T5 with mask | [`pixart`] |
//! | Sana | Gemma 2 with mask, without an instruction | [`sana`] |
//!
//! Sources: diffusers' pipelines, and ComfyUI where noted.

use super::{encode::States, sequence::Sequence};

/// Inputs of a denoiser for one prompt, with a batch of 1.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Condition {
    /// Hidden states, row-major `[1, places, width]`.
    pub hidden: Vec<f32>,
    /// Places of the sequence.
    pub places: usize,
    /// Pooled states `[1, width]`, for families that use them.
    pub pooled: Option<Vec<f32>>,
    /// Attention mask `[1, places]`, for families that use one: 1 where the denoiser may look.
    pub mask: Option<Vec<i64>>,
    /// SDXL's `time_ids`, `[1, 6]`; `[1, 5]` for its refiner.
    pub time_ids: Option<Vec<f32>>,
}

/// Why states do not make a condition.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConditionError {
    /// Two encoders got prompts of different lengths.
    #[error(
        "the text encoders {first} and {second} returned {places} and {other} places, but the model takes them side by side. \
         Divide both prompts into the same number of chunks."
    )]
    Lengths {
        /// An encoder.
        first: &'static str,
        /// Another.
        second: &'static str,
        /// Places of the first.
        places: usize,
        /// Places of the second.
        other: usize,
    },
    /// An encoder's engine returned no pooled states.
    #[error(
        "the text encoder {encoder} returned no pooled states. Use an engine whose graph has that output."
    )]
    NotPooled {
        /// The encoder.
        encoder: &'static str,
    },
    /// Hidden states are wider than the model takes.
    #[error(
        "the CLIP encoders' states are {found} wide together, but the model takes {limit}. Use the model's own encoders."
    )]
    TooWide {
        /// Their width.
        found: usize,
        /// The model's width.
        limit: usize,
    },
    /// The model's text encoders are all missing.
    #[error("no text encoder was given. Give at least one of those that the model has.")]
    NoEncoder,
}

const CLIP_L: &str = "CLIP-L";
const BIG_G: &str = "OpenCLIP bigG";

impl Condition {
    /// Numbers per place.
    pub fn width(&self) -> usize {
        self.hidden.len() / self.places.max(1)
    }

    /// Cuts off the places that the mask hides, which all come last. The denoiser's result stays the same, since it looks nowhere
    /// else: attention does not depend on the number of places, and text has no positions.
    pub fn without_padding(mut self) -> Self {
        let Some(mask) = self.mask.take() else { return self };
        let width = self.width();
        self.places = mask.iter().take(self.places).filter(|bit| **bit != 0).count();
        self.hidden.truncate(self.places * width);
        self
    }

    /// Replaces hidden and pooled states by zeros. diffusers does so for an SDXL prompt that is not given, if the model's
    /// configuration has `force_zeros_for_empty_prompt`. A1111 and ComfyUI encode the empty prompt.
    pub fn zeroed(mut self) -> Self {
        self.hidden.fill(0.0);
        self.pooled.iter_mut().for_each(|pooled| pooled.fill(0.0));
        self
    }
}

/// The hidden states alone: SD 1 and SD 2.
pub fn plain(states: States) -> Condition {
    Condition { hidden: states.hidden, places: states.places, ..Condition::default() }
}

/// The sizes that SDXL takes as conditions, in pixels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// Height and width of the picture that the prompt describes.
    pub original: [u32; 2],
    /// Top and left of the part that is shown.
    pub crop: [u32; 2],
    /// Height and width of the picture to make.
    pub target: [u32; 2],
}

impl Sizes {
    /// A whole picture of this height and width.
    pub fn whole(height: u32, width: u32) -> Self {
        Self { original: [height, width], crop: [0, 0], target: [height, width] }
    }
}

/// SDXL: the states of both encoders side by side, the pooled states of bigG, and sizes.
///
/// # Errors
/// Different lengths; no pooled states.
pub fn sdxl(clip_l: &States, big_g: States, sizes: Sizes) -> Result<Condition, ConditionError> {
    let hidden = beside(clip_l, &big_g)?;
    let time_ids = [sizes.original, sizes.crop, sizes.target].concat();
    Ok(Condition {
        hidden,
        places: big_g.places,
        pooled: Some(pooled(big_g, BIG_G)?),
        time_ids: Some(time_ids.into_iter().map(|size| size as f32).collect()),
        mask: None,
    })
}

/// Aesthetic scores that diffusers and ComfyUI give SDXL's refiner: for the prompt and the negative prompt.
pub const AESTHETIC_SCORES: [f32; 2] = [6.0, 2.5];

/// SDXL's refiner: bigG alone, sizes and an aesthetic score. The target size of `sizes` is not used.
///
/// # Errors
/// No pooled states.
pub fn sdxl_refiner(big_g: States, sizes: Sizes, score: f32) -> Result<Condition, ConditionError> {
    let hidden = big_g.hidden.clone();
    let places = big_g.places;
    let mut time_ids: Vec<f32> =
        [sizes.original, sizes.crop].concat().into_iter().map(|size| size as f32).collect();
    time_ids.push(score);
    let pooled = Some(pooled(big_g, BIG_G)?);
    Ok(Condition { hidden, places, pooled, time_ids: Some(time_ids), mask: None })
}

/// Sizes of SD 3's text inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sd3 {
    /// Width of CLIP-L's states, hidden and pooled.
    pub clip_l: usize,
    /// Width of bigG's states, hidden and pooled.
    pub big_g: usize,
    /// Width of the sequence that the denoiser takes (`joint_attention_dim`), which is T5's.
    pub joint: usize,
    /// Places of zeros where T5 is missing: 256 in diffusers, 0 in ComfyUI.
    pub without_t5: usize,
}

impl Sd3 {
    /// SD 3 and 3.5, as in diffusers.
    pub const STANDARD: Self = Self { clip_l: 768, big_g: 1280, joint: 4096, without_t5: 256 };
}

/// SD 3: both CLIP encoders side by side, padded with zeros to the width of T5, followed by T5 along the sequence. Zeros stand for
/// an encoder that is missing.
///
/// # Errors
/// No encoder, different lengths, states that are too wide, no pooled states.
pub fn sd3(
    sizes: Sd3,
    clip_l: Option<States>,
    big_g: Option<States>,
    t5: Option<States>,
) -> Result<Condition, ConditionError> {
    if clip_l.is_none() && big_g.is_none() && t5.is_none() {
        return Err(ConditionError::NoEncoder);
    }
    let places = clip_l.as_ref().or(big_g.as_ref()).map_or(super::chunks::LENGTH, |states| states.places);
    let zeros = |places: usize, width: usize| States {
        hidden: vec![0.0; places * width],
        places,
        pooled: vec![0.0; width],
    };
    let clip_l = clip_l.unwrap_or_else(|| zeros(places, sizes.clip_l));
    let big_g = big_g.unwrap_or_else(|| zeros(places, sizes.big_g));
    let t5 = t5.unwrap_or_else(|| zeros(sizes.without_t5, sizes.joint));
    let clip = beside(&clip_l, &big_g)?;
    let width = clip_l.width() + big_g.width();
    if width > sizes.joint {
        return Err(ConditionError::TooWide { found: width, limit: sizes.joint });
    }
    let mut hidden = Vec::with_capacity((places + t5.places) * sizes.joint);
    for row in clip.chunks(width.max(1)) {
        hidden.extend_from_slice(row);
        hidden.resize(hidden.len() + sizes.joint - width, 0.0);
    }
    hidden.extend(t5.hidden);
    let pooled = [pooled(clip_l, CLIP_L)?, pooled(big_g, BIG_G)?].concat();
    Ok(Condition { hidden, places: places + t5.places, pooled: Some(pooled), ..Condition::default() })
}

/// Flux.1: T5's states and the pooled states of CLIP-L. For the length of T5's sequence see [`Length`](super::sequence::Length).
///
/// # Errors
/// No pooled states.
pub fn flux(clip_l: States, t5: States) -> Result<Condition, ConditionError> {
    let pooled = Some(pooled(clip_l, CLIP_L)?);
    Ok(Condition { hidden: t5.hidden, places: t5.places, pooled, ..Condition::default() })
}

/// Chroma: T5's states, encoded with the mask. The denoiser's mask covers the text, one place of padding, and the `image` tokens of
/// the picture.
pub fn chroma(sequence: &Sequence, t5: States, image: usize) -> Condition {
    let count = sequence.mask.iter().filter(|bit| **bit != 0).count();
    let text = (0..sequence.mask.len()).map(|at| i64::from(at <= count));
    let mask = text.chain(std::iter::repeat_n(1, image)).collect();
    Condition { mask: Some(mask), ..plain(t5) }
}

/// PixArt: T5's states, encoded with the mask, which the denoiser takes too. For the text see [`lower_text`].
pub fn pixart(sequence: &Sequence, t5: States) -> Condition {
    Condition { mask: Some(sequence.mask.clone()), ..plain(t5) }
}

/// Sana: the states of Gemma 2 for the text and the last token of the instruction before it, and for the mark before both. The
/// denoiser takes their mask too. For the text see [`lower_text`], and [`instructed`](super::sequence::instructed) for the instruction.
pub fn sana(sequence: &Sequence, gemma: States) -> Condition {
    let width = gemma.width();
    let shown = (0..gemma.places).filter(|at| *at == 0 || *at > sequence.instruction);
    let (mut hidden, mut mask) = (Vec::new(), Vec::new());
    for at in shown {
        hidden.extend_from_slice(&gemma.hidden[at * width..][..width]);
        mask.push(sequence.mask.get(at).copied().unwrap_or(0));
    }
    Condition { places: mask.len(), hidden, mask: Some(mask), ..Condition::default() }
}

/// What Sana's authors put before a prompt, so that the language model thinks of what a picture of it shows.
pub const SANA_INSTRUCTION: &str = "\
Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual descriptions suitable for image generation. \
Evaluate the level of detail in the user prompt:
- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, and spatial relationships to create \
vivid and concrete scenes.
- If the prompt is already detailed, refine and enhance the existing details slightly without overcomplicating.
Here are examples of how to transform or refine prompts:
- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round shape, sleeping peacefully on a warm \
sunny windowsill, surrounded by pots of blooming red flowers.
- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street lamps, a diverse \
crowd of people in colorful clothing, and a double-decker bus passing by towering glass skyscrapers.
Please generate only the enhanced description for the prompt below and avoid including any additional commentary or evaluations:
User Prompt: ";

/// The text that PixArt's T5 and Sana's Gemma take: lower case, without spaces at its ends.
pub fn lower_text(prompt: &str) -> String {
    prompt.to_lowercase().trim().into()
}

/// The pooled states of an encoder.
fn pooled(states: States, encoder: &'static str) -> Result<Vec<f32>, ConditionError> {
    if states.pooled.is_empty() { Err(ConditionError::NotPooled { encoder }) } else { Ok(states.pooled) }
}

/// Puts the states of two encoders side by side.
fn beside(clip_l: &States, big_g: &States) -> Result<Vec<f32>, ConditionError> {
    if clip_l.places != big_g.places {
        let (places, other) = (clip_l.places, big_g.places);
        return Err(ConditionError::Lengths { first: CLIP_L, second: BIG_G, places, other });
    }
    let rows = |states: &States| states.width().max(1);
    let pairs = clip_l.hidden.chunks(rows(clip_l)).zip(big_g.hidden.chunks(rows(big_g)));
    Ok(pairs.flat_map(|(left, right)| left.iter().chain(right)).copied().collect())
}

#[cfg(test)]
mod tests;
