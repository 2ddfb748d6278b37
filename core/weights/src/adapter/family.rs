//! The architecture that an adapter was made for. Only messages use it: names and shapes decide what applies. SD 3.5 counts
//! as SD 3, because adapters of both have the same names and shapes.

use crate::checkpoint::Family;
use std::collections::BTreeMap;

/// Identifies it by modules: name in any spelling, width of the input, and whether it belongs to a text encoder.
///
/// The width of the cross-attention's input is that of the text encoders: 768 in SD 1, 1024 in SD 2, 2048 in
/// SDXL. Transformers differ in the names of their blocks, or else in width.
pub(super) fn guess<'a>(modules: impl IntoIterator<Item = (&'a str, Option<usize>, bool)>) -> Option<Family> {
    let (mut by_blocks, mut by_cross, mut by_text) = (None, None, None);
    for (name, width, is_text) in modules {
        let name = name.replace('.', "_");
        let begins = |prefix: &str| name.starts_with(prefix);
        let ends = |parts: [&str; 2]| parts.iter().any(|part| name.ends_with(part));
        if is_text {
            by_text = by_text.or(match width {
                Some(768) if ends(["q_proj", "k_proj"]) => Some(Family::Sd1),
                Some(1024) if ends(["q_proj", "k_proj"]) => Some(Family::Sd2),
                Some(1280) if ends(["q_proj", "k_proj"]) => Some(Family::Sdxl),
                _ => None,
            });
        } else if begins("double_blocks_") || begins("single_blocks_") || begins("single_transformer_blocks_")
        {
            by_blocks = Some(Family::Flux);
        } else if begins("joint_blocks_") {
            by_blocks = Some(Family::Sd3);
        } else if begins("transformer_blocks_") && ends(["attn_to_q", "attn_to_k"]) {
            let by_width = if width == Some(3072) { Family::Flux } else { Family::Sd3 };
            by_blocks = by_blocks.or(Some(by_width));
        } else if ends(["attn2_to_k", "attn2_to_v"]) {
            by_cross = by_cross.or(match width {
                Some(768) => Some(Family::Sd1),
                Some(1024) => Some(Family::Sd2),
                Some(2048) => Some(Family::Sdxl),
                _ => None,
            });
        }
    }
    by_blocks.or(by_cross).or(by_text)
}

/// Identifies it by metadata that trainers write: kohya's `ss_base_model_version`, ModelSpec's `modelspec.architecture`.
pub(super) fn of_metadata(metadata: &BTreeMap<String, String>) -> Option<Family> {
    let text =
        ["ss_base_model_version", "modelspec.architecture"].iter().find_map(|key| metadata.get(*key))?;
    let text = text.to_lowercase();
    let begins = |prefixes: &[&str]| prefixes.iter().any(|prefix| text.starts_with(prefix));
    if begins(&["sdxl", "stable-diffusion-xl"]) {
        Some(Family::Sdxl)
    } else if begins(&["sd3", "stable-diffusion-3", "stable-diffusion-v3"]) {
        Some(Family::Sd3)
    } else if begins(&["sd_v2", "stable-diffusion-v2"]) {
        Some(Family::Sd2)
    } else if begins(&["sd_v1", "sd_1", "stable-diffusion-v1"]) {
        Some(Family::Sd1)
    } else if begins(&["flux"]) {
        Some(Family::Flux)
    } else {
        None
    }
}
