use sdrun_abi::WeightSource;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A part of a diffusion pipeline, as in diffusers.
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
    /// A network that enlarges pictures.
    Upscaler,
}

impl Component {
    /// All components.
    pub const ALL: [Component; 7] = [
        Component::TextEncoder,
        Component::TextEncoder2,
        Component::TextEncoder3,
        Component::Denoiser,
        Component::Vae,
        Component::ControlNet,
        Component::Upscaler,
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
            Component::Upscaler => "upscaler",
        }
    }

    /// Folders of a diffusers pipeline and the component in each.
    pub(crate) const FOLDERS: [(&str, Component); 7] = [
        ("text_encoder", Component::TextEncoder),
        ("text_encoder_2", Component::TextEncoder2),
        ("text_encoder_3", Component::TextEncoder3),
        ("unet", Component::Denoiser),
        ("transformer", Component::Denoiser),
        ("vae", Component::Vae),
        ("controlnet", Component::ControlNet),
    ];

    /// The component in a pipeline folder of this name, by diffusers' names and those that optimum adds for ONNX.
    pub(crate) fn of_folder(name: &str) -> Option<Self> {
        let name = match name {
            "vae_encoder" | "vae_decoder" => "vae",
            "unet_controlnet" => "unet",
            name => name,
        };
        Self::FOLDERS.iter().find(|(folder, _)| *folder == name).map(|(_, component)| *component)
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Component {
    type Err = String;

    /// Reads the name, with `-` or `_`, as diffusers names the folder (`unet`, `transformer`) or as [`name`](Self::name)
    /// does.
    fn from_str(text: &str) -> Result<Self, String> {
        let plain = text.replace('-', "_");
        let named = Self::ALL.into_iter().find(|c| c.name() == plain);
        named.or_else(|| Self::of_folder(&plain)).ok_or_else(|| {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_every_usual_name() {
        for (text, component) in [
            ("text_encoder", Component::TextEncoder),
            ("text-encoder", Component::TextEncoder),
            ("text-encoder-2", Component::TextEncoder2),
            ("unet", Component::Denoiser),
            ("transformer", Component::Denoiser),
            ("denoiser", Component::Denoiser),
            ("vae_decoder", Component::Vae),
            ("vae-encoder", Component::Vae),
            ("controlnet", Component::ControlNet),
        ] {
            assert_eq!(text.parse(), Ok(component), "{text}");
        }
        assert!("text encoder".parse::<Component>().unwrap_err().contains("text_encoder_3"));
    }
}
