//! Identifies the model of a state dict.

use super::spelling;
use crate::{
    Component,
    keys::{Naming, Network, names::Names},
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt};

/// The architecture of a model, or of a part that several models share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Stable Diffusion 1.x.
    Sd1,
    /// Stable Diffusion 2.x.
    Sd2,
    /// Stable Diffusion XL and models pruned from it.
    Sdxl,
    /// The refiner of Stable Diffusion XL.
    SdxlRefiner,
    /// Stable Diffusion 3.
    Sd3,
    /// Stable Diffusion 3.5.
    Sd35,
    /// Flux.
    Flux,
    /// Chroma.
    Chroma,
    /// PixArt (alpha and Sigma).
    #[serde(rename = "pixart")]
    PixArt,
    /// Sana.
    Sana,
    /// The autoencoder of SD 1, 2 and XL: four latent channels. The three differ in values only.
    Vae4,
    /// The autoencoder of SD 3 and Flux: sixteen latent channels.
    Vae16,
    /// An autoencoder with another number of latent channels.
    Vae,
    /// The deep compression autoencoder of Sana.
    DeepVae,
    /// A tiny autoencoder.
    Taesd,
    /// CLIP ViT-L.
    ClipL,
    /// OpenCLIP ViT-H.
    ClipH,
    /// OpenCLIP ViT-bigG.
    ClipG,
    /// T5.
    T5,
    /// Gemma 2.
    Gemma2,
    /// ESRGAN and Real-ESRGAN.
    Esrgan,
}

impl Family {
    /// The name in messages.
    pub const fn title(self) -> &'static str {
        match self {
            Family::Sd1 => "SD 1.5",
            Family::Sd2 => "SD 2",
            Family::Sdxl => "SDXL",
            Family::SdxlRefiner => "SDXL refiner",
            Family::Sd3 => "SD 3",
            Family::Sd35 => "SD 3.5",
            Family::Flux => "Flux",
            Family::Chroma => "Chroma",
            Family::PixArt => "PixArt",
            Family::Sana => "Sana",
            Family::Vae4 => "VAE of 4 channels",
            Family::Vae16 => "VAE of 16 channels",
            Family::Vae => "VAE",
            Family::DeepVae => "DC-AE",
            Family::Taesd => "TAESD",
            Family::ClipL => "CLIP ViT-L",
            Family::ClipH => "OpenCLIP ViT-H",
            Family::ClipG => "OpenCLIP ViT-bigG",
            Family::T5 => "T5",
            Family::Gemma2 => "Gemma 2",
            Family::Esrgan => "ESRGAN",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.title())
    }
}

/// Identifies the model and component of a diffusers state dict: by shapes, or by structure where shapes are unusual (test
/// models). The names may be a part of a state dict, as in a graph. An empty shape means unknown.
///
/// Names of transformers 5 and a tiny autoencoder's own numbers are understood too. The component is the usual one: T5 counts
/// as the third text encoder, CLIP ViT-L and ViT-H as the first.
pub fn identify<'a>(
    tensors: impl IntoIterator<Item = (&'a str, &'a [usize])>,
) -> Option<(Family, Component)> {
    let tensors: BTreeMap<&str, &[usize]> = tensors.into_iter().collect();
    let found = spelling::recognise(&Names::from_iter(tensors.keys().copied()))?;
    // Names in the original layout do not make a state dict of diffusers.
    let known = found.naming == Naming::Diffusers || found.network == Network::TinyVae;
    known.then(|| family_of(found.network, &tensors))
}

/// As [`identify`], for a known network.
pub(super) fn family_of(network: Network, tensors: &BTreeMap<&str, &[usize]>) -> (Family, Component) {
    let dimension = |name: &str, axis: usize| tensors.get(name).and_then(|shape| shape.get(axis)).copied();
    let any = |part: &str| tensors.keys().any(|name| name.contains(part));
    match network {
        Network::UNet => (unet(tensors), Component::Denoiser),
        Network::ControlNet => (unet(tensors), Component::ControlNet),
        Network::Sd3 if any(".norm_q.") => (Family::Sd35, Component::Denoiser),
        Network::Sd3 => (Family::Sd3, Component::Denoiser),
        Network::Flux => (Family::Flux, Component::Denoiser),
        Network::Chroma => (Family::Chroma, Component::Denoiser),
        Network::PixArt => (Family::PixArt, Component::Denoiser),
        Network::Sana => (Family::Sana, Component::Denoiser),
        Network::DeepVae => (Family::DeepVae, Component::Vae),
        Network::TinyVae => (Family::Taesd, Component::Vae),
        Network::Vae => {
            let encoded = dimension("encoder.conv_out.weight", 0).map(|moments| moments / 2);
            let channels = dimension("decoder.conv_in.weight", 1).or(encoded);
            let family = match channels {
                Some(16) => Family::Vae16,
                // A graph may hold neither tensor; test models have fewer channels.
                None | Some(..=4) => Family::Vae4,
                Some(_) => Family::Vae,
            };
            (family, Component::Vae)
        }
        Network::Clip | Network::OpenClip => {
            let end =
                |end: &str| tensors.iter().find(|(name, _)| name.ends_with(end)).map(|(_, shape)| *shape);
            let width = end("embeddings.token_embedding.weight").and_then(|shape| shape.get(1));
            let width =
                width.or_else(|| end("final_layer_norm.weight").and_then(|shape| shape.first())).copied();
            match width {
                Some(1280) => (Family::ClipG, Component::TextEncoder2),
                Some(1024) => (Family::ClipH, Component::TextEncoder),
                None | Some(768) => (Family::ClipL, Component::TextEncoder),
                _ if network == Network::OpenClip => (Family::ClipG, Component::TextEncoder2),
                _ => (Family::ClipL, Component::TextEncoder),
            }
        }
        Network::T5 => (Family::T5, Component::TextEncoder3),
        Network::Gemma2 => (Family::Gemma2, Component::TextEncoder),
        Network::Esrgan => (Family::Esrgan, Component::Upscaler),
    }
}

/// The generation of a UNet or ControlNet, by the width of the text it attends to.
fn unet(tensors: &BTreeMap<&str, &[usize]>) -> Family {
    let end = |end: &str| tensors.iter().find(|(name, _)| name.ends_with(end)).map(|(_, shape)| *shape);
    match end("attn2.to_k.weight") {
        Some([_, 768]) => Family::Sd1,
        Some([_, 1024]) => Family::Sd2,
        Some([_, 2048]) => Family::Sdxl,
        Some([_, 1280]) => Family::SdxlRefiner,
        // Another width: SD XL conditions on sizes, SD 1 has convolutions around attentions.
        _ if tensors.keys().any(|name| name.starts_with("add_embedding.")) => Family::Sdxl,
        _ if matches!(end("proj_in.weight"), Some([_, _])) => Family::Sd2,
        _ => Family::Sd1,
    }
}
