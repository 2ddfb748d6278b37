//! Model families: what a pipeline must know about each one besides its networks.
//!
//! A family is a record. To add one, add its record here, its graphs to the built-in models and its tensor names to
//! `sdrun-weights`.

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
    /// The usual guidance scale of models that take it as an input instead of predicting twice (Flux dev).
    pub distilled_guidance: Option<f64>,
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
    /// CLIP encoders side by side, then T5, and pooled states. Encoders may be missing.
    Sd3,
    /// T5's states and CLIP's pooled ones.
    Flux,
    /// T5's states with a mask that shows one place of padding.
    Chroma,
    /// T5's states with their mask; the text is in lower case.
    PixArt,
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

const SD_LATENT: Latent = Latent { channels: 4, factor: 8, scale: 0.18215, shift: 0.0 };
const SDXL_LATENT: Latent = Latent { scale: 0.13025, ..SD_LATENT };
const SD3_LATENT: Latent = Latent { channels: 16, factor: 8, scale: 1.5305, shift: 0.0609 };
const FLUX_LATENT: Latent = Latent { scale: 0.3611, shift: 0.1159, ..SD3_LATENT };

const UNET: Defaults = Defaults {
    steps: 25,
    scale: 7.0,
    sampler: Sampler::DpmPp2m,
    schedule: Schedule::Karras,
    time: Time::Fraction,
};
const FLOW: Defaults = Defaults {
    steps: 28,
    scale: 4.5,
    sampler: Sampler::Euler,
    schedule: Schedule::Simple,
    time: Time::Fraction,
};

const SD_UNET: Component = Component { component: "unet", model: "sd15/unet" };
const SD3_TRANSFORMER: Component = Component { component: "transformer", model: "sd3/medium" };

const SD_VAE: Autoencoder = Autoencoder { decoder: "sd15/vae-decoder", encoder: "sd15/vae-encoder" };
const SDXL_VAE: Autoencoder = Autoencoder { decoder: "sdxl/vae-decoder", encoder: "sdxl/vae-encoder" };
const SD3_VAE: Autoencoder = Autoencoder { decoder: "sd3/vae-decoder", encoder: "sd3/vae-encoder" };
const FLUX_VAE: Autoencoder = Autoencoder { decoder: "flux/vae-decoder", encoder: "flux/vae-encoder" };

const CLIP_L: Encoder = Encoder {
    component: "text_encoder",
    model: "sd15/text-encoder",
    vocabulary: Vocabulary::Clip,
    states: States::Last,
    pooled: false,
    tokens: None,
};
const SDXL_CLIP_L: Encoder = Encoder { model: "sdxl/text-encoder", states: States::Penultimate, ..CLIP_L };
const CLIP_G: Encoder = Encoder {
    component: "text_encoder_2",
    model: "sdxl/text-encoder-2",
    vocabulary: Vocabulary::OpenClip,
    states: States::Penultimate,
    pooled: true,
    tokens: None,
};
const T5: Encoder = Encoder {
    component: "text_encoder",
    model: "t5-xxl",
    vocabulary: Vocabulary::T5,
    states: States::Last,
    pooled: false,
    tokens: Some(512),
};
const FLUX_CLIP: Encoder = Encoder { states: States::None, pooled: true, ..CLIP_L };

