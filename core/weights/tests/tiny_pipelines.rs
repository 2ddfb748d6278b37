//! Checkpoints written by other programs: the tiny pipelines, in which every tensor follows the synthetic weight
//! rule.

#![allow(clippy::unwrap_used)]

mod common;

use common::tables::{Entry, table_files};
use sdrun_abi::DType;
use sdrun_weights::{Checkpoint, Component, StateDict, checkpoint::Family, synthetic};

/// Checks that every tensor of the table exists and matches the rule. Weights B are the rule's values rounded to f16.
fn check(state: &dyn StateDict, entry: &Entry, tag: &str) -> usize {
    let mut compared = 0;
    for name in entry.diffusers_names() {
        let weight = state.get(name).unwrap_or_else(|error| panic!("{tag} {name}: {error}"));
        // A table of sines, identical in every checkpoint.
        if name == "pos_embed.pos_embed" {
            continue;
        }
        let mut expected = vec![0; weight.data().len()];
        let dtype = if tag.ends_with('B') { DType::F16 } else { DType::F32 };
        if weight.dtype == dtype {
            synthetic::fill(tag, name, &weight.shape, dtype, &mut expected).unwrap();
        } else {
            let mut halves = vec![0; expected.len() / 2];
            synthetic::fill(tag, name, &weight.shape, DType::F16, &mut halves).unwrap();
            let wide = halves.as_chunks::<2>().0.iter();
            expected = wide.flat_map(|b| half::f16::from_le_bytes(*b).to_f32().to_le_bytes()).collect();
        }
        assert!(weight.data() == expected, "{tag} {name}");
        compared += 1;
    }
    assert_eq!(state.names().len(), entry.diffusers_names().count(), "{tag}");
    compared
}

#[test]
fn tiny_checkpoints_have_the_values_of_the_rule() {
    let (root, entries) = (sdrun_tiny::folder(), table_files());
    let mut compared = 0;
    for (family, file, letter, expected) in [
        ("sd", "single_file/tiny_sd_A_fp32.safetensors", "A", Family::Sd1),
        ("sd", "single_file/tiny_sd_B_fp16.safetensors", "B", Family::Sd1),
        ("sd", "diffusers_B_fp16", "B", Family::Sd1),
        ("sdxl", "single_file/tiny_sdxl_B_fp16.safetensors", "B", Family::Sdxl),
        ("sd3", "single_file/tiny_sd3_B_fp16.safetensors", "B", Family::Sd3),
        ("flux", "single_file/tiny_flux_A_fp32.safetensors", "A", Family::Flux),
    ] {
        let path = root.join(family).join(file);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let summary = checkpoint.summary();
        assert_eq!(summary.family, Some(expected), "{}", path.display());
        for part in &summary.components {
            assert!(part.missing.is_empty() && part.extra.is_empty(), "{part:?}");
        }
        let mine = |entry: &&Entry| entry.name.starts_with(&format!("tiny_{family}/"));
        for entry in entries.iter().filter(mine) {
            let name = entry.name.split_once('/').unwrap().1;
            let part = match name {
                "unet" | "transformer" => Component::Denoiser,
                other => *Component::ALL.iter().find(|part| part.name() == other).unwrap(),
            };
            let state = checkpoint.component(part).unwrap();
            compared += check(&*state, entry, &format!("{}/{letter}", entry.tag));
        }
    }
    assert!(compared > 2200, "only {compared} tensors were compared");
}
