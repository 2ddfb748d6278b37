//! Checkpoints in several files, with other names, with averaged weights and with 8-bit types. Each tensor must match
//! the synthetic weight rule bit for bit.

#![allow(clippy::unwrap_used)]

mod common;

use common::{
    make::{Made, complete, component, diffusers, file, junk, original, write_folder},
    tables::table,
};
use sdrun_abi::{DType, ErrorCode};
use sdrun_weights::{
    Checkpoint, Component,
    checkpoint::{Family, Format, identify},
};
use std::fs;

const F16: DType = DType::F16;

#[test]
fn spellings_of_other_times_are_read() {
    // transformers 5.
    let text = table("sd15_text_encoder");
    let short = |n: &str| n.strip_prefix("text_model.").unwrap().to_string();
    for prefix in ["", "text_encoders.clip_l.transformer."] {
        let tensors: Vec<Made> = diffusers(&text, F16)
            .into_iter()
            .map(|m| m.renamed(|n| format!("{prefix}{}", short(n))))
            .collect();
        let (_folder, path) = file("m.safetensors", &[], &tensors);
        component(&Checkpoint::open(&path).unwrap(), Component::TextEncoder, &text, F16);
    }
    // Older diffusers.
    let vae = table("sd15_vae");
    let older = |n: &str| {
        let parts = [("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")];
        parts.into_iter().fold(n.to_string(), |n, (new, old)| n.replace(new, old))
    };
    let tensors: Vec<Made> = diffusers(&vae, F16).into_iter().map(|m| m.renamed(older)).collect();
    assert!(tensors.iter().any(|made| made.name.ends_with("proj_attn.weight")));
    let (_folder, path) = file("m.safetensors", &[], &tensors);
    let checkpoint = Checkpoint::open(&path).unwrap();
    component(&checkpoint, Component::Vae, &vae, F16);
    complete(&checkpoint.summary());
    // T5's embedding table under its other name.
    let t5 = table("t5xxl");
    let tied = |n: &str| n.replace("shared.weight", "encoder.embed_tokens.weight");
    let tensors: Vec<Made> = diffusers(&t5, F16).into_iter().map(|m| m.renamed(tied)).collect();
    let (_folder, path) = file("m.safetensors", &[], &tensors);
    component(&Checkpoint::open(&path).unwrap(), Component::TextEncoder3, &t5, F16);
    // Flux's norms saved under the name `weight`.
    let flux = table("flux_dev");
    let norm = |n: &str| n.replace("_norm.scale", "_norm.weight");
    let tensors: Vec<Made> = original(&flux, "", F16).into_iter().map(|m| m.renamed(norm)).collect();
    let (_folder, path) = file("m.safetensors", &[], &tensors);
    component(&Checkpoint::open(&path).unwrap(), Component::Denoiser, &flux, F16);
}

#[test]
fn averaged_weights_serve_where_there_are_no_others() {
    let (unet, vae) = (table("sdxl_unet"), table("sd15_vae"));
    let flat = |n: &str| format!("model_ema.diffusion_model{}", n.replace('.', ""));
    let mut tensors: Vec<Made> = original(&unet, "", F16).into_iter().map(|m| m.renamed(flat)).collect();
    tensors.extend(original(&vae, vae.prefix, F16));
    tensors.push(junk("model_ema.decay"));
    let (_folder, path) = file("ema.safetensors", &[], &tensors);
    let checkpoint = Checkpoint::open(&path).unwrap();
    component(&checkpoint, Component::Denoiser, &unet, F16);
    component(&checkpoint, Component::Vae, &vae, F16);
    let summary = checkpoint.summary();
    complete(&summary);
    assert!(summary.facts.ema);
    assert_eq!(summary.ignored, ["model_ema.decay"]);
}

