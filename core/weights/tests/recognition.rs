//! How checkpoints are recognised: the prediction type of their denoiser, averaged weights, and unsupported models.

#![cfg(unix)] // Files of real sizes need a file system with holes.
#![allow(clippy::unwrap_used)]

mod common;

use common::{
    make::{Made, component, diffusers, file, original, write_folder},
    sparse::Sparse,
    tables::table,
};
use sdrun_abi::{DType, ErrorCode};
use sdrun_weights::{
    Checkpoint, Component,
    checkpoint::{Parameterisation, Prediction, Summary},
    keys::identify_network,
};
use std::fs;

const BIAS: &str = "output_blocks.11.1.transformer_blocks.0.norm1.bias";

fn summary(file: &Sparse) -> Summary {
    let (_folder, path) = file.file();
    Checkpoint::open(&path).unwrap().summary()
}

fn prediction(file: &Sparse) -> Prediction {
    let summary = summary(file);
    let json = serde_json::to_string(&summary).unwrap();
    assert_eq!(serde_json::from_str::<Summary>(&json).unwrap(), summary);
    summary.prediction
}

fn sdxl() -> Sparse {
    Sparse::original(&table("sdxl_unet"), "model.diffusion_model.")
}

/// SD 2: SD 1.5 with text embeddings of width 1024.
fn sd2(bias: &[f32]) -> Sparse {
    let mut file = Sparse::original(&table("sd15_unet"), "");
    for (name, shape) in &mut file.tensors {
        if name.ends_with("attn2.to_k.weight") || name.ends_with("attn2.to_v.weight") {
            shape[1] = 1024;
        }
    }
    file.with_values(BIAS, bias)
}

/// 320 values with mean 0.3 and this standard deviation.
fn spread(deviation: f32) -> Vec<f32> {
    (0..320).map(|i| 0.3 + if i % 2 == 0 { deviation } else { -deviation }).collect()
}

#[test]
fn nothing_is_said_of_what_is_not_known() {
    let found = prediction(&sdxl());
    assert_eq!(found, Prediction::default());
    assert_eq!(found.is_velocity(), None);
    // Markers mean nothing without a denoiser.
    let vae = Sparse::original(&table("sd15_vae"), "").with("v_pred", &[]);
    assert_eq!(prediction(&vae), Prediction::default());
}

#[test]
fn marker_tensors_tell_the_prediction() {
    let found = prediction(&sdxl().with("v_pred", &[]));
    assert_eq!((found.kind, found.zero_terminal_snr), (Some(Parameterisation::Velocity), None));
    assert_eq!(found.evidence, ["the tensor v_pred"]);
    let found = prediction(&sdxl().with("v_pred", &[]).with("ztsnr", &[]));
    assert_eq!((found.is_velocity(), found.zero_terminal_snr), (Some(true), Some(true)));

    let playground = sdxl()
        .with_values("edm_mean", &[-1.6574, 1.886, -1.383, 2.5155])
        .with_values("edm_std", &[8.4927, 5.9022, 6.5498, 5.2299]);
    let found = prediction(&playground);
    let edm = found.edm.unwrap();
    assert_eq!((found.kind, edm.sigma_data), (Some(Parameterisation::Edm), 0.5));
    assert_eq!((edm.sigma_min, edm.sigma_max), (0.002, 80.0));
    assert_eq!(edm.latent_mean.unwrap()[1], 1.886);
    assert_eq!(edm.latent_std.unwrap()[3], 5.2299);

    let cosxl =
        sdxl().with_values("edm_vpred.sigma_max", &[96.0]).with_values("edm_vpred.sigma_min", &[0.25]);
    let found = prediction(&cosxl);
    let edm = found.edm.as_ref().unwrap();
    assert_eq!((found.kind, edm.sigma_data), (Some(Parameterisation::EdmVelocity), 1.0));
    assert_eq!((edm.sigma_min, edm.sigma_max), (0.25, 96.0));
    assert_eq!(found.is_velocity(), Some(true));
}

#[test]
fn metadata_tells_the_prediction_unless_something_contradicts_it() {
    let stated = |key, value| {
        let mut file = sdxl();
        file.metadata.push((key, value));
        file
    };
    for (key, value, kind) in [
        ("modelspec.prediction_type", "epsilon", Parameterisation::Epsilon),
        ("modelspec.prediction_type", "v", Parameterisation::Velocity),
        ("modelspec.predict_key", "v", Parameterisation::Velocity),
    ] {
        let found = prediction(&stated(key, value));
        assert_eq!(found.kind, Some(kind), "{key} {value}");
        assert!(found.evidence[0].contains(key), "{found:?}");
    }
    let found = prediction(&stated("modelspec.prediction_type", "epsilon").with("v_pred", &[]));
    assert_eq!((found.kind, found.evidence.len()), (None, 2), "{found:?}");
    assert_eq!(prediction(&stated("modelspec.prediction_type", "something")).kind, None);
}

