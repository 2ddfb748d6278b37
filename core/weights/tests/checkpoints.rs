//! Checkpoints of every layout. Each tensor of each component must match the synthetic weight rule bit for bit.

#![allow(clippy::unwrap_used)]

mod common;

use common::{
    make::{Made, borrowed, complete, component, diffusers, file, junk, original},
    tables::table,
};
use proptest::prelude::*;
use sdrun_abi::{DType, ErrorCode};
use sdrun_weights::{
    Checkpoint, Component,
    checkpoint::{Family, Format, Parameterisation, Summary, identify},
    keys::{Naming, Network},
};
use std::{fs, sync::LazyLock};

const F16: DType = DType::F16;

#[test]
fn stable_diffusion_1_in_one_file() {
    let (unet, vae, text) = (table("sd15_unet"), table("sd15_vae"), table("sd15_text_encoder"));
    let mut tensors = original(&unet, unet.prefix, F16);
    tensors.extend(original(&vae, vae.prefix, F16));
    tensors.extend(original(&text, text.prefix, F16));
    for name in [
        "alphas_cumprod",
        "model_ema.decay",
        "model_ema.diffusion_modelinput_blocks00weight",
        "cond_stage_model.transformer.text_model.embeddings.position_ids",
        "cond_stage_model.logit_scale",
        "first_stage_model.loss.logvar",
        "v_pred",
    ] {
        tensors.push(junk(name));
    }
    tensors.push(junk("something.else"));
    let metadata = [("modelspec.title", "t"), ("modelspec.architecture", "stable-diffusion-v1")];
    let (_folder, path) = file("model.safetensors", &metadata, &tensors);
    let checkpoint = Checkpoint::open(&path).unwrap();
    use Component::{Denoiser, TextEncoder, TextEncoder2, Vae};
    assert_eq!(checkpoint.components(), [TextEncoder, Denoiser, Vae]);
    component(&checkpoint, Denoiser, &unet, F16);
    component(&checkpoint, Vae, &vae, F16);
    component(&checkpoint, TextEncoder, &text, F16);
    for part in [TextEncoder, Denoiser, Vae] {
        let state = checkpoint.component(part).unwrap();
        assert_eq!(borrowed(&*state), state.names().len(), "all are borrowed");
    }
    let error = checkpoint.component(TextEncoder2).err().unwrap();
    assert_eq!(error.code, ErrorCode::NotFound);
    assert!(
        error.message.contains("text_encoder, denoiser, vae") || error.message.contains("denoiser"),
        "{error}"
    );

    let summary = checkpoint.summary();
    assert_eq!((summary.family, summary.format), (Some(Family::Sd1), Format::Safetensors));
    assert_eq!((summary.ignored.len(), &*summary.unrecognised), (7, &["something.else".to_string()][..]));
    assert!(!summary.facts.inpainting && !summary.facts.ema);
    assert_eq!(summary.prediction.is_velocity(), Some(true));
    assert_eq!(summary.metadata["modelspec.title"], "t");
    let part = summary.components.iter().find(|part| part.component == Denoiser).unwrap();
    assert_eq!((part.tensors, part.network, part.naming), (686, Network::UNet, Naming::Original));
    assert_eq!(part.dtypes["f16"], 686);
    let json = serde_json::to_string(&summary).unwrap();
    assert_eq!(serde_json::from_str::<Summary>(&json).unwrap(), summary);
}

#[test]
fn stable_diffusion_xl_in_one_file_has_open_clip() {
    let entries = ["sdxl_unet", "sd15_vae", "sdxl_text_encoder", "sdxl_text_encoder_2"].map(table);
    let tensors: Vec<Made> = entries.iter().flat_map(|entry| original(entry, entry.prefix, F16)).collect();
    let (_folder, path) = file("xl.safetensors", &[], &tensors);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let parts = [Component::Denoiser, Component::Vae, Component::TextEncoder, Component::TextEncoder2];
    for (part, entry) in parts.into_iter().zip(&entries) {
        component(&checkpoint, part, entry, F16);
    }
    // Only the transposed projection is copied. Parts of fused projections are not.
    let text = checkpoint.component(Component::TextEncoder2).unwrap();
    assert_eq!(borrowed(&*text), 516);
    let summary = checkpoint.summary();
    complete(&summary);
    assert_eq!(summary.family, Some(Family::Sdxl));
}

