//! What the inputs of a denoiser hold, by their names in diffusers' models and Optimum's exports.

use super::{Error, Result, network::InputShapes, parts::Part, reference::Grid};
use crate::{latent, text::condition::Condition};
use sdrun::{Shapes, abi, graph::Dim};

/// What an input holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Noisy latents, and what an inpainting model takes beside them.
    Latents,
    /// The timestep.
    Time,
    /// Hidden states of the prompt.
    Text,
    /// Pooled states of the prompt.
    Pooled,
    /// SDXL's sizes.
    Sizes,
    /// Where the denoiser may look in the prompt: everywhere, as padding is cut off.
    Mask,
    /// The guidance scale of a distilled model.
    Guidance,
    /// The same as sines and cosines (latent consistency models).
    GuidanceEmbedding,
    /// Places of tokens: 0, row, column for the new picture; 1, row, column for pictures that the model edits.
    ImageIds,
    /// Places of the prompt's tokens, all 0.
    TextIds,
    /// What a ControlNet adds.
    Residual,
    /// The picture that a ControlNet follows.
    Hint,
    /// How strongly a ControlNet acts.
    Strength,
}

/// The role of the input `name`; `None` if sdrun does not know it.
pub(super) fn role(name: &str) -> Option<Role> {
    Some(match name {
        "sample" | "hidden_states" => Role::Latents,
        "timestep" => Role::Time,
        "encoder_hidden_states" => Role::Text,
        "text_embeds" | "pooled_projections" => Role::Pooled,
        "time_ids" => Role::Sizes,
        "encoder_attention_mask" => Role::Mask,
        "guidance" => Role::Guidance,
        "timestep_cond" => Role::GuidanceEmbedding,
        "img_ids" => Role::ImageIds,
        "txt_ids" => Role::TextIds,
        "controlnet_cond" => Role::Hint,
        "conditioning_scale" => Role::Strength,
        _ if name.ends_with("_res") => Role::Residual,
        _ => return None,
    })
}

/// Sizes of a denoiser's inputs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Predictions in one run.
    pub(super) batch: usize,
    /// Latents `[channels, height, width]`, with the channels that an inpainting model takes beside them.
    pub(super) latents: [usize; 3],
    /// How many latents in each direction form a token; 1 if the denoiser takes latents as they are.
    pub(super) pack: usize,
    /// Pixels that one latent covers in each direction.
    pub(super) factor: usize,
    /// Tokens of the pictures that the model edits.
    pub(super) references: usize,
}

impl Layout {
    /// Inputs of `part` with their roles, and shapes that serve all conditions. `residuals` has the shapes of a ControlNet's outputs
    /// by the names of inputs.
    pub(super) fn inputs(
        &self,
        part: &Part,
        all: &[Condition],
        residuals: &Shapes,
    ) -> Result<(Vec<(String, Role)>, InputShapes)> {
        let mut lengths: Vec<&Condition> = all.iter().collect();
        lengths.sort_by_key(|condition| condition.places);
        lengths.dedup_by_key(|condition| condition.places);
        let inputs = part.model.inputs();
        let batch_name = inputs.iter().find_map(|(spec, dims)| match dims.first() {
            Some(Dim::Symbol(symbol)) if role(&spec.name) == Some(Role::Latents) => Some(symbol.clone()),
            _ => None,
        });
        let (mut roles, mut shapes) = (Vec::new(), InputShapes::default());
        for (spec, dims) in &inputs {
            let unknown = || {
                let message = format!("its graph has an input `{}`, which sdrun does not know", spec.name);
                Error::of(&part.name)(abi::Error::unsupported(message).into())
            };
            let role = role(&spec.name).ok_or_else(unknown)?;
            // One timestep serves the whole batch, unless the graph ties the two together.
            let times = match dims.first() {
                Some(Dim::Symbol(symbol)) if Some(symbol) == batch_name.as_ref() => self.batch,
                _ => 1,
            };
            let fixed = match role {
                Role::Time | Role::Guidance | Role::Strength if dims.is_empty() => Vec::new(),
                Role::Time | Role::Guidance | Role::Strength => vec![times],
                Role::GuidanceEmbedding => {
                    vec![self.batch, spec.shape.last().copied().flatten().ok_or_else(unknown)?]
                }
                Role::Residual => residuals.get(&spec.name).cloned().ok_or_else(unknown)?,
                role => {
                    let several: Vec<_> =
                        lengths.iter().map(|condition| self.shape(role, condition)).collect();
                    match several.first() {
                        Some(first) if several.iter().all(|shape| shape == first) => first.clone(),
                        _ => {
                            shapes.open.insert(spec.name.clone(), several);
                            roles.push((spec.name.clone(), role));
                            continue;
                        }
                    }
                }
            };
            roles.push((spec.name.clone(), role));
            shapes.fixed.insert(spec.name.clone(), fixed);
        }
        Ok((roles, shapes))
    }

    /// The shape of an input for a condition.
    pub(super) fn shape(&self, role: Role, condition: &Condition) -> Vec<usize> {
        let [channels, height, width] = self.latents;
        let tokens = height * width / (self.pack * self.pack) + self.references;
        match role {
            Role::Latents if self.pack == 1 => vec![self.batch, channels, height, width],
            Role::Latents => vec![self.batch, tokens, channels * self.pack * self.pack],
            Role::Text => vec![self.batch, condition.places, condition.width()],
            Role::Pooled => vec![self.batch, condition.pooled.as_ref().map_or(0, Vec::len)],
            Role::Sizes => vec![self.batch, condition.time_ids.as_ref().map_or(0, Vec::len)],
            Role::Mask => vec![self.batch, condition.places],
            Role::ImageIds => vec![tokens, 3],
            Role::TextIds => vec![condition.places, 3],
            Role::Hint => vec![self.batch, 3, height * self.factor, width * self.factor],
            Role::Time | Role::Guidance | Role::GuidanceEmbedding | Role::Strength | Role::Residual => {
                Vec::new()
            }
        }
    }

    /// Latents as the denoiser takes them.
    pub(super) fn packed(&self, latents: &[f32]) -> Vec<f32> {
        if self.pack == 1 { latents.to_vec() } else { latent::packed(latents, self.latents) }
    }

    /// A prediction as latents. Some networks return the variance after it, which is left out.
    pub(super) fn unpacked(&self, output: &[f32]) -> Vec<f32> {
        let len: usize = self.latents.iter().product();
        let output = &output[..len.min(output.len())];
        if self.pack == 1 { output.to_vec() } else { latent::unpacked(output, self.latents) }
    }

    /// Places of the picture's tokens, then those of the pictures that the model edits.
    pub(super) fn image_ids(&self, references: &[Grid]) -> Vec<f32> {
        let [_, height, width] = self.latents;
        let own = Grid { rows: height / self.pack, columns: width / self.pack, at: [0, 0] };
        own.ids(0.0).chain(references.iter().flat_map(|grid| grid.ids(1.0))).collect()
    }
}
