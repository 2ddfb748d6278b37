use sdrun_abi::WeightSource;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Part of a diffusion pipeline, as diffusers splits it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Component {
    /// The first text encoder (CLIP ViT-L; in SD 2 OpenCLIP ViT-H).
    TextEncoder,
    /// The second one (OpenCLIP ViT-bigG of SDXL and SD 3, T5 of Flux).
    TextEncoder2,
    /// The third one (T5 of SD 3).
    TextEncoder3,
    /// UNet or transformer.
    Denoiser,
    /// Encoder and decoder of the autoencoder.
    Vae,
    /// A ControlNet.
    #[serde(rename = "controlnet")]
    ControlNet,
}

impl Component {
    /// All of them.
    pub const ALL: [Component; 6] = [
        Component::TextEncoder,
        Component::TextEncoder2,
        Component::TextEncoder3,
        Component::Denoiser,
        Component::Vae,
        Component::ControlNet,
    ];

    /// The name in files and messages, as in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Component::TextEncoder => "text_encoder",
            Component::TextEncoder2 => "text_encoder_2",
            Component::TextEncoder3 => "text_encoder_3",
            Component::Denoiser => "denoiser",
            Component::Vae => "vae",
            Component::ControlNet => "controlnet",
        }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Component {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|c| c.name() == text).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|c| c.name()).collect();
            format!("unknown part of a pipeline `{text}`: use {}", names.join(", "))
        })
    }
}

/// The tensors of one component, under the names of its diffusers or transformers state dict (text encoders: the
/// names of transformers 4, with `text_model.`).
pub trait StateDict: WeightSource + Send {
    /// All names, sorted.
    fn names(&self) -> Vec<&str>;
}