#[test]
fn stable_diffusion_3_and_flux_with_their_text_encoders() {
    let (clip_l, clip_g, t5) = (table("sdxl_text_encoder"), table("sdxl_text_encoder_2"), table("t5xxl"));
    let encoders = |with_g: bool| {
        let mut tensors = original(&clip_l, "text_encoders.clip_l.transformer.", DType::BF16);
        tensors.extend(original(&t5, "text_encoders.t5xxl.transformer.", DType::BF16));
        if with_g {
            // These files name the larger CLIP as transformers does.
            let named = diffusers(&clip_g, DType::BF16);
            tensors.extend(
                named
                    .into_iter()
                    .map(|made| made.renamed(|n| format!("text_encoders.clip_g.transformer.{n}"))),
            );
        }
        tensors
    };
    for (name, prefix, t5_is, family) in [
        ("sd3_medium", "model.diffusion_model.", Component::TextEncoder3, Family::Sd3),
        ("sd35_large", "diffusion_model.", Component::TextEncoder3, Family::Sd35),
        ("flux_dev", "model.diffusion_model.", Component::TextEncoder2, Family::Flux),
    ] {
        let entry = table(name);
        let mut tensors = original(&entry, prefix, DType::BF16);
        tensors.extend(encoders(t5_is == Component::TextEncoder3));
        tensors.push(junk("text_encoders.clip_l.logit_scale"));
        let (_folder, path) = file("m.safetensors", &[], &tensors);
        let checkpoint = Checkpoint::open(&path).unwrap();
        component(&checkpoint, Component::Denoiser, &entry, DType::BF16);
        component(&checkpoint, Component::TextEncoder, &clip_l, DType::BF16);
        component(&checkpoint, t5_is, &t5, DType::BF16);
        if t5_is == Component::TextEncoder3 {
            component(&checkpoint, Component::TextEncoder2, &clip_g, DType::BF16);
        }
        let t5 = checkpoint.component(t5_is).unwrap();
        let tied =
            ["shared.weight", "encoder.embed_tokens.weight"].map(|n| t5.get(n).unwrap().data().to_vec());
        assert_eq!(tied[0], tied[1]);
        let summary = checkpoint.summary();
        complete(&summary);
        assert_eq!(summary.family, Some(family));
        assert_eq!(summary.facts.distilled_guidance, name == "flux_dev");
    }
}

