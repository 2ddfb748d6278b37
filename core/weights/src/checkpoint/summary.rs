//! A checkpoint's model and contents, as data.

use super::{
    Checkpoint, Source,
    family::{Family, family_of},
    layout::Part,
    prediction::Prediction,
    state_dict::ComponentWeights,
};
use crate::{
    Component,
    keys::{Naming, Network},
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::PathBuf};

/// Format of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// One safetensors file, or the shards of one.
    Safetensors,
    /// One GGUF file.
    Gguf,
    /// A folder of diffusers.
    Folder,
}

/// The result of [`Checkpoint::summary`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The path that was opened.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// The model of its denoiser or ControlNet, or else of its only component.
    pub family: Option<Family>,
    /// Facts about that model.
    pub facts: Facts,
    /// What its denoiser predicts, with the evidence.
    pub prediction: Prediction,
    /// Its components.
    pub components: Vec<ComponentSummary>,
    /// The file's own metadata. Names and shapes decide, not these.
    pub metadata: BTreeMap<String, String>,
    /// Recognised networks that sdrun does not read.
    pub foreign: Vec<String>,
    /// Keys known to be unused: schedules, training state, averaged copies.
    pub ignored: Vec<String>,
    /// Unknown keys.
    pub unrecognised: Vec<String>,
}

/// Facts that tell models of one family apart.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// Input channels of the denoiser (9 for inpainting UNets; for transformers before patching, so 64 for Flux).
    pub in_channels: Option<usize>,
    /// Width of the text the denoiser attends to.
    pub text_width: Option<usize>,
    /// Whether it takes a mask and a masked picture besides the latents.
    pub inpainting: bool,
    /// Whether it takes a picture of edges or depths besides the latents (Flux Canny and Depth, SD 2 depth).
    pub control: bool,
    /// Whether guidance is an input of the denoiser (Flux dev, latent consistency models).
    pub distilled_guidance: bool,
    /// Whether the weights in use are averaged ones (EMA).
    pub ema: bool,
    /// Whether there are averaged weights besides the trained ones ([`Checkpoint::with_ema`]).
    pub has_ema: bool,
}

/// One component of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ComponentSummary {
    /// Which component.
    pub component: Component,
    /// Its network.
    pub network: Network,
    /// The model it belongs to, or the shared part it is.
    pub family: Family,
    /// The naming of its keys.
    pub naming: Naming,
    /// The prefix of its keys.
    pub prefix: String,
    /// Number of tensors under diffusers' names.
    pub tensors: usize,
    /// Number of their elements.
    pub parameters: u64,
    /// Number of tensors in the file by element type.
    pub dtypes: BTreeMap<String, usize>,
    /// Keys of such a network that the file lacks.
    pub missing: Vec<String>,
    /// Keys under the component's prefix that do not belong to the network.
    pub extra: Vec<String>,
}

impl Summary {
    pub(super) fn new(checkpoint: &Checkpoint) -> Summary {
        let mut facts = Facts::default();
        let mut components: Vec<ComponentSummary> =
            checkpoint.parts().map(|(source, part)| component(source, part, &mut facts)).collect();
        components.sort_by_key(|part| part.component);
        let metadata: BTreeMap<String, String> =
            checkpoint.metadata().into_iter().map(|(key, value)| (key.into(), value.into())).collect();
        let layouts = || checkpoint.sources.iter().map(|source| &source.layout);
        let ignored: Vec<String> = layouts().flat_map(|layout| layout.ignored.iter().cloned()).collect();
        facts.has_ema = layouts().any(|layout| layout.averaged.is_some());

        let model =
            |part: &&ComponentSummary| matches!(part.component, Component::Denoiser | Component::ControlNet);
        let family = components.iter().find(model).or(match &components[..] {
            [only] => Some(only),
            _ => None,
        });
        let family = family.map(|part| part.family);
        Summary {
            path: checkpoint.path.clone(),
            format: checkpoint.format,
            family,
            prediction: Prediction::new(checkpoint, family, facts.in_channels),
            facts,
            components,
            metadata,
            foreign: layouts().flat_map(|layout| &layout.foreign).map(|title| title.to_string()).collect(),
            ignored,
            unrecognised: layouts().flat_map(|layout| layout.unrecognised.iter().cloned()).collect(),
        }
    }
}

fn component(source: &Source, part: &Part, facts: &mut Facts) -> ComponentSummary {
    let weights = ComponentWeights::new(source.container.clone(), part);
    let shapes = weights.shapes();
    let shapes: BTreeMap<&str, &[usize]> = shapes.iter().map(|(name, shape)| (*name, &shape[..])).collect();
    let (family, _) = family_of(part.network, &shapes);
    match part.component {
        Component::Denoiser => facts.of_denoiser(part, &shapes),
        Component::ControlNet => facts.text_width = facts.text_width.or(text_width(&shapes)),
        _ => {}
    }
    let (parameters, dtypes) = weights.sizes();
    let key = |name: &String| format!("{}{name}", part.prefix);
    ComponentSummary {
        component: part.component,
        network: part.network,
        family,
        naming: part.naming,
        prefix: part.prefix.to_string(),
        tensors: crate::StateDict::names(&weights).len(),
        parameters,
        dtypes,
        missing: part.table.missing.iter().map(key).collect(),
        extra: part.table.extra.iter().map(|name| part.key(name).to_string()).collect(),
    }
}

impl Facts {
    fn of_denoiser(&mut self, part: &Part, shapes: &BTreeMap<&str, &[usize]>) {
        /// Latents, mask and masked latents of an inpainting UNet, and the packed ones of Flux Fill.
        const UNET_INPAINTING: usize = 9;
        const FLUX_INPAINTING: usize = 384;
        /// Latents and a picture of depths, and the packed latents of both.
        const UNET_CONTROL: usize = 5;
        const FLUX_CONTROL: usize = 128;
        let columns = |name: &str| shapes.get(name).and_then(|shape| shape.get(1)).copied();
        self.in_channels =
            ["conv_in.weight", "x_embedder.weight", "pos_embed.proj.weight", "patch_embed.proj.weight"]
                .into_iter()
                .find_map(columns);
        self.text_width = text_width(shapes);
        (self.inpainting, self.control) = match (part.network, self.in_channels) {
            (Network::UNet, Some(channels)) => (channels == UNET_INPAINTING, channels == UNET_CONTROL),
            (Network::Flux, Some(channels)) => (channels == FLUX_INPAINTING, channels == FLUX_CONTROL),
            _ => (false, false),
        };
        self.distilled_guidance = shapes
            .keys()
            .any(|name| name.contains("guidance_embedder.") || *name == "time_embedding.cond_proj.weight");
        self.ema = part.ema;
    }
}
/// Width of the text that a denoiser or a ControlNet attends to.
fn text_width(shapes: &BTreeMap<&str, &[usize]>) -> Option<usize> {
    let columns = |name: &str| shapes.get(name).and_then(|shape| shape.get(1)).copied();
    let names = ["context_embedder.weight", "caption_projection.linear_1.weight"];
    let attention = || shapes.keys().find(|name| name.ends_with("attn2.to_k.weight"));
    names.into_iter().find_map(columns).or_else(|| columns(attention()?))
}
