//! Model families: what a pipeline must know about each one besides its networks.
//!
//! A family is a record. To add one, add its record to `table.rs`, its graphs to the built-in models and its tensor names to
//! `sdrun-weights`.

mod table;

pub use table::FAMILIES;
pub(crate) use table::{FLUX_LATENT, SD_LATENT, SD3_LATENT, SDXL_LATENT};

use crate::{
    latent::Latent,
    prediction::{Prediction, Time},
    program::Program,
    sampler::Sampler,
    schedule::{Betas, Levels, Schedule, flow},
};

/// A family of models that share networks and rules.
#[derive(Clone, Debug, PartialEq)]
pub struct Family {
    /// Short name, as in the names of built-in models.
    pub id: &'static str,
    /// Name for people.
    pub title: &'static str,
    /// Its text encoders, in the order in which the denoiser takes their states.
    pub encoders: &'static [Encoder],
    /// How their states become the denoiser's inputs.
    pub conditioning: Conditioning,
    /// Its denoiser.
    pub denoiser: Component,
    /// What the denoiser takes beside the noisy latents.
    pub beside: Beside,
    /// Whether models of this family edit pictures that they get as further tokens (FLUX.1 Kontext, which has the network of FLUX.1
    /// dev).
    pub edits: bool,
    /// What ControlNets need, if there are graphs for them.
    pub controlled: Option<Controlled>,
    /// Its autoencoder.
    pub autoencoder: Autoencoder,
    /// Its latents.
    pub latent: Latent,
    /// How many latents in each direction the host packs into one token. 1 if the denoiser takes latents as they are.
    pub pack: usize,
    /// Width and height must be multiples of this many pixels.
    pub multiple: usize,
    /// What the denoiser predicts, unless the checkpoint says otherwise.
    pub prediction: Prediction,
    /// Its noise levels.
    pub noise: NoiseLevels,
    /// What its denoiser's `timestep` counts.
    pub timestep: Timestep,
    /// Width and height it was trained for.
    pub size: usize,
    /// Its usual settings.
    pub defaults: Defaults,
    /// The usual guidance scale of models that take it as an input instead of predicting twice (Flux dev, latent consistency
    /// models).
    pub distilled_guidance: Option<f64>,
}

/// What a denoiser takes beside the noisy latents, as further channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// Nothing.
    Nothing,
    /// The mask at the size of the latents, then the latents of the picture without what is under it.
    MaskAndPicture,
    /// The latents of the picture without what is under the mask, then the mask at the size of the picture: a channel for each
    /// pixel that a latent covers (FLUX.1 Fill).
    PictureAndMask,
    /// The latents of a picture of edges or depths (FLUX.1 Canny and Depth).
    Picture,
    /// Depths at the size of the latents, from -1 for the farthest to 1 (SD 2 depth).
    Depth,
}

/// A network of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Component {
    /// Its name in a diffusers folder.
    pub component: &'static str,
    /// The built-in model.
    pub model: &'static str,
}

/// The built-in models that ControlNets need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Controlled {
    /// The ControlNet.
    pub network: &'static str,
    /// The denoiser with inputs for what it returns.
    pub denoiser: &'static str,
}

/// The built-in models of an autoencoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Autoencoder {
    /// From latents to pictures.
    pub decoder: &'static str,
    /// From pictures to latents.
    pub encoder: &'static str,
}

/// How the states of text encoders become a denoiser's inputs. [`condition`](crate::text::condition) has the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conditioning {
    /// The states of the only encoder.
    Plain,
    /// Both encoders side by side, pooled states and sizes.
    Sdxl,
    /// The states and pooled states of the only encoder, original size and an aesthetic score.
    SdxlRefiner,
    /// CLIP encoders side by side, then T5, and pooled states. Encoders may be missing.
    Sd3,
    /// T5's states and CLIP's pooled ones.
    Flux,
    /// T5's states with a mask that shows one place of padding.
    Chroma,
    /// T5's states with their mask; the text is in lower case.
    PixArt,
    /// The states of a language model with their mask, without those of the instruction before the prompt; the text is in lower case.
    Sana,
}

/// What a denoiser's `timestep` counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timestep {
    /// Training steps, up to 1000.
    Steps,
    /// The noise level of a flow model, up to 1 (Flux, Chroma).
    Level,
}