/// All families. Settings are those of the models' authors and of diffusers' pipelines.
pub const FAMILIES: [Family; 8] = [
    Family {
        id: "sd15",
        title: "Stable Diffusion 1",
        encoders: &[CLIP_L],
        conditioning: Conditioning::Plain,
        denoiser: SD_UNET,
        controlled: Some(Controlled { network: "sd15/controlnet", denoiser: "sd15/unet-controlnet" }),
        autoencoder: SD_VAE,
        latent: SD_LATENT,
        pack: 1,
        multiple: 64,
        prediction: Prediction::Noise,
        noise: NoiseLevels::Diffusion(Betas::STABLE_DIFFUSION),
        timestep: Timestep::Steps,
        size: 512,
        defaults: UNET,
        distilled_guidance: None,
    },
    Family {
        id: "sd21",
        title: "Stable Diffusion 2",
        encoders: &[Encoder { model: "sd21/text-encoder", vocabulary: Vocabulary::OpenClip, ..CLIP_L }],
        conditioning: Conditioning::Plain,
        denoiser: Component { model: "sd21/unet", ..SD_UNET },
        controlled: None,
        autoencoder: SD_VAE,
        latent: SD_LATENT,
        pack: 1,
        multiple: 64,
        prediction: Prediction::Velocity,
        noise: NoiseLevels::Diffusion(Betas::STABLE_DIFFUSION),
        timestep: Timestep::Steps,
        size: 768,
        defaults: UNET,
        distilled_guidance: None,
    },
    Family {
        id: "sdxl",
        title: "Stable Diffusion XL",
        encoders: &[SDXL_CLIP_L, CLIP_G],
        conditioning: Conditioning::Sdxl,
        denoiser: Component { model: "sdxl/unet", ..SD_UNET },
        controlled: Some(Controlled { network: "sdxl/controlnet", denoiser: "sdxl/unet-controlnet" }),
        autoencoder: SDXL_VAE,
        latent: SDXL_LATENT,
        pack: 1,
        multiple: 32,
        prediction: Prediction::Noise,
        noise: NoiseLevels::Diffusion(Betas::STABLE_DIFFUSION),
        timestep: Timestep::Steps,
        size: 1024,
        defaults: Defaults { scale: 6.0, ..UNET },
        distilled_guidance: None,
    },
    Family {
        id: "sd3",
        title: "Stable Diffusion 3",
        encoders: &[
            Encoder { model: "sd3/text-encoder", pooled: true, ..SDXL_CLIP_L },
            CLIP_G,
            Encoder { component: "text_encoder_3", tokens: Some(256), ..T5 },
        ],
        conditioning: Conditioning::Sd3,
        denoiser: SD3_TRANSFORMER,
        controlled: None,
        autoencoder: SD3_VAE,
        latent: SD3_LATENT,
        pack: 1,
        multiple: 16,
        prediction: Prediction::Flow,
        noise: NoiseLevels::Flow { shift: 3.0 },
        timestep: Timestep::Steps,
        size: 1024,
        defaults: FLOW,
        distilled_guidance: None,
    },
    Family {
        id: "flux-dev",
        title: "FLUX.1 dev",
        encoders: &[FLUX_CLIP, Encoder { component: "text_encoder_2", ..T5 }],
        conditioning: Conditioning::Flux,
        denoiser: Component { model: "flux/dev", ..SD3_TRANSFORMER },
        controlled: None,
        autoencoder: FLUX_VAE,
        latent: FLUX_LATENT,
        pack: 2,
        multiple: 16,
        prediction: Prediction::Flow,
        noise: NoiseLevels::FlowBySize,
        timestep: Timestep::Level,
        size: 1024,
        defaults: Defaults { scale: 1.0, ..FLOW },
        distilled_guidance: Some(3.5),
    },
    Family {
        id: "flux-schnell",
        title: "FLUX.1 schnell",
        encoders: &[FLUX_CLIP, Encoder { component: "text_encoder_2", tokens: Some(256), ..T5 }],
        conditioning: Conditioning::Flux,
        denoiser: Component { model: "flux/schnell", ..SD3_TRANSFORMER },
        controlled: None,
        autoencoder: FLUX_VAE,
        latent: FLUX_LATENT,
        pack: 2,
        multiple: 16,
        prediction: Prediction::Flow,
        noise: NoiseLevels::Flow { shift: 1.0 },
        timestep: Timestep::Level,
        size: 1024,
        defaults: Defaults { steps: 4, scale: 1.0, ..FLOW },
        distilled_guidance: None,
    },
    Family {
        id: "chroma",
        title: "Chroma",
        encoders: &[Encoder { model: "t5-xxl-masked", ..T5 }],
        conditioning: Conditioning::Chroma,
        denoiser: Component { model: "chroma", ..SD3_TRANSFORMER },
        controlled: None,
        autoencoder: FLUX_VAE,
        latent: FLUX_LATENT,
        pack: 2,
        multiple: 16,
        prediction: Prediction::Flow,
        noise: NoiseLevels::Flow { shift: 1.0 },
        timestep: Timestep::Level,
        size: 1024,
        defaults: Defaults { steps: 26, scale: 4.0, schedule: Schedule::Beta, ..FLOW },
        distilled_guidance: None,
    },
    Family {
        id: "pixart-sigma",
        title: "PixArt-Σ",
        encoders: &[Encoder { model: "t5-xxl-masked", tokens: Some(300), ..T5 }],
        conditioning: Conditioning::PixArt,
        denoiser: Component { model: "pixart/sigma", ..SD3_TRANSFORMER },
        controlled: None,
        autoencoder: SDXL_VAE,
        latent: SDXL_LATENT,
        pack: 1,
        multiple: 16,
        prediction: Prediction::Noise,
        noise: NoiseLevels::Diffusion(Betas::PIXART),
        timestep: Timestep::Steps,
        size: 1024,
        defaults: Defaults { steps: 20, scale: 4.5, schedule: Schedule::Normal, ..UNET },
        distilled_guidance: None,
    },
];

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
