//! Averaged (EMA) weights of a training run. LDM's `LitEma` names them after the UNet's tensors with all dots removed, since
//! names of PyTorch buffers may not contain dots. Other tools put a prefix before the usual names.

use super::layout::{Part, Shapes};
use crate::{
    Component,
    keys::{Table, identify_network},
};
use std::collections::HashMap;

/// Prefixes of averaged weights, special cases first: LDM and SGM (`model_ema`), diffusers' training scripts, whose
/// folder is `unet_ema`, and trainers that save an `ema` module.
const PREFIXES: [&str; 6] = [
    "model_ema.",
    "unet_ema.",
    "transformer_ema.",
    "ema.model.diffusion_model.",
    "ema.diffusion_model.",
    "ema.",
];
/// Prefix of LDM's averaged weights.
const LDM: &str = "model_ema.";
/// The UNet's name in the averaged module.
const NETWORK: &str = "diffusion_model";

/// Above the number of layers of any such UNet.
const MAX_BLOCKS: usize = 20;
/// Above the number of transformer blocks of any of their attentions.
const MAX_DEPTH: usize = 12;

/// Whether a key belongs to averaged weights.
pub(super) fn is_averaged(key: &str) -> bool {
    PREFIXES.iter().any(|prefix| key.starts_with(prefix))
}

/// The averaged denoiser among these keys, and the keys that are not part of it.
pub(super) fn denoiser<'a>(keys: &[&'a str], shapes: Shapes) -> (Option<Part>, Vec<&'a str>) {
    for prefix in PREFIXES {
        let (own, others): (Vec<&str>, Vec<&str>) = keys.iter().partition(|key| key.starts_with(prefix));
        if let Some(mut part) = Part::new(prefix, &own, shapes, Some(Component::Denoiser))
            && part.component == Component::Denoiser
        {
            part.ema = true;
            return (Some(part), others);
        }
    }
    let (restored, others) = restore(keys);
    let names = || restored.keys().map(String::as_str);
    let Some((network, naming)) = identify_network(names()) else { return (None, keys.to_vec()) };
    let table = Table::new(network, naming, names());
    let component = Component::Denoiser;
    let part = Part { component, network, naming, prefix: LDM, table, keys: restored, ema: true };
    (Some(part), others)
}

/// Maps dotted names to keys, and returns the keys that do not belong to the UNet. All names that a UNet can have are looked
/// up without their dots; no two of them collide.
fn restore<'a>(keys: &[&'a str]) -> (HashMap<String, String>, Vec<&'a str>) {
    if keys.is_empty() {
        return Default::default();
    }
    let known: HashMap<String, String> =
        possible_names().into_iter().map(|name| (name.replace('.', ""), name)).collect();
    let (mut found, mut rest) = (HashMap::new(), Vec::new());
    for key in keys {
        let name = key.strip_prefix(LDM).and_then(|key| key.strip_prefix(NETWORK));
        match name.and_then(|name| known.get(name)) {
            Some(name) => {
                found.insert(name.clone(), (*key).to_string());
            }
            None => rest.push(*key),
        }
    }
    (found, rest)
}

/// Every name of a UNet in the original layout, up to these numbers of layers and blocks.
fn possible_names() -> Vec<String> {
    let mut modules: Vec<String> =
        ["time_embed.0", "time_embed.2", "time_embed.cond_proj", "label_emb.0.0", "label_emb.0.2"]
            .into_iter()
            .chain(["input_blocks.0.0", "out.0", "out.2"])
            .map(str::to_string)
            .collect();
    for place in 0..3 {
        residual(&mut modules, &format!("middle_block.{place}"));
        attention(&mut modules, &format!("middle_block.{place}"));
    }
    for block in 0..MAX_BLOCKS {
        for way in ["input_blocks", "output_blocks"] {
            residual(&mut modules, &format!("{way}.{block}.0"));
            attention(&mut modules, &format!("{way}.{block}.1"));
        }
        modules.push(format!("input_blocks.{block}.0.op"));
        modules.extend([1, 2].map(|place| format!("output_blocks.{block}.{place}.conv")));
    }
    modules.iter().flat_map(|module| ["weight", "bias"].map(|part| format!("{module}.{part}"))).collect()
}

fn residual(modules: &mut Vec<String>, path: &str) {
    let parts =
        ["in_layers.0", "in_layers.2", "emb_layers.1", "out_layers.0", "out_layers.3", "skip_connection"];
    modules.extend(parts.map(|part| format!("{path}.{part}")));
}

fn attention(modules: &mut Vec<String>, path: &str) {
    modules.extend(["norm", "proj_in", "proj_out"].map(|part| format!("{path}.{part}")));
    for index in 0..MAX_DEPTH {
        let block = format!("{path}.transformer_blocks.{index}");
        modules.extend(
            ["norm1", "norm2", "norm3", "ff.net.0.proj", "ff.net.2"].map(|part| format!("{block}.{part}")),
        );
        for attention in ["attn1", "attn2"] {
            let parts = ["to_q", "to_k", "to_v", "to_out.0"];
            modules.extend(parts.map(|part| format!("{block}.{attention}.{part}")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_two_names_share_their_letters() {
        let names = possible_names();
        let flat: HashSet<String> = names.iter().map(|name| name.replace('.', "")).collect();
        assert_eq!(flat.len(), names.len());
    }

    #[test]
    fn names_get_their_dots_back() {
        let keys = [
            "model_ema.diffusion_modelinput_blocks110in_layers2weight",
            "model_ema.decay",
            "model_ema.diffusion_modelx",
        ];
        let (found, rest) = restore(&keys);
        assert_eq!(found["input_blocks.11.0.in_layers.2.weight"], keys[0]);
        assert_eq!((found.len(), &rest[..]), (1, &keys[1..]));
    }
}