/// A text encoder of a family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Encoder {
    /// The component's name, as in a diffusers folder.
    pub component: &'static str,
    /// The built-in model.
    pub model: &'static str,
    /// Its vocabulary.
    pub vocabulary: Vocabulary,
    /// The output the denoiser attends to.
    pub states: States,
    /// Whether its pooled output is used.
    pub pooled: bool,
    /// The tokens that the model was trained with. Shorter prompts are padded to as many. `None` if prompts are split into chunks of
    /// 75 tokens.
    pub tokens: Option<usize>,
}

/// Words that a text encoder knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vocabulary {
    /// CLIP's, padded with the end token (OpenAI's models).
    Clip,
    /// CLIP's, padded with 0 (OpenCLIP's models).
    OpenClip,
    /// T5's.
    T5,
    /// Gemma's.
    Gemma,
}

/// Which states of a text encoder the denoiser attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum States {
    /// None: only the pooled output is used.
    None,
    /// The last ones, after the final normalization. Clip skip selects earlier ones, which are normalized too.
    Last,
    /// Those before the last layer, without the final normalization.
    Penultimate,
}

/// The noise levels of a family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NoiseLevels {
    /// Levels of a diffusion with these betas in 1000 steps.
    Diffusion(Betas),
    /// The same, rescaled so that the highest is almost only noise.
    ZeroTerminalSnr(Betas),
    /// Levels of Karras et al. (2022): Playground 2.5.
    Edm {
        /// The lowest.
        min: f64,
        /// The highest.
        max: f64,
    },
    /// Levels from 0 to 1 with a constant shift.
    Flow {
        /// The shift.
        shift: f64,
    },
    /// Levels from 0 to 1 with a shift that grows with the picture (Flux dev).
    FlowBySize,
}

impl NoiseLevels {
    /// The table of levels for a picture with this many tokens. ComfyUI gives Flux dev pictures of every size the shift of
    /// 1024 x 1024.
    pub fn levels(self, tokens: usize, like: Option<Program>) -> Levels {
        match self {
            Self::Diffusion(betas) => Levels::diffusion(betas),
            Self::ZeroTerminalSnr(betas) => Levels::zero_terminal_snr(betas),
            Self::Edm { min, max } => Levels::edm(min, max),
            Self::Flow { shift } => Levels::flow(shift, 1000),
            Self::FlowBySize if like == Some(Program::ComfyUi) => {
                Levels::flow(flow::flux_shift(4096), 10_000)
            }
            Self::FlowBySize => Levels::flow(flow::flux_shift(tokens), 1000),
        }
    }
}

/// Usual settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Defaults {
    /// Steps.
    pub steps: usize,
    /// Guidance scale; 1 for models that take no negative prompt.
    pub scale: f64,
    /// Sampler.
    pub sampler: Sampler,
    /// Schedule.
    pub schedule: Schedule,
    /// How a level becomes a timestep.
    pub time: Time,
}

impl Beside {
    /// How many channels it has beside those of `latent`.
    pub fn channels(self, latent: &Latent) -> usize {
        match self {
            Self::Nothing => 0,
            Self::MaskAndPicture => 1 + latent.channels,
            Self::PictureAndMask => latent.channels + latent.factor * latent.factor,
            Self::Picture => latent.channels,
            Self::Depth => 1,
        }
    }

    /// Whether it is a picture that the user draws after: edges, depths.
    pub fn is_hint(self) -> bool {
        matches!(self, Self::Picture | Self::Depth)
    }

    /// Whether it has latents of a picture.
    pub fn has_picture(self) -> bool {
        matches!(self, Self::Picture) || self.has_mask()
    }

    /// Whether it has a mask.
    pub fn has_mask(self) -> bool {
        matches!(self, Self::MaskAndPicture | Self::PictureAndMask)
    }
}

impl Family {
    /// Whether it works without this text encoder.
    pub fn may_lack(&self, encoder: &Encoder) -> bool {
        self.conditioning == Conditioning::Sd3 && self.encoders.contains(encoder)
    }

    /// The family with this id.
    pub fn find(id: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|family| family.id == id)
    }
}
