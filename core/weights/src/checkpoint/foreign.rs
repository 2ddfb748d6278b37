//! Refuses files that are often mistaken for checkpoints.

use super::layout::Shapes;
use sdrun_abi::{Error, Hint, Result};
use std::path::Path;

/// Parts of keys that only adapters have (LoRA, LoHa, LoKr, DoRA, GLoRA, IA3, in the spellings of kohya, LyCORIS,
/// PEFT and older diffusers).
const ADAPTER_PARTS: [&str; 18] = [
    "lora_up",
    "lora_down",
    "lora_mid",
    "lora_A",
    "lora_B",
    "lora",
    "hada_w1_a",
    "hada_w1_b",
    "hada_w2_a",
    "hada_w2_b",
    "lokr_w1",
    "lokr_w2",
    "lokr_w1_a",
    "lokr_w1_b",
    "lokr_w2_a",
    "lokr_w2_b",
    "dora_scale",
    "on_input",
];
/// Prefixes of keys that only adapters have.
const ADAPTER_STARTS: [&str; 4] = ["lora_unet_", "lora_te", "lora_transformer_", "lycoris_"];

/// `InvalidArgument` with a hint for adapters and embeddings; `Unimplemented` for Control-LoRAs.
pub(super) fn refuse(path: &Path, keys: &[&str], shapes: Shapes) -> Result<()> {
    if keys.contains(&"lora_controlnet") {
        let message = format!("{} is a Control-LoRA, which sdrun does not read", path.display());
        return Err(Error::unsupported(message).with_file(path).with_hint("get the whole ControlNet"));
    }
    let adapter = |key: &&&str| {
        ADAPTER_STARTS.iter().any(|start| key.starts_with(start))
            || key.split('.').any(|part| ADAPTER_PARTS.contains(&part) || part.ends_with("_lora"))
    };
    let count = keys.iter().filter(adapter).count();
    if count > 0 && 2 * count >= keys.len() {
        return Err(Error::invalid(format!("{} is an adapter (LoRA or a relative)", path.display()))
            .with_file(path)
            .with_hint(Hint::UseAsAdapter));
    }
    // `emb_params` (A1111), one tensor per encoder (SD XL and SD 3), or one tensor named after its word.
    let embedding = match keys {
        [] => false,
        [one] => shapes(one).is_some_and(|shape| matches!(shape[..], [_] | [_, _])),
        _ => keys.iter().all(|key| ["emb_params", "clip_l", "clip_g", "t5xxl", "clip_h"].contains(key)),
    };
    if embedding {
        return Err(Error::invalid(format!("{} is a textual inversion (embedding)", path.display()))
            .with_file(path)
            .with_hint("it extends the vocabulary of a text encoder and is not a checkpoint"));
    }
    Ok(())
}
