//! The records of all families. Settings are those of the models' authors and of diffusers' pipelines.

use super::{
    Autoencoder, Beside, Component, Conditioning, Controlled, Defaults, Encoder, Family, NoiseLevels, States,
    Timestep, Vocabulary,
};
use crate::{
    latent::Latent,
    prediction::{Prediction, Time},
    sampler::Sampler,
    schedule::{Betas, Schedule},
};

pub(crate) const SD_LATENT: Latent =
    Latent { channels: 4, factor: 8, scale: 0.18215, shift: 0.0, statistics: &[] };
pub(crate) const SDXL_LATENT: Latent = Latent { scale: 0.13025, ..SD_LATENT };
const PLAYGROUND_LATENT: Latent = Latent {
    scale: 0.5,
    statistics: &[(-1.6574, 8.4927), (1.886, 5.9022), (-1.383, 6.5498), (2.5155, 5.2299)],
    ..SD_LATENT
};
pub(crate) const SD3_LATENT: Latent = Latent { channels: 16, scale: 1.5305, shift: 0.0609, ..SD_LATENT };
const SANA_LATENT: Latent = Latent { channels: 32, factor: 32, scale: 0.41407, ..SD_LATENT };
pub(crate) const FLUX_LATENT: Latent = Latent { scale: 0.3611, shift: 0.1159, ..SD3_LATENT };

const UNET: Defaults = Defaults {
    steps: 25,
    scale: 7.0,
    sampler: Sampler::DpmPp2m,
    schedule: Schedule::Karras,
    time: Time::Fraction,
};
const LCM: Defaults =
    Defaults { steps: 4, scale: 1.0, sampler: Sampler::Lcm, schedule: Schedule::Lcm, ..UNET };
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
const SANA_VAE: Autoencoder = Autoencoder { decoder: "sana/vae-decoder", encoder: "sana/vae-encoder" };
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

/// All families.
pub const FAMILIES: [Family; 22] = [
    SD15,
    Family {
        id: "sd15-inpainting",
        title: "Stable Diffusion 1 for inpainting",
        denoiser: Component { model: "sd15/unet-inpainting", ..SD_UNET },
        beside: Beside::MaskAndPicture,
        controlled: None,
        ..SD15
    },
    Family {
        id: "sd15-lcm",
        title: "Stable Diffusion 1 as a latent consistency model",
        denoiser: Component { model: "sd15/unet-lcm", ..SD_UNET },
        controlled: None,
        defaults: LCM,
        distilled_guidance: Some(8.5),
        ..SD15
    },
    SD21,
    Family {
        id: "sd21-inpainting",
        title: "Stable Diffusion 2 for inpainting",
        denoiser: Component { model: "sd21/unet-inpainting", ..SD_UNET },
        beside: Beside::MaskAndPicture,
        prediction: Prediction::Noise,
        size: 512,
        ..SD21
    },
    Family {
        id: "sd21-depth",
        title: "Stable Diffusion 2 with depths",
        denoiser: Component { model: "sd21/unet-depth", ..SD_UNET },
        beside: Beside::Depth,
        prediction: Prediction::Noise,
        size: 512,
        ..SD21
    },
    SDXL,
    Family {
        id: "sdxl-inpainting",
        title: "Stable Diffusion XL for inpainting",
        denoiser: Component { model: "sdxl/unet-inpainting", ..SD_UNET },
        beside: Beside::MaskAndPicture,
        controlled: None,
        ..SDXL
    },
    Family {
        id: "sdxl-lcm",
        title: "Stable Diffusion XL as a latent consistency model",
        denoiser: Component { model: "sdxl/unet-lcm", ..SD_UNET },
        controlled: None,
        defaults: LCM,
        distilled_guidance: Some(8.5),
        ..SDXL
    },
    Family {
        id: "playground",
        title: "Playground 2.5",
        controlled: None,
        latent: PLAYGROUND_LATENT,
        prediction: Prediction::Edm { data: 0.5 },
        noise: NoiseLevels::Edm { min: 0.002, max: 80.0 },
        defaults: Defaults { steps: 50, scale: 3.0, ..UNET },
        ..SDXL
    },
    Family {
        id: "sdxl-refiner",
        title: "the refiner of Stable Diffusion XL",
        encoders: &[CLIP_G],
        conditioning: Conditioning::SdxlRefiner,
        denoiser: Component { model: "sdxl/refiner", ..SD_UNET },
        controlled: None,
        multiple: 64,
        ..SDXL
    },
    SD3,
    Family {
        id: "sd35-medium",
        title: "Stable Diffusion 3.5 medium",
        denoiser: Component { model: "sd35/medium", ..SD3_TRANSFORMER },
        ..SD3
    },
    Family {
        id: "sd35-large",
        title: "Stable Diffusion 3.5 large",
        denoiser: Component { model: "sd35/large", ..SD3_TRANSFORMER },
        ..SD3
    },
    FLUX_DEV,
    Family {
        id: "flux-fill",
        title: "FLUX.1 Fill",
        denoiser: Component { model: "flux/fill", ..SD3_TRANSFORMER },
        edits: false,
        beside: Beside::PictureAndMask,
        distilled_guidance: Some(30.0),
        ..FLUX_DEV
    },
    Family {
        id: "flux-canny-depth",
        title: "FLUX.1 Canny or Depth",
        denoiser: Component { model: "flux/canny-depth", ..SD3_TRANSFORMER },
        edits: false,
        beside: Beside::Picture,
        distilled_guidance: Some(30.0),
        ..FLUX_DEV
    },
    Family {
        id: "flux-schnell",
        title: "FLUX.1 schnell",
        encoders: &[FLUX_CLIP, Encoder { component: "text_encoder_2", tokens: Some(256), ..T5 }],
        denoiser: Component { model: "flux/schnell", ..SD3_TRANSFORMER },
        edits: false,
        noise: NoiseLevels::Flow { shift: 1.0 },
        defaults: Defaults { steps: 4, scale: 1.0, ..FLOW },
        distilled_guidance: None,
        ..FLUX_DEV
    },
    Family {
        id: "chroma",
        title: "Chroma",
        encoders: &[Encoder { model: "t5-xxl-masked", ..T5 }],
        conditioning: Conditioning::Chroma,
        denoiser: Component { model: "chroma", ..SD3_TRANSFORMER },
        edits: false,
        noise: NoiseLevels::Flow { shift: 1.0 },
        defaults: Defaults { steps: 26, scale: 4.0, schedule: Schedule::Beta, ..FLOW },
        distilled_guidance: None,
        ..FLUX_DEV
    },
    Family {
        id: "pixart-sigma",
        title: "PixArt-Σ",
        encoders: &[Encoder { model: "t5-xxl-masked", tokens: Some(300), ..T5 }],
        conditioning: Conditioning::PixArt,
        denoiser: Component { model: "pixart/sigma", ..SD3_TRANSFORMER },
        noise: NoiseLevels::Diffusion(Betas::PIXART),
        multiple: 16,
        defaults: Defaults { steps: 20, scale: 4.5, schedule: Schedule::Normal, ..UNET },
        controlled: None,
        ..SDXL
    },
    Family {
        id: "sana",
        title: "Sana",
        encoders: &[Encoder { model: "gemma2-2b", vocabulary: Vocabulary::Gemma, tokens: Some(300), ..T5 }],
        conditioning: Conditioning::Sana,
        denoiser: Component { model: "sana/1600m", ..SD3_TRANSFORMER },
        autoencoder: SANA_VAE,
        latent: SANA_LATENT,
        multiple: 32,
        defaults: Defaults {
            steps: 20,
            scale: 4.5,
            sampler: Sampler::DpmPp2m,
            schedule: Schedule::Sana,
            time: Time::Whole,
        },
        ..SD3
    },
    DEMO,
];

