//! Identifies the network that names belong to.

use super::{Naming, Network, names::Names};

/// Prefixes of names that identify a network. The first row whose groups all match wins, so special cases come first. A
/// graph may hold only part of a state dict, so no row depends on a single tensor.
///
/// Sources: the original repositories and diffusers' converters named in the key tables; for PixArt and Sana diffusers'
/// `scripts/convert_pixart_sigma_to_diffusers.py` and `scripts/convert_sana_to_diffusers.py`.
const SIGNS: &[(Network, Naming, &[&[&str]])] = {
    use Naming::{Diffusers, Original};
    &[
        (Network::ControlNet, Original, &[&["input_hint_block."], &["zero_convs."], &["input_blocks."]]),
        (Network::UNet, Original, &[&["input_blocks."], &["output_blocks."]]),
        (Network::Sd3, Original, &[&["joint_blocks.0."]]),
        (Network::Chroma, Original, &[&["distilled_guidance_layer."], &["double_blocks.", "single_blocks."]]),
        (Network::Flux, Original, &[&["double_blocks.0.img_attn."]]),
        (
            Network::Sana,
            Original,
            &[&["blocks.0.mlp.inverted_conv.", "attention_y_norm."], &["blocks.0.cross_attn."]],
        ),
        (
            Network::PixArt,
            Original,
            &[
                &["blocks.0.cross_attn.kv_linear."],
                &["t_block.1.", "y_embedder.y_proj."],
                &["blocks.0.mlp.fc1."],
            ],
        ),
        (Network::OpenClip, Original, &[&["transformer.resblocks.0."]]),
        (Network::Vae, Original, &[&["encoder.mid.block_1.", "decoder.mid.block_1."]]),
        (Network::TinyVae, Original, &[&["taesd_encoder.", "taesd_decoder."]]),
        (Network::Esrgan, Original, &[&["model.1.sub.0.RDB1."]]),
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
        (
            Network::Sana,
            Diffusers,
            &[&["caption_norm.", "time_embed.", "patch_embed.proj."], &["transformer_blocks.0.ff.conv_"]],
        ),
        (
            Network::PixArt,
            Diffusers,
            &[
                &["adaln_single.", "pos_embed.proj."],
                &["caption_projection."],
                &["transformer_blocks.0.attn2."],
            ],
        ),
        (Network::Vae, Diffusers, &[&["encoder.mid_block.", "decoder.mid_block."]]),
        (
            Network::DeepVae,
            Diffusers,
            &[
                &["encoder.down_blocks.0.0.", "decoder.up_blocks.0.0."],
                &["encoder.conv_out.", "decoder.conv_in."],
            ],
        ),
        (Network::TinyVae, Diffusers, &[&["encoder.layers.0.weight", "decoder.layers.0.weight"]]),
        (Network::Clip, Diffusers, &[&["text_model.encoder.layers.0."]]),
        (Network::T5, Diffusers, &[&["encoder.block.0.layer.0."]]),
        (Network::Gemma2, Diffusers, &[&["layers.0.pre_feedforward_layernorm."], &["embed_tokens."]]),
        (Network::Esrgan, Diffusers, &[&["body.0.rdb1."]]),
    ]
};

/// A network that sdrun does not read, and the prefixes that identify it.
struct Foreign {
    title: &'static str,
    /// At least one prefix of each group must match.
    signs: &'static [&'static [&'static str]],
}

const fn foreign(title: &'static str, signs: &'static [&'static [&'static str]]) -> Foreign {
    Foreign { title, signs }
}