#[test]
fn models_of_one_kind_need_no_statement() {
    for name in ["flux_dev", "sd3_medium", "sd35_large"] {
        let mut file = Sparse::original(&table(name), "");
        // Some converters write this into every file.
        file.metadata.push(("modelspec.prediction_type", "epsilon"));
        assert_eq!(prediction(&file).kind, Some(Parameterisation::Flow), "{name}");
    }
}

#[test]
fn stable_diffusion_2_is_told_by_its_values() {
    for (deviation, kind) in [(0.1, Parameterisation::Velocity), (0.08, Parameterisation::Epsilon)] {
        let found = prediction(&sd2(&spread(deviation)));
        assert_eq!(found.kind, Some(kind), "{found:?}");
        assert!(found.evidence[0].contains(&format!("is {deviation:.4}")), "{found:?}");
    }
    // An explicit statement takes precedence. Inpainting models are different.
    let mut stated = sd2(&spread(0.1));
    stated.metadata.push(("modelspec.prediction_type", "epsilon"));
    assert_eq!(prediction(&stated).kind, Some(Parameterisation::Epsilon));
    let inpainting = sd2(&spread(0.1)).shape("input_blocks.0.0.weight", &[320, 9, 3, 3]);
    assert_eq!(prediction(&inpainting).kind, None);
    // SD 1.5 has the same tensor, but there it says nothing about the prediction type.
    let sd1 = Sparse::original(&table("sd15_unet"), "").with_values(BIAS, &spread(0.1));
    assert_eq!(prediction(&sd1).kind, None);
}

#[test]
fn the_scheduler_of_a_folder_tells_the_prediction() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    Sparse::diffusers(&table("sdxl_unet")).write(&root.join("unet/diffusion_pytorch_model.safetensors"));
    fs::create_dir(root.join("scheduler")).unwrap();
    let with = |json: &str| {
        fs::write(root.join("scheduler/scheduler_config.json"), json).unwrap();
        Checkpoint::open(root).unwrap().summary().prediction
    };
    let found = with(r#"{"prediction_type": "epsilon", "rescale_betas_zero_snr": false}"#);
    assert_eq!((found.is_velocity(), found.zero_terminal_snr), (Some(false), Some(false)));
    let found = with(
        r#"{"_class_name": "EDMDPMSolverMultistepScheduler", "prediction_type": "epsilon", "sigma_data": 0.5,
            "sigma_min": 0.003, "sigma_max": 70.0}"#,
    );
    let edm = found.edm.unwrap();
    assert_eq!((found.kind, edm.sigma_min, edm.sigma_max), (Some(Parameterisation::Edm), 0.003, 70.0));
    let found = with(r#"{"_class_name": "FlowMatchEulerDiscreteScheduler"}"#);
    assert_eq!(found.kind, Some(Parameterisation::Flow));
}

/// Trained and averaged weights differ, under every name that tools give to the averaged ones.
#[test]
fn averaged_weights_are_taken_where_they_are_chosen() {
    let mut unet = table("sd15_unet");
    let trained = original(&unet, "model.diffusion_model.", DType::F16);
    unet.tag += "/averaged";
    let flat = |name: &str| format!("model_ema.diffusion_model{}", name.replace('.', ""));
    for rename in
        [&flat as &dyn Fn(&str) -> String, &|name| format!("ema.model.diffusion_model.{name}"), &|name| {
            format!("unet_ema.{name}")
        }]
    {
        let averaged = original(&unet, "", DType::F16).into_iter().map(|made| made.renamed(rename));
        let tensors: Vec<Made> = trained.iter().cloned().chain(averaged).collect();
        let (_folder, path) = file("m.safetensors", &[], &tensors);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let facts = checkpoint.summary().facts;
        assert!(facts.has_ema && !facts.ema, "{}", tensors.last().unwrap().name);
        let name = "conv_in.weight";
        let before = checkpoint.component(Component::Denoiser).unwrap().get(name).unwrap().data().to_vec();
        let checkpoint = checkpoint.with_ema().unwrap();
        component(&checkpoint, Component::Denoiser, &unet, DType::F16);
        assert_ne!(checkpoint.component(Component::Denoiser).unwrap().get(name).unwrap().data(), before);
        assert!(checkpoint.summary().facts.ema);
        assert_eq!(checkpoint.components(), [Component::Denoiser]);
        component(&checkpoint.with_ema().unwrap(), Component::Denoiser, &unet, DType::F16);
    }
    let (_folder, path) = file("m.safetensors", &[], &trained);
    let error = Checkpoint::open(&path).unwrap().with_ema().unwrap_err();
    assert!(error.code == ErrorCode::NotFound && error.message.contains("EMA"), "{error}");
}