const SD15: Family = Family {
    id: "sd15",
    title: "Stable Diffusion 1",
    encoders: &[CLIP_L],
    conditioning: Conditioning::Plain,
    denoiser: SD_UNET,
    beside: Beside::Nothing,
    edits: false,
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
};

/// The model that comes with sdrun.
const DEMO: Family = Family {
    id: "demo",
    title: "the demo model",
    encoders: &[Encoder { model: "demo/text-encoder", ..CLIP_L }],
    denoiser: Component { model: "demo/unet", ..SD_UNET },
    controlled: Some(Controlled { network: "demo/controlnet", denoiser: "demo/unet-controlnet" }),
    autoencoder: Autoencoder { decoder: "demo/vae-decoder", encoder: "demo/vae-encoder" },
    multiple: 16,
    prediction: Prediction::Velocity,
    size: 64,
    defaults: Defaults { steps: 20, scale: 2.0, ..UNET },
    ..SD15
};

const SD21: Family = Family {
    id: "sd21",
    title: "Stable Diffusion 2",
    encoders: &[Encoder { model: "sd21/text-encoder", vocabulary: Vocabulary::OpenClip, ..CLIP_L }],
    denoiser: Component { model: "sd21/unet", ..SD_UNET },
    controlled: None,
    prediction: Prediction::Velocity,
    size: 768,
    ..SD15
};

const SDXL: Family = Family {
    id: "sdxl",
    title: "Stable Diffusion XL",
    encoders: &[SDXL_CLIP_L, CLIP_G],
    conditioning: Conditioning::Sdxl,
    denoiser: Component { model: "sdxl/unet", ..SD_UNET },
    controlled: Some(Controlled { network: "sdxl/controlnet", denoiser: "sdxl/unet-controlnet" }),
    autoencoder: SDXL_VAE,
    latent: SDXL_LATENT,
    multiple: 32,
    size: 1024,
    defaults: Defaults { scale: 6.0, ..UNET },
    ..SD15
};

const SD3: Family = Family {
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
    multiple: 16,
    prediction: Prediction::Flow,
    noise: NoiseLevels::Flow { shift: 3.0 },
    size: 1024,
    defaults: FLOW,
    ..SD15
};

const FLUX_DEV: Family = Family {
    id: "flux-dev",
    title: "FLUX.1 dev",
    encoders: &[FLUX_CLIP, Encoder { component: "text_encoder_2", ..T5 }],
    conditioning: Conditioning::Flux,
    denoiser: Component { model: "flux/dev", ..SD3_TRANSFORMER },
    edits: true,
    autoencoder: FLUX_VAE,
    latent: FLUX_LATENT,
    pack: 2,
    noise: NoiseLevels::FlowBySize,
    timestep: Timestep::Level,
    defaults: Defaults { scale: 1.0, ..FLOW },
    distilled_guidance: Some(3.5),
    ..SD3
};