#[test]
fn folders_of_diffusers_sharded_and_in_variants() {
    let (unet, vae, text) = (table("sd15_unet"), table("sd15_vae"), table("sd15_text_encoder"));
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    fs::write(root.join("model_index.json"), "{}").unwrap();
    // Shards with an index, a half-precision variant, and a variant next to the full version.
    let tensors = diffusers(&unet, DType::F32);
    let (first, second) = tensors.split_at(300);
    let shard = |i: usize| format!("unet/diffusion_pytorch_model-0000{i}-of-00002.safetensors");
    write_folder(root, &shard(1), first);
    write_folder(root, &shard(2), second);
    let place = |m: &Made, i: usize| (m.name.clone(), shard(i)["unet/".len()..].to_string().into());
    let map: serde_json::Map<String, serde_json::Value> =
        first.iter().map(|m| place(m, 1)).chain(second.iter().map(|m| place(m, 2))).collect();
    let index = root.join("unet/diffusion_pytorch_model.safetensors.index.json");
    fs::write(&index, serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string())
        .unwrap();
    write_folder(root, "vae/diffusion_pytorch_model.fp16.safetensors", &diffusers(&vae, F16));
    write_folder(root, "text_encoder/model.fp16.safetensors", &diffusers(&text, F16));
    write_folder(root, "text_encoder/model.safetensors", &diffusers(&text, DType::F32));
    fs::create_dir_all(root.join("scheduler")).unwrap();
    let scheduler = r#"{"prediction_type": "v_prediction", "rescale_betas_zero_snr": true}"#;
    fs::write(root.join("scheduler/scheduler_config.json"), scheduler).unwrap();

    let checkpoint = Checkpoint::open(root).unwrap();
    component(&checkpoint, Component::Denoiser, &unet, DType::F32);
    component(&checkpoint, Component::Vae, &vae, F16);
    component(&checkpoint, Component::TextEncoder, &text, DType::F32);
    let summary = checkpoint.summary();
    complete(&summary);
    assert_eq!((summary.format, summary.family), (Format::Folder, Some(Family::Sd1)));
    let prediction = &summary.prediction;
    assert_eq!((prediction.is_velocity(), prediction.zero_terminal_snr), (Some(true), Some(true)));
    assert_eq!(prediction.evidence.len(), 2, "{prediction:?}");

    // The component's folder, the index and any shard all open the same checkpoint.
    for path in [root.join("unet"), index.clone(), root.join(shard(2))] {
        component(&Checkpoint::open(path).unwrap(), Component::Denoiser, &unet, DType::F32);
    }
    component(&Checkpoint::open(root.join("vae")).unwrap(), Component::Vae, &vae, F16);
    // The folder name identifies the second text encoder.
    let elsewhere = root.join("other");
    write_folder(&elsewhere, "text_encoder_2/model.safetensors", &diffusers(&text, F16));
    let checkpoint = Checkpoint::open(&elsewhere).unwrap();
    assert_eq!(checkpoint.components(), [Component::TextEncoder2]);

    // An index that points outside its folder, a missing shard, pickle files, an empty folder.
    fs::write(&index, r#"{"weight_map": {"a": "../x.safetensors"}}"#).unwrap();
    assert_eq!(Checkpoint::open(&index).unwrap_err().code, ErrorCode::DataLoss);
    fs::remove_file(root.join(shard(1))).unwrap();
    let error = Checkpoint::open(root.join(shard(2))).unwrap_err();
    assert!(error.code == ErrorCode::NotFound && error.message.contains("00001-of-00002"), "{error}");
    let pickles = root.join("pickles");
    fs::create_dir_all(&pickles).unwrap();
    assert_eq!(Checkpoint::open(&pickles).unwrap_err().code, ErrorCode::NotFound);
    fs::write(pickles.join("pytorch_model.bin"), "PK").unwrap();
    assert_eq!(Checkpoint::open(&pickles).unwrap_err().code, ErrorCode::Unimplemented);
}

/// 8-bit codes as stored in the file, and their values, with the factors of a scaled checkpoint.
#[test]
fn eight_bit_weights_are_widened_and_scaled() {
    let decode = |code: u8, dtype: &str| -> f64 {
        let (sign, code) = (if code > 127 { -1.0 } else { 1.0 }, code & 127);
        let (bits, bias) = if dtype == "F8_E4M3" { (3, 7) } else { (2, 15) };
        let (exponent, fraction) = (i32::from(code >> bits), f64::from(code & ((1 << bits) - 1)));
        let unit = f64::from(1 << bits);
        sign * match exponent {
            0 => 2f64.powi(1 - bias) * fraction / unit,
            _ => 2f64.powi(exponent - bias) * (1.0 + fraction / unit),
        }
    };
    let mut flux = table("flux_dev").only(|key| !key.contains("_blocks.") || key.contains("_blocks.0."));
    flux.divisor = 192;
    for (dtype, scale) in [
        ("F8_E4M3", None),
        ("F8_E5M2", None),
        ("F8_E4M3", Some("scale_weight")),
        ("F8_E4M3", Some("weight_scale")),
    ] {
        let mut tensors = original(&flux, "", DType::BF16);
        let mut companions = Vec::new();
        for tensor in tensors.iter_mut().filter(|made| made.shape.len() == 2) {
            let count = tensor.shape.iter().product::<usize>();
            // All finite codes of both signs.
            let codes = (0..count).map(|i| ((i * 37 + 11) % 120) as u8 | if i % 3 == 0 { 128 } else { 0 });
            *tensor = Made::new(&tensor.name, dtype, &tensor.shape, codes.collect());
            let module = tensor.name.strip_suffix("weight").unwrap();
            if let Some(scale) = scale {
                // A single factor, or one per row.
                let rows = if scale == "weight_scale" { tensor.shape[0] } else { 1 };
                let factors = (0..rows).flat_map(|row| (0.37f32 + row as f32).to_le_bytes()).collect();
                let shape = if rows == 1 { vec![] } else { vec![rows, 1] };
                companions.push(Made::new(&format!("{module}{scale}"), "F32", &shape, factors));
                companions.push(junk(&format!(
                    "{module}{}",
                    if rows == 1 { "scale_input" } else { "input_scale" }
                )));
                if rows > 1 {
                    let marker = br#"{"format": "float8_e4m3fn"}"#;
                    companions.push(Made::new(
                        &format!("{module}comfy_quant"),
                        "U8",
                        &[marker.len()],
                        marker.to_vec(),
                    ));
                }
            }
        }
        if scale == Some("scale_weight") {
            companions.push(Made::new("scaled_fp8", dtype, &[2], vec![0; 2]));
        }
        let all: Vec<Made> = tensors.iter().chain(&companions).cloned().collect();
        let (_folder, path) = file("f8.safetensors", &[], &all);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let state = checkpoint.component(Component::Denoiser).unwrap();
        complete(&checkpoint.summary());
        assert!(checkpoint.summary().components[0].dtypes[&dtype.to_lowercase()] > 15);
        for pair in &flux.pairs {
            let made = tensors.iter().find(|made| made.name == pair.original).unwrap();
            if made.shape.len() != 2 {
                assert_eq!(state.get(&pair.diffusers[0]).unwrap().dtype, DType::BF16);
                continue;
            }
            let columns = made.shape[1];
            let mut expected: Vec<f32> = made
                .data
                .iter()
                .enumerate()
                .map(|(i, code)| {
                    let row = if scale == Some("weight_scale") { (i / columns) as f32 } else { 0.0 };
                    let factor = if scale.is_some() { 0.37f32 + row } else { 1.0 };
                    (decode(*code, dtype) * f64::from(factor)) as f32
                })
                .collect();
            if pair.original.starts_with("final_layer.adaLN") {
                let half = expected.len() / 2;
                expected.rotate_left(half);
            }
            let mut got: Vec<f32> = Vec::new();
            for name in &pair.diffusers {
                let weight = state.get(name).unwrap();
                assert_eq!(state.describe(name).unwrap(), (weight.dtype, weight.shape.clone()));
                match (weight.dtype, scale) {
                    (DType::F32, Some(_)) => {
                        got.extend(weight.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
                    }
                    (DType::F16, None) => {
                        let halves = weight.data().as_chunks::<2>().0.iter();
                        got.extend(halves.map(|b| half::f16::from_le_bytes(*b).to_f32()));
                    }
                    (other, _) => panic!("{name} is {other}"),
                }
            }
            assert!(got == expected, "{dtype} {scale:?} {}", pair.original);
        }
    }

    // Errors name other quantisations when their tensors are needed.
    let marker = br#"{"format": "nvfp4"}"#;
    let mut tensors = original(&flux, "", F16);
    let first = tensors.iter_mut().find(|made| made.name == "img_in.weight").unwrap();
    *first = Made::new("img_in.weight", "U8", &[16, 8], vec![0; 128]);
    tensors.push(junk("img_in.weight_scale"));
    tensors.push(Made::new("img_in.comfy_quant", "U8", &[marker.len()], marker.to_vec()));
    let (_folder, path) = file("nvfp4.safetensors", &[], &tensors);
    let state = Checkpoint::open(&path).unwrap().component(Component::Denoiser).unwrap();
    let error = state.get("x_embedder.weight").unwrap_err();
    assert!(error.code == ErrorCode::Unimplemented && error.message.contains("nvfp4"), "{error}");
}

/// Both halves of TAESD in its own numbering, in one file and in two files.
#[test]
fn tiny_autoencoders_in_their_own_numbering() {
    let made = |name: &str| {
        let data = name.bytes().cycle().take(8).collect();
        Made::new(name, "F16", &[4], data)
    };
    // Layers with weights, as in its `taesd.py`: convolutions, and blocks of three convolutions.
    let names = |plain: &[usize], blocks: &[usize]| -> Vec<String> {
        let ends = plain.iter().map(|place| format!("{place}.weight"));
        ends.chain(blocks.iter().map(|place| format!("{place}.conv.4.bias")))
            .chain([0, 2].map(|i| format!("{}.conv.{i}.weight", blocks[0])))
            .chain([0, 1, 3].map(|i| format!("{}.pool.{i}.weight", blocks[1])))
            .collect()
    };
    let encoder = names(&[0, 2, 6, 10, 14], &[1, 3, 4, 5, 7, 8, 9, 11, 12, 13]);
    let decoder = names(&[1, 7, 12, 17, 19], &[3, 4, 5, 8, 9, 10, 13, 14, 15, 18]);
    let expect = |checkpoint: &Checkpoint, half: &str, names: &[String], shift: usize, prefix: &str| {
        let state = checkpoint.component(Component::Vae).unwrap();
        for name in names {
            let (place, rest) = name.split_once('.').unwrap();
            let place: usize = place.parse().unwrap();
            let weight = state.get(&format!("{half}.layers.{}.{rest}", place - shift)).unwrap();
            assert_eq!(weight.data(), made(&format!("{prefix}{name}")).data);
            let own = state.get(&format!("{prefix}{name}")).unwrap();
            assert_eq!(own.data(), weight.data(), "under its own key as well");
        }
        assert_eq!(checkpoint.summary().family, Some(Family::Taesd));
    };
    for (half, names, shift) in [("encoder", &encoder, 0), ("decoder", &decoder, 1)] {
        let (_folder, path) =
            file("taesd.safetensors", &[], &names.iter().map(|name| made(name)).collect::<Vec<_>>());
        let shapes = names.iter().map(|name| (name.as_str(), &[4usize][..]));
        assert_eq!(identify(shapes), Some((Family::Taesd, Component::Vae)));
        let checkpoint = Checkpoint::open(&path).unwrap();
        expect(&checkpoint, half, names, shift, "");
        assert_eq!(checkpoint.component(Component::Vae).unwrap().names().len(), names.len());
    }
    for prefix in ["taesd_", ""] {
        let prefixed = |half: &str, names: &[String]| -> Vec<Made> {
            names.iter().map(|name| made(&format!("{prefix}{half}.{name}"))).collect()
        };
        let both = [prefixed("encoder", &encoder), prefixed("decoder", &decoder)].concat();
        let (_folder, path) = file("both.safetensors", &[], &both);
        let checkpoint = Checkpoint::open(&path).unwrap();
        expect(&checkpoint, "encoder", &encoder, 0, &format!("{prefix}encoder."));
        expect(&checkpoint, "decoder", &decoder, 1, &format!("{prefix}decoder."));
        complete(&checkpoint.summary());
    }
}

#[test]
fn networks_with_and_without_prefix_lie_in_one_file() {
    let (flux, vae, t5) = (table("flux_dev"), table("sd15_vae"), table("t5xxl"));
    let mut tensors = original(&flux, "", F16);
    tensors.extend(original(&vae, "vae.", F16));
    tensors.extend(original(&t5, "text_encoders.t5xxl.transformer.", F16));
    tensors.push(Made::new("text_encoders.t5xxl.spiece_model", "U8", &[1], vec![0]));
    let (_folder, path) = file("all.safetensors", &[], &tensors);
    let checkpoint = Checkpoint::open(&path).unwrap();
    component(&checkpoint, Component::Denoiser, &flux, F16);
    component(&checkpoint, Component::Vae, &vae, F16);
    component(&checkpoint, Component::TextEncoder2, &t5, F16);
    complete(&checkpoint.summary());
}