#[test]
fn averaged_weights_may_lie_in_a_folder_of_their_own() {
    let mut unet = table("sd15_unet");
    let folder = tempfile::tempdir().unwrap();
    let weights = "diffusion_pytorch_model.safetensors";
    write_folder(folder.path(), &format!("unet/{weights}"), &diffusers(&unet, DType::F16));
    let trained = table("sd15_unet");
    unet.tag += "/averaged";
    write_folder(folder.path(), &format!("unet_ema/{weights}"), &diffusers(&unet, DType::F16));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert!(checkpoint.summary().facts.has_ema);
    component(&checkpoint, Component::Denoiser, &trained, DType::F16);
    component(&checkpoint.with_ema().unwrap(), Component::Denoiser, &unet, DType::F16);
    fs::remove_dir_all(folder.path().join("unet")).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert!(checkpoint.summary().facts.ema);
    component(&checkpoint.with_ema().unwrap(), Component::Denoiser, &unet, DType::F16);
}

/// As in the SD 1.5 repository: the plain file holds the averaged weights, and `non_ema` the trained ones.
#[test]
fn variants_tell_averaged_weights_from_trained_ones() {
    let (trained, mut averaged) = (table("sd15_unet"), table("sd15_unet"));
    averaged.tag += "/averaged";
    let folder = tempfile::tempdir().unwrap();
    let file = |variant: &str| format!("unet/diffusion_pytorch_model{variant}.safetensors");
    let write =
        |variant: &str, unet| write_folder(folder.path(), &file(variant), &diffusers(unet, DType::F16));
    let check = |ema: bool, unet| {
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let checkpoint = if ema { checkpoint.with_ema().unwrap() } else { checkpoint };
        component(&checkpoint, Component::Denoiser, unet, DType::F16);
        checkpoint.summary().facts.ema
    };
    write("", &averaged);
    write(".non_ema", &trained);
    assert!(check(false, &averaged) && check(true, &averaged));
    // Opens the trained weights through their own file, which contains no others.
    let alone = Checkpoint::open(folder.path().join(file(".non_ema"))).unwrap();
    component(&alone, Component::Denoiser, &trained, DType::F16);
    assert!(alone.with_ema().is_err());

    fs::rename(folder.path().join(file("")), folder.path().join(file(".ema"))).unwrap();
    assert!(!check(false, &trained) && check(true, &averaged));

    write(".ema.pruned", &averaged);
    write(".ema.v2", &averaged);
    fs::remove_file(folder.path().join(file(".ema"))).unwrap();
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert!(error.code == ErrorCode::InvalidArgument && error.message.contains("ema.pruned"), "{error}");
}