#[test]
fn one_component_in_a_file_with_and_without_prefix() {
    use Component::{ControlNet, Denoiser, TextEncoder, TextEncoder2, TextEncoder3, Vae};
    for (name, prefixes, part, family) in [
        ("flux_dev", &["", "model.diffusion_model."][..], Denoiser, Family::Flux),
        ("sd3_medium", &["", "diffusion_model."], Denoiser, Family::Sd3),
        ("sdxl_unet", &["", "model.diffusion_model."], Denoiser, Family::Sdxl),
        ("sd15_unet", &[""], Denoiser, Family::Sd1),
        ("sd15_controlnet", &["", "control_model."], ControlNet, Family::Sd1),
        ("sd15_vae", &["", "first_stage_model.", "vae."], Vae, Family::Vae4),
        ("sd15_text_encoder", &["", "text_encoders.clip_l.", "text_encoder."], TextEncoder, Family::ClipL),
        ("sdxl_text_encoder_2", &["", "conditioner.embedders.0.model."], TextEncoder2, Family::ClipG),
        ("t5xxl", &["", "text_encoders.t5xxl."], TextEncoder3, Family::T5),
    ] {
        let entry = table(name);
        for prefix in prefixes {
            let (_folder, path) = file("m.safetensors", &[], &original(&entry, prefix, F16));
            let checkpoint =
                Checkpoint::open(&path).unwrap_or_else(|error| panic!("{name} {prefix}: {error}"));
            assert_eq!(checkpoint.components(), [part], "{name} {prefix:?}");
            component(&checkpoint, part, &entry, F16);
            let summary = checkpoint.summary();
            complete(&summary);
            assert_eq!(summary.family, Some(family), "{name}");
        }
        // The same tensors under diffusers' names.
        let (_folder, path) = file("m.safetensors", &[], &diffusers(&entry, DType::F32));
        let checkpoint = Checkpoint::open(&path).unwrap();
        component(
            &checkpoint,
            if name == "sdxl_text_encoder_2" { TextEncoder } else { part },
            &entry,
            DType::F32,
        );
        complete(&checkpoint.summary());
        assert_eq!(checkpoint.summary().components[0].naming, Naming::Diffusers);
        // A text encoder alone in a file may serve as any text encoder, but another component may not.
        assert_eq!(
            checkpoint.component(TextEncoder2).is_ok(),
            name.contains("text") || name == "t5xxl",
            "{name}"
        );
    }
}

#[test]
fn what_is_no_checkpoint_is_refused_with_a_hint() {
    let matrix = |name: &str| Made::new(name, "F32", &[2, 2], vec![0; 16]);
    for (names, words) in [
        (&["lora_unet_x.lora_up.weight", "lora_unet_x.lora_down.weight", "lora_unet_x.alpha"][..], "adapter"),
        (&["unet.down_blocks.0.to_q.lora_A.weight", "unet.down_blocks.0.to_q.lora_B.weight"], "adapter"),
        (&["transformer.transformer_blocks.0.attn.to_q.lora_A.weight"], "adapter"),
        (&["lycoris_x.hada_w1_a"], "adapter"),
        // A motion module: it has a UNet's outer names and nothing else of a UNet.
        (
            &[
                "down_blocks.0.motion_modules.0.x",
                "up_blocks.0.motion_modules.0.x",
                "up_blocks.1.motion_modules.0.x",
            ],
            "have no known layout",
        ),
        (&["unet.a.processor.to_q_lora.down.weight"], "adapter"),
        (&["emb_params"], "textual inversion"),
        (&["clip_l", "clip_g"], "textual inversion"),
        (&["<word>"], "textual inversion"),
        (&["a.x", "b.x", "c.x", "d.x", "e.x", "f.x", "g.x"], "\"e.x\" and 2 more"),
        (&[], "no tensors"),
    ] {
        let tensors: Vec<Made> = names.iter().map(|name| matrix(name)).collect();
        let (_folder, path) = file("m.safetensors", &[], &tensors);
        let error = Checkpoint::open(&path).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument, "{error}");
        assert!(error.message.contains(words) && error.hint.is_some(), "{names:?}: {error}");
        assert!(error.file.is_some());
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["m.ckpt", "m.pt", "m.pth", "m.bin"] {
        fs::write(folder.path().join(name), b"PK\x03\x04").unwrap();
        let error = Checkpoint::open(folder.path().join(name)).unwrap_err();
        assert_eq!(error.code, ErrorCode::Unimplemented);
        assert!(error.hint.unwrap().to_string().contains("any code"));
    }
    assert_eq!(Checkpoint::open(folder.path().join("absent")).unwrap_err().code, ErrorCode::NotFound);
}

