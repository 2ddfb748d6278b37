//! Which network names belong to.

use super::{Naming, Network, names::Names};

/// Beginnings of names that tell a network: the first row that has all it asks for wins, so rows stand before those
/// they are a special case of. A graph may hold part of a state dict only, so no row asks for a single tensor.
const SIGNS: &[(Network, Naming, &[&[&str]])] = {
    use Naming::{Diffusers, Original};
    &[
        (Network::ControlNet, Original, &[&["input_hint_block."], &["zero_convs."], &["input_blocks."]]),
        (Network::UNet, Original, &[&["input_blocks."], &["output_blocks."]]),
        (Network::Sd3, Original, &[&["joint_blocks.0."]]),
        (Network::Chroma, Original, &[&["distilled_guidance_layer."], &["double_blocks.", "single_blocks."]]),
        (Network::Flux, Original, &[&["double_blocks.0.img_attn."]]),
        (Network::OpenClip, Original, &[&["transformer.resblocks.0."]]),
        (Network::Vae, Original, &[&["encoder.mid.block_1.", "decoder.mid.block_1."]]),
        (Network::TinyVae, Original, &[&["taesd_encoder.", "taesd_decoder."]]),
        (Network::ControlNet, Diffusers, &[&["controlnet_cond_embedding."], &["down_blocks."]]),
        (Network::UNet, Diffusers, &[&["down_blocks.0."], &["up_blocks.0."]]),
        (
            Network::Chroma,
            Diffusers,
            &[&["distilled_guidance_layer."], &["transformer_blocks.", "single_transformer_blocks."]],
        ),
        (
            Network::Flux,
            Diffusers,
            &[&["single_transformer_blocks.0.", "x_embedder."], &["transformer_blocks.0."]],
        ),
        (
            Network::Sd3,
            Diffusers,
            &[&["transformer_blocks.0.attn.add_"], &["transformer_blocks.0.norm1_context."]],
        ),
        (Network::Vae, Diffusers, &[&["encoder.mid_block.", "decoder.mid_block."]]),
        (Network::TinyVae, Diffusers, &[&["encoder.layers.0.weight", "decoder.layers.0.weight"]]),
        (Network::Clip, Diffusers, &[&["text_model.encoder.layers.0."]]),
        (Network::T5, Diffusers, &[&["encoder.block.0.layer.0."]]),
    ]
};

/// Beginnings of names of networks that resemble ours and are others: FLUX.2 (in either naming), ControlNets of
/// transformers, Chroma Radiance.
const FOREIGN: [&str; 5] = [
    "double_stream_modulation_img.",
    "controlnet_blocks.",
    "controlnet_x_embedder.",
    "nerf_blocks.",
    "nerf_image_embedder.",
];

/// The network these names belong to, and whose names they are. Names come without the prefix of their component.
/// CLIP and T5 have one naming, that of transformers.
pub fn identify_network<'a>(names: impl IntoIterator<Item = &'a str>) -> Option<(Network, Naming)> {
    network_of(&Names::from_iter(names))
}

pub(crate) fn network_of(names: &Names) -> Option<(Network, Naming)> {
    if FOREIGN.iter().any(|prefix| names.any(prefix)) {
        return None;
    }
    SIGNS
        .iter()
        .find(|(_, _, all)| all.iter().all(|any| any.iter().any(|prefix| names.any(prefix))))
        .map(|(network, naming, _)| (*network, *naming))
}