/// Keys from real files of these models.
const FOREIGN: [(&str, &[&str]); 22] = [
    (
        "HunyuanVideo",
        &[
            "txt_in.individual_token_refiner.blocks.0.norm1.weight",
            "double_blocks.0.img_attn.qkv.weight",
            "double_blocks.0.img_attn.norm.key_norm.scale",
            "single_blocks.0.linear1.weight",
            "img_in.proj.weight",
        ],
    ),
    (
        "HunyuanVideo",
        &[
            "context_embedder.token_refiner.refiner_blocks.0.norm1.weight",
            "transformer_blocks.0.attn.to_q.weight",
            "single_transformer_blocks.0.attn.to_q.weight",
            "x_embedder.proj.weight",
        ],
    ),
    ("FLUX.2", &["double_blocks.0.img_attn.qkv.weight", "double_stream_modulation_img.lin.weight"]),
    (
        "Chroma Radiance",
        &[
            "nerf_blocks.0.x.weight",
            "distilled_guidance_layer.in_proj.weight",
            "double_blocks.0.img_attn.qkv.weight",
        ],
    ),
    (
        "Qwen-Image",
        &[
            "txt_norm.weight",
            "img_in.weight",
            "transformer_blocks.0.img_mod.1.weight",
            "transformer_blocks.0.attn.add_q_proj.weight",
        ],
    ),
    ("Wan", &["head.modulation", "blocks.0.self_attn.norm_q.weight", "text_embedding.2.weight"]),
    (
        "Wan",
        &[
            "condition_embedder.time_embedder.linear_1.weight",
            "blocks.0.attn1.to_q.weight",
            "patch_embedding.weight",
        ],
    ),
    (
        "LTX-Video",
        &[
            "patchify_proj.weight",
            "adaln_single.emb.timestep_embedder.linear_1.bias",
            "transformer_blocks.0.attn2.to_q.weight",
            "caption_projection.linear_1.weight",
        ],
    ),
    (
        "LTX-Video",
        &[
            "proj_in.weight",
            "time_embed.emb.timestep_embedder.linear_1.weight",
            "transformer_blocks.0.attn1.norm_q.weight",
        ],
    ),
    (
        "Lumina 2",
        &[
            "cap_embedder.1.weight",
            "noise_refiner.0.attention.k_norm.weight",
            "layers.0.attention.qkv.weight",
        ],
    ),
    ("Lumina 2", &["time_caption_embed.caption_embedder.1.weight", "noise_refiner.0.attn.to_q.weight"]),
    ("Z-Image", &["cap_embedder.1.weight", "cap_pad_token", "noise_refiner.0.attention.k_norm.weight"]),
    ("AuraFlow", &["double_layers.0.attn.w1q.weight", "double_layers.3.modX.1.weight"]),
    ("AuraFlow", &["joint_transformer_blocks.0.ff_context.out_projection.weight", "register_tokens"]),
    (
        "HiDream",
        &["caption_projection.0.linear.weight", "double_stream_blocks.0.block.ff_i.shared_experts.w3.weight"],
    ),
    (
        "a ControlNet of SD 3",
        &[
            "controlnet_blocks.0.weight",
            "pos_embed_input.proj.weight",
            "transformer_blocks.0.attn.add_q_proj.weight",
        ],
    ),
    (
        "a ControlNet of Flux",
        &[
            "controlnet_blocks.0.weight",
            "controlnet_x_embedder.weight",
            "transformer_blocks.0.attn.to_q.weight",
        ],
    ),
    (
        "a ControlNet of Flux",
        &["controlnet_blocks.0.weight", "double_blocks.0.img_attn.qkv.weight", "input_hint_block.0.weight"],
    ),
    (
        "a ControlNet of Qwen-Image",
        &["controlnet_blocks.0.weight", "txt_norm.weight", "transformer_blocks.0.img_mod.1.weight"],
    ),
    ("Mochi", &["t5_yproj.weight", "blocks.0.attn.qkv_x.weight"]),
    (
        "Stable Video Diffusion",
        &[
            "input_blocks.1.0.time_stack.in_layers.0.weight",
            "input_blocks.1.0.in_layers.0.weight",
            "output_blocks.0.0.in_layers.0.weight",
        ],
    ),
    (
        "a language model as text encoder",
        &["model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"],
    ),
];

#[test]
fn models_that_are_not_read_are_refused_by_name() {
    for (title, keys) in FOREIGN {
        assert_eq!(identify_network(keys.iter().copied()), None, "{title}");
        for prefix in ["", "model.diffusion_model.", "diffusion_model.", "transformer."] {
            let file = Sparse::new(keys.iter().map(|key| (format!("{prefix}{key}"), vec![2, 2])));
            let (_folder, path) = file.file();
            let error = Checkpoint::open(&path).unwrap_err();
            assert_eq!(error.code, ErrorCode::Unimplemented, "{title}: {error}");
            assert!(error.message.contains(&format!("is {title}, which")), "{prefix} {title}: {error}");
            assert!(error.hint.unwrap().to_string().contains("sdrun reads"), "{title}");
        }
    }
    let control = Sparse::new([("lora_controlnet", vec![0]), ("input_blocks.0.0.up", vec![2, 2])]);
    let (_folder, path) = control.file();
    assert!(Checkpoint::open(&path).unwrap_err().message.contains("Control-LoRA"));
}

/// A pipeline with an unsupported denoiser still provides its other components, and reports what the denoiser is.
#[test]
fn other_parts_of_such_a_pipeline_are_read() {
    let wan = FOREIGN[5].1.iter().map(|key| (format!("model.diffusion_model.{key}"), vec![2, 2]));
    let mut file = Sparse::new(wan);
    file.tensors.extend(Sparse::original(&table("sd15_vae"), "first_stage_model.").tensors);
    let (_folder, path) = file.file();
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.components(), [Component::Vae]);
    assert_eq!(checkpoint.summary().foreign, ["Wan"]);
    let error = checkpoint.component(Component::Denoiser).err().unwrap();
    assert!(error.message.contains("it has vae, and Wan, which sdrun does not read"), "{error}");
}