#[test]
fn missing_tensors_are_listed_and_wrong_ones_only_fail_when_needed() {
    let vae = table("sd15_vae");
    let mut tensors = original(&vae, "first_stage_model.", F16);
    tensors.retain(|made| !made.name.contains("norm1.bias"));
    let odd = tensors.iter_mut().find(|made| made.name.ends_with("encoder.conv_in.bias")).unwrap();
    odd.dtype = "F8_E8M0".into();
    odd.shape = vec![odd.data.len()];
    let flat = tensors.iter_mut().find(|made| made.name.ends_with("encoder.mid.attn_1.q.weight")).unwrap();
    flat.shape = vec![flat.shape.iter().product()];
    let (_folder, path) = file("m.safetensors", &[], &tensors);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let state = checkpoint.component(Component::Vae).unwrap();
    let error = state.get("encoder.down_blocks.0.resnets.0.norm1.bias").unwrap_err();
    assert_eq!(error.code, ErrorCode::NotFound);
    assert!(error.message.contains("first_stage_model") && error.message.contains("more"), "{error}");
    let error = state.get("encoder.conv_in.bias").unwrap_err();
    assert!(error.code == ErrorCode::Unimplemented && error.message.contains("E8M0"), "{error}");
    let error = state.get("encoder.mid_block.attentions.0.to_q.weight").unwrap_err();
    assert!(error.code == ErrorCode::InvalidArgument && error.message.contains("1x1"), "{error}");
    assert!(state.get("decoder.conv_in.bias").is_ok());
    let part = &checkpoint.summary().components[0];
    assert_eq!(part.missing.len(), 24);
    assert!(part.missing.contains(&"first_stage_model.encoder.mid.block_1.norm1.bias".to_string()));
}

#[test]
fn state_dicts_are_identified_by_their_shapes() {
    use Component::{ControlNet, Denoiser, TextEncoder, TextEncoder2, TextEncoder3, Vae};
    for (name, expected) in [
        ("sd15_unet", (Family::Sd1, Denoiser)),
        ("sdxl_unet", (Family::Sdxl, Denoiser)),
        ("sd3_medium", (Family::Sd3, Denoiser)),
        ("sd35_large", (Family::Sd35, Denoiser)),
        ("flux_dev", (Family::Flux, Denoiser)),
        ("sd15_controlnet", (Family::Sd1, ControlNet)),
        ("sd15_vae", (Family::Vae4, Vae)),
        ("sd15_text_encoder", (Family::ClipL, TextEncoder)),
        ("sdxl_text_encoder_2", (Family::ClipG, TextEncoder2)),
        ("t5xxl", (Family::T5, TextEncoder3)),
    ] {
        let entry = table(name);
        let shapes: Vec<(&str, &[usize])> =
            entry.diffusers_names().zip(entry.shapes.iter().flatten().map(|shape| &shape[..])).collect();
        assert_eq!(identify(shapes.iter().copied()), Some(expected), "{name}");
        // If no shape is known, the structure still identifies the component.
        let unknown = identify(shapes.iter().map(|(name, _)| (*name, &[][..]))).unwrap();
        assert!(unknown.1 == expected.1 || name == "sdxl_text_encoder_2", "{name}");
    }
    let names = [
        (Family::Sd35, "sd35", "SD 3.5"),
        (Family::SdxlRefiner, "sdxl_refiner", "SDXL refiner"),
        (Family::Vae16, "vae16", "VAE of 16 channels"),
        (Family::ClipL, "clip_l", "CLIP ViT-L"),
        (Family::T5, "t5", "T5"),
    ];
    for (family, json, title) in names {
        assert_eq!(serde_json::to_string(&family).unwrap(), format!("\"{json}\""));
        assert_eq!(family.to_string(), title);
    }
    // Other widths of text embeddings: SD 2 and the refiner.
    for (width, family) in [(1024, Family::Sd2), (1280, Family::SdxlRefiner)] {
        let shape = [320, width];
        let names = [
            "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight",
            "up_blocks.0.resnets.0.conv1.weight",
        ];
        let tensors = names.map(|name| (name, &shape[..]));
        assert_eq!(identify(tensors), Some((family, Denoiser)));
    }
    let nine: &[usize] = &[320, 9, 3, 3];
    let unet = table("sd15_unet");
    let mut tensors = original(&unet, "", F16);
    let first = tensors.iter_mut().find(|made| made.name == "input_blocks.0.0.weight").unwrap();
    *first = Made::new("input_blocks.0.0.weight", "F16", nine, vec![0; nine.iter().product::<usize>() * 2]);
    let (_folder, path) = file("inpainting.safetensors", &[], &tensors);
    assert!(Checkpoint::open(&path).unwrap().summary().facts.inpainting);
    assert_eq!(identify([("a.b", &[][..])]), None);
}