/// Networks that resemble supported ones, or that users try. They are checked before [`SIGNS`], special cases first.
///
/// Sources: ComfyUI's `comfy/model_detection.py` (`detect_unet_config`) and `comfy/controlnet.py`
/// (`load_controlnet_state_dict`) for the original names; the model classes and `loaders/single_file_utils.py` of
/// diffusers for its names; city96's ComfyUI-GGUF (`tools/convert.py`) for a second key of AuraFlow, HiDream and Wan.
const FOREIGN: &[Foreign] = &[
    // ControlNets of transformers keep the names of the model they control, so they come first.
    foreign(
        "a ControlNet of Qwen-Image",
        &[&["controlnet_blocks."], &["transformer_blocks.0.img_mod.", "txt_norm."]],
    ),
    foreign("a ControlNet of SD 3", &[&["controlnet_blocks."], &["pos_embed_input."]]),
    foreign(
        "a ControlNet of Flux",
        &[
            &["controlnet_blocks.", "controlnet_single_blocks."],
            &["controlnet_x_embedder.", "single_transformer_blocks.", "double_blocks.0."],
        ],
    ),
    foreign("a ControlNet of a transformer", &[&["controlnet_blocks.", "controlnet_x_embedder."]]),
    // Video models and later relatives of Flux. HunyuanVideo has Flux's block names in ComfyUI's files.
    foreign("HunyuanVideo", &[&["txt_in.individual_token_refiner.", "context_embedder.token_refiner."]]),
    foreign("FLUX.2", &[&["double_stream_modulation_img."]]),
    foreign("Chroma Radiance", &[&["nerf_blocks.", "nerf_image_embedder."]]),
    foreign("Qwen-Image", &[&["txt_norm."], &["transformer_blocks.0.img_mod."]]),
    foreign(
        "Wan",
        &[
            &["head.modulation", "condition_embedder.time_embedder."],
            &["blocks.0.self_attn.", "blocks.0.attn1."],
        ],
    ),
    foreign("LTX-Video", &[&["patchify_proj."], &["transformer_blocks.0."]]),
    foreign("LTX-Video", &[&["time_embed.emb."], &["proj_in."], &["transformer_blocks.0.attn1.norm_q."]]),
    foreign("Z-Image", &[&["cap_pad_token", "all_x_embedder."], &["noise_refiner.0."]]),
    foreign("Lumina 2", &[&["cap_embedder.", "time_caption_embed."], &["noise_refiner.0."]]),
    foreign("AuraFlow", &[&["double_layers.0.", "joint_transformer_blocks.0."]]),
    foreign("HiDream", &[&["caption_projection.0.linear."], &["double_stream_blocks.0."]]),
    foreign("Hunyuan-DiT", &[&["mlp_t5.0.", "time_extra_emb."], &["blocks.0."]]),
    foreign("Mochi", &[&["t5_yproj."]]),
    foreign(
        "Cosmos",
        &[&[
            "blocks.block0.",
            "blocks.0.adaln_modulation_self_attn.",
            "blocks.0.adaln_modulation_cross_attn.",
        ]],
    ),
    foreign("CogVideoX", &[&["patch_embed.text_proj."], &["transformer_blocks.0."]]),
    foreign("Stable Cascade", &[&["clf.1."], &["down_blocks.0."]]),
    foreign(
        "Stable Video Diffusion",
        &[&["input_blocks.1.0.time_stack.", "down_blocks.0.resnets.0.spatial_res_block."]],
    ),
    // Gemma 2 with norms of queries and keys.
    foreign("Gemma 3", &[&["layers.0.pre_feedforward_layernorm."], &["layers.0.self_attn.q_norm."]]),
    foreign("a language model as text encoder", LANGUAGE_MODEL),
];

const LANGUAGE_MODEL: &[&[&str]] = &[
    &["model.layers.0.self_attn.q_proj.", "layers.0.self_attn.q_proj."],
    &["model.embed_tokens.", "embed_tokens."],
];

/// The network and naming of these names. Names come without the prefix of their component.
/// CLIP and T5 have one naming, that of transformers.
pub fn identify_network<'a>(names: impl IntoIterator<Item = &'a str>) -> Option<(Network, Naming)> {
    network_of(&Names::from_iter(names))
}

/// The name of a recognised network that sdrun does not read.
pub(crate) fn foreign_network(names: &Names) -> Option<&'static str> {
    let found = FOREIGN.iter().find(|foreign| all_begin(names, foreign.signs))?;
    // The one language model that sdrun reads.
    let is_read = found.signs == LANGUAGE_MODEL && names.any("layers.0.pre_feedforward_layernorm.");
    (!is_read).then_some(found.title)
}

pub(crate) fn network_of(names: &Names) -> Option<(Network, Naming)> {
    if foreign_network(names).is_some() {
        return None;
    }
    SIGNS.iter().find(|(_, _, signs)| all_begin(names, signs)).map(|(network, naming, _)| (*network, *naming))
}

/// Whether at least one prefix of each group matches.
fn all_begin(names: &Names, groups: &[&[&str]]) -> bool {
    groups.iter().all(|group| group.iter().any(|prefix| names.any(prefix)))
}
