//! Names of state dicts.

use super::BoundTensor;
use crate::{
    Component,
    keys::{T5_TOKENS, modern_vae_attention},
};

/// Names that export scripts give the module they wrap; all names of the state dict then begin with one of these.
const WRAPPERS: [&str; 8] =
    ["unet.", "transformer.", "vae.", "controlnet.", "text_encoder.", "text_encoder_2.", "model.", "module."];

/// Whether this may be a name in a state dict: identifiers joined by dots. Names that exporters make up are not:
/// `onnx::MatMul_5647`, `/to_q/Transpose_output_0`, `val_28`, `5647`, `weight.13`, `_tensor_constant0`.
pub(super) fn is_state_dict_name(name: &str) -> bool {
    let identifier =
        |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
    let number = |part: &str| part.chars().all(|c| c.is_ascii_digit());
    match name.rsplit_once('.') {
        Some((path, last)) => path.split('.').all(identifier) && identifier(last) && !number(last),
        None => {
            let numbered = name.rsplit_once('_').is_some_and(|(_, end)| number(end));
            identifier(name) && !numbered && !number(name) && !name.contains("tensor_constant")
        }
    }
}

/// Whether this is the output of a `Constant` node of the TorchScript exporter, which keeps the tensors of a state
/// dict as initializers and writes the numbers of the program as such nodes.
pub(super) fn is_program_constant(name: &str) -> bool {
    name.rsplit_once('/').is_some_and(|(_, last)| last.starts_with("Constant") && last.ends_with("_output_0"))
}

/// Renames sources to the names of a [`StateDict`](crate::StateDict), and returns their component:
///
/// * the name of a wrapper in front of all of them is removed;
/// * CLIP's names of transformers 5 get the `text_model.` of transformers 4;
/// * T5's embedding is `shared.weight`, whichever of its two names the exporter chose;
/// * attention in VAEs of older diffusers (`query`, `key`, `value`, `proj_attn`) gets its present names.
pub(super) fn canonicalise(tensors: &mut [BoundTensor]) -> Option<Component> {
    let sources = |tensors: &mut [BoundTensor], change: &dyn Fn(&str) -> Option<String>| {
        for source in tensors.iter_mut().flat_map(|tensor| &mut tensor.sources) {
            if let Some(name) = change(source) {
                *source = name;
            }
        }
    };
    let all_begin = |tensors: &[BoundTensor], prefix: &str| {
        !tensors.is_empty()
            && tensors.iter().flat_map(|tensor| &tensor.sources).all(|name| name.starts_with(prefix))
    };
    while let Some(prefix) = WRAPPERS.iter().find(|prefix| all_begin(tensors, prefix)) {
        sources(tensors, &|name| name.strip_prefix(prefix).map(str::to_owned));
    }
    let has = |tensors: &[BoundTensor], part: &str| {
        tensors.iter().flat_map(|tensor| &tensor.sources).any(|name| name.starts_with(part))
    };
    if has(tensors, "embeddings.token_embedding.") {
        sources(tensors, &|name| {
            let inside =
                ["embeddings.", "encoder.", "final_layer_norm."].iter().any(|part| name.starts_with(part));
            inside.then(|| format!("text_model.{name}"))
        });
    }
    if has(tensors, "encoder.block.0.") {
        sources(tensors, &|name| (name == T5_TOKENS[1]).then(|| T5_TOKENS[0].to_owned()));
    }
    let component = component(tensors);
    if component == Some(Component::Vae) {
        sources(tensors, &modern_vae_attention);
    }
    component
}

fn component(tensors: &[BoundTensor]) -> Option<Component> {
    let find = |part: &str| tensors.iter().find(|t| t.sources.iter().any(|name| name.starts_with(part)));
    let any = |parts: &[&str]| parts.iter().any(|part| find(part).is_some());
    if any(&["controlnet_cond_embedding.", "controlnet_down_blocks.", "controlnet_blocks."]) {
        return Some(Component::ControlNet);
    }
    if let Some(embedding) = find("text_model.embeddings.token_embedding.") {
        // All CLIPs share their names. By width, ViT-L and ViT-H are the first encoder of every pipeline, ViT-bigG the second.
        return match embedding.source_shape.last() {
            Some(768 | 1024) => Some(Component::TextEncoder),
            Some(1280) => Some(Component::TextEncoder2),
            _ => None,
        };
    }
    if any(&["body.0.rdb1."]) {
        return Some(Component::Upscaler);
    }
    let unet = any(&["down_blocks."]) && any(&["time_embedding."]);
    let transformer = any(&["transformer_blocks."])
        && any(&["x_embedder.", "pos_embed.", "patch_embed.", "proj_out.", "proj_in."]);
    if unet || transformer {
        return Some(Component::Denoiser);
    }
    let vae = any(&["encoder.conv_in.", "decoder.conv_in.", "quant_conv.", "post_quant_conv."])
        || any(&["encoder.layers.0.weight", "decoder.layers.0.weight", "decoder.layers.2.conv."]);
    vae.then_some(Component::Vae)
}