#[test]
fn stable_diffusion_2_has_the_larger_open_clip_first() {
    let text = table("sdxl_text_encoder_2");
    let mut tensors = original(&text, "cond_stage_model.model.", F16);
    let unet = table("sd15_unet");
    tensors.extend(original(&unet, unet.prefix, F16));
    tensors.extend(["cond_stage_model.model.attn_mask", "cond_stage_model.model.logit_scale"].map(junk));
    let (_folder, path) = file("v2.safetensors", &[("modelspec.prediction_type", "v")], &tensors);
    let checkpoint = Checkpoint::open(&path).unwrap();
    component(&checkpoint, Component::TextEncoder, &text, F16);
    assert!(checkpoint.component(Component::TextEncoder2).is_err());
    complete(&checkpoint.summary());
    assert_eq!(checkpoint.summary().prediction.kind, Some(Parameterisation::Velocity));
}

/// Run by hand in release: `cargo test --release -p sdrun-weights --test checkpoints -- --ignored --nocapture`.
#[test]
#[ignore = "prints a time"]
fn time_to_resolve_the_keys_of_stable_diffusion_xl() {
    let entries = ["sdxl_unet", "sd15_vae", "sdxl_text_encoder", "sdxl_text_encoder_2"].map(table);
    let tensors: Vec<Made> = entries.iter().flat_map(|entry| original(entry, entry.prefix, F16)).collect();
    let (_folder, path) = file("xl.safetensors", &[], &tensors);
    for _ in 0..3 {
        let start = std::time::Instant::now();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let opened = start.elapsed();
        let names: usize =
            checkpoint.components().into_iter().map(|c| checkpoint.component(c).unwrap().names().len()).sum();
        println!(
            "{} keys opened in {opened:?}, {names} names resolved in {:?}",
            tensors.len(),
            start.elapsed()
        );
    }
}

/// A file with every kind of fusion that Flux has.
static SMALL_FLUX: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let wanted = ["double_blocks.0.img_attn", "final_layer", "single_blocks.0"];
    let mut flux = table("flux_dev").only(|key| wanted.iter().any(|part| key.contains(part)));
    flux.divisor = 384;
    let (_folder, path) = file("m.safetensors", &[], &original(&flux, "", DType::F16));
    fs::read(&path).unwrap()
});

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]
    /// Any file gives an error, or components whose tensors can be requested.
    #[test]
    fn mutated_files_never_panic(
        places in prop::collection::vec((8usize..4000, any::<u8>()), 1..4),
        digit in prop::option::of((0usize..4000, b'0'..=b'9')),
    ) {
        let mut bytes = SMALL_FLUX.clone();
        for (place, byte) in places {
            bytes[place % 1900] = byte;
        }
        // Changing digits in the header to other digits keeps it readable.
        if let Some((place, digit)) = digit {
            let digits: Vec<usize> = (8..1900).filter(|at| bytes[*at].is_ascii_digit()).collect();
            bytes[digits[place % digits.len()]] = digit;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        fs::write(&path, bytes).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(&path) {
            let _ = checkpoint.summary();
            for part in checkpoint.components() {
                let state = checkpoint.component(part).unwrap();
                for name in state.names() {
                    if let Ok(weight) = state.get(name) {
                        prop_assert_eq!(state.describe(name).unwrap(), (weight.dtype, weight.shape.clone()));
                    }
                }
            }
        }
    }
}
