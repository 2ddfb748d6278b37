//! One LoRA gives the same result in every spelling. Fused modules are split by rows.

use crate::fixtures::{File, Random, merged, pair, target};
use sdrun_weights::{
    Component::{self, *},
    adapter::{Reason, Resolution, Target},
    keys::{Fusion, KeyPair},
};

const D: usize = 8;

/// A network with every sort of layer.
fn network(component: Component) -> Target {
    let wide = [D, D];
    match component {
        Denoiser => target(
            Denoiser,
            &[
                ("down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight", &wide),
                ("down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0.weight", &wide),
                ("down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0.bias", &[D]),
                ("transformer_blocks.0.attn.to_q.weight", &wide),
                ("transformer_blocks.0.attn.to_k.weight", &wide),
                ("transformer_blocks.0.attn.to_v.weight", &wide),
                ("transformer_blocks.0.attn.add_q_proj.weight", &wide),
                ("transformer_blocks.0.attn.add_k_proj.weight", &wide),
                ("transformer_blocks.0.attn.add_v_proj.weight", &wide),
                ("transformer_blocks.0.attn.to_out.0.weight", &wide),
                ("transformer_blocks.0.attn.to_add_out.weight", &wide),
                ("single_transformer_blocks.0.attn.to_q.weight", &wide),
                ("single_transformer_blocks.0.attn.to_k.weight", &wide),
                ("single_transformer_blocks.0.attn.to_v.weight", &wide),
                ("single_transformer_blocks.0.proj_mlp.weight", &[3 * D, D]),
                ("single_transformer_blocks.0.proj_out.weight", &[D, 4 * D]),
                ("norm_out.linear.weight", &[2 * D, D]),
            ],
            &pairs(),
        ),
        TextEncoder | TextEncoder2 => target(
            component,
            &[("text_model.encoder.layers.0.self_attn.q_proj.weight", &wide)],
            &[pair(
                "transformer.resblocks.0.attn.in_proj_weight",
                &["text_model.encoder.layers.0.self_attn.q_proj.weight"],
                Fusion::Rows,
            )],
        ),
        _ => target(component, &[("encoder.block.0.layer.0.SelfAttention.q.weight", &wide)], &[]),
    }
}

fn pairs() -> Vec<KeyPair> {
    let attention = |names: [&str; 3]| names.map(|n| format!("transformer_blocks.0.attn.{n}.weight"));
    let (image, text) =
        (attention(["to_q", "to_k", "to_v"]), attention(["add_q_proj", "add_k_proj", "add_v_proj"]));
    let single = ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"]
        .map(|n| format!("single_transformer_blocks.0.{n}.weight"));
    fn strs(names: &[String]) -> Vec<&str> {
        names.iter().map(String::as_str).collect()
    }
    vec![
        pair(
            "input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight",
            &["down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight"],
            Fusion::Same,
        ),
        pair("double_blocks.0.img_attn.qkv.weight", &strs(&image), Fusion::Rows),
        pair("double_blocks.0.txt_attn.qkv.weight", &strs(&text), Fusion::Rows),
        pair("joint_blocks.0.x_block.attn.qkv.weight", &strs(&image), Fusion::Rows),
        pair(
            "double_blocks.0.img_attn.proj.weight",
            &["transformer_blocks.0.attn.to_out.0.weight"],
            Fusion::Same,
        ),
        pair(
            "double_blocks.0.txt_attn.proj.weight",
            &["transformer_blocks.0.attn.to_add_out.weight"],
            Fusion::Same,
        ),
        pair("single_blocks.0.linear1.weight", &strs(&single), Fusion::Rows),
        pair(
            "single_blocks.0.linear2.weight",
            &["single_transformer_blocks.0.proj_out.weight"],
            Fusion::Same,
        ),
        pair("final_layer.adaLN_modulation.1.weight", &["norm_out.linear.weight"], Fusion::SwappedHalves),
    ]
}

/// Creates the LoRA under these names.
fn lora(down: &str, up: &str, outputs: usize, inputs: usize) -> File {
    let mut random = Random::new(11);
    let (d, u) = (
        random.tensor(sdrun_abi::DType::F16, &[2, inputs]),
        random.tensor(sdrun_abi::DType::F16, &[outputs, 2]),
    );
    File::default().add(down, d).add(up, u)
}

/// The product up · down, row-major, in f64.
fn product(file: &File, down: &str, up: &str, inputs: usize) -> Vec<f64> {
    let (d, u) = (file.values(down), file.values(up));
    (0..u.len() / 2 * inputs)
        .map(|i| (0..2).map(|r| u[i / inputs * 2 + r] * d[r * inputs + i % inputs]).sum())
        .collect()
}

/// The sum of all deltas of a tensor.
fn deltas(resolution: &Resolution, target: &Target, tensor: &str) -> Vec<f32> {
    let (_, shape) = target.tensors().iter().find(|(name, _)| name == tensor).unwrap();
    let deltas: Vec<_> = resolution.deltas[tensor].iter().map(|d| (d, 1.0)).collect();
    merged(&vec![0.0; shape.iter().product()], shape, &deltas)
}

fn assert_near(out: &[f32], expected: &[f64], what: &str) {
    assert_eq!(out.len(), expected.len(), "{what}");
    for (a, b) in out.iter().zip(expected) {
        assert!((f64::from(*a) - b).abs() < 1e-6, "{what}: {a} for {b}");
    }
}

#[test]
fn every_spelling_finds_its_tensor() {
    let q = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight";
    let out = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0.weight";
    let clip = "text_model.encoder.layers.0.self_attn.q_proj.weight";
    let t5 = "encoder.block.0.layer.0.SelfAttention.q.weight";
    let unet = "down_blocks.0.attentions.0.transformer_blocks.0";
    let flat = "down_blocks_0_attentions_0_transformer_blocks_0";
    let layer = "text_model.encoder.layers.0.self_attn";
    let flat_layer = "text_model_encoder_layers_0_self_attn";
    let (kohya, peft, old) = (
        ("lora_down.weight", "lora_up.weight"),
        ("lora_A.weight", "lora_B.weight"),
        ("down.weight", "up.weight"),
    );
    let named = ("lora_A.default.weight", "lora_B.default.weight");
    for (component, tensor, module, (down, up)) in [
        (Denoiser, q, format!("lora_unet_{flat}_attn1_to_q"), kohya),
        (Denoiser, out, format!("lora_unet_{flat}_attn1_to_out_0"), kohya),
        (Denoiser, q, "lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_q".into(), kohya),
        (Denoiser, q, format!("lycoris_{flat}_attn1_to_q"), kohya),
        (Denoiser, q, format!("lora_transformer_{flat}_attn1_to_q"), kohya),
        (Denoiser, q, format!("lora_unet.{unet}.attn1.to_q"), kohya),
        (Denoiser, q, format!("unet.{unet}.attn1.to_q"), peft),
        (Denoiser, q, format!("unet.{unet}.attn1.to_q"), kohya),
        (Denoiser, q, format!("transformer.{unet}.attn1.to_q"), named),
        (Denoiser, q, format!("base_model.model.{unet}.attn1.to_q"), named),
        (Denoiser, q, format!("base_model.model.unet.{unet}.attn1.to_q"), peft),
        (Denoiser, q, format!("{unet}.attn1.to_q"), peft),
        (Denoiser, q, format!("unet.{unet}.attn1.to_q.lora"), old),
        (Denoiser, q, format!("unet.{unet}.attn1.processor.to_q_lora"), old),
        (Denoiser, out, format!("{unet}.attn1.processor.to_out_lora"), old),
        (Denoiser, out, format!("unet.{unet}.attn1.to_out"), peft),
        (Denoiser, q, "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q".into(), kohya),
        (Denoiser, q, "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q".into(), peft),
        (TextEncoder, clip, format!("lora_te_{flat_layer}_q_proj"), kohya),
        (TextEncoder, clip, format!("lora_te1_{flat_layer}_q_proj"), kohya),
        (TextEncoder, clip, format!("text_encoder.{layer}.q_proj"), peft),
        (TextEncoder, clip, "text_encoder.encoder.layers.0.self_attn.q_proj".into(), peft),
        (TextEncoder, clip, "lora_te1_encoder_layers_0_self_attn_q_proj".into(), kohya),
        (TextEncoder, clip, format!("text_encoder.{layer}.q_proj.lora_linear_layer"), old),
        (TextEncoder, clip, format!("text_encoder.{layer}.to_q_lora"), old),
        (TextEncoder, clip, format!("text_encoders.clip_l.transformer.{layer}.q_proj"), peft),
        (TextEncoder, clip, format!("lycoris_{flat_layer}_q_proj"), kohya),
        (TextEncoder2, clip, format!("lora_te2_{flat_layer}_q_proj"), kohya),
        (TextEncoder2, clip, format!("text_encoder_2.{layer}.q_proj"), named),
        (TextEncoder2, clip, format!("clip_g.transformer.{layer}.q_proj"), peft),
        (TextEncoder3, t5, "lora_te3_encoder_block_0_layer_0_SelfAttention_q".into(), kohya),
        (TextEncoder3, t5, "text_encoder_3.encoder.block.0.layer.0.SelfAttention.q".into(), peft),
        (
            TextEncoder3,
            t5,
            "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q".into(),
            peft,
        ),
        (
            Denoiser,
            "transformer_blocks.0.attn.to_out.0.weight",
            "double_blocks.0.processor.proj_lora1".into(),
            old,
        ),
        (
            Denoiser,
            "transformer_blocks.0.attn.to_add_out.weight",
            "double_blocks.0.processor.proj_lora2".into(),
            old,
        ),
    ] {
        let (down, up) = (format!("{module}.{down}"), format!("{module}.{up}"));
        let (file, network) = (lora(&down, &up, D, D), network(component));
        let resolution = file.open().unwrap().resolve(&network);
        assert_eq!(resolution.report.skipped, [], "{module}");
        let name =
            [".lora", ".lora_linear_layer"].iter().find_map(|s| module.strip_suffix(s)).unwrap_or(&module);
        assert_eq!(resolution.report.applied[0].module, name);
        assert_eq!(resolution.deltas.keys().collect::<Vec<_>>(), [tensor], "{module}");
        assert_near(&deltas(&resolution, &network, tensor), &product(&file, &down, &up, D), &module);
    }
}

/// Transformers 5 has no `text_model.` prefix in its names.
#[test]
fn encoders_of_transformers_5_are_found() {
    let network = target(TextEncoder, &[("encoder.layers.0.self_attn.q_proj.weight", &[D, D])], &[]);
    for (module, down, up) in [
        ("lora_te_text_model_encoder_layers_0_self_attn_q_proj", "lora_down.weight", "lora_up.weight"),
        ("text_encoder.text_model.encoder.layers.0.self_attn.q_proj", "lora_A.weight", "lora_B.weight"),
        ("text_encoder.encoder.layers.0.self_attn.q_proj", "lora_A.weight", "lora_B.weight"),
    ] {
        let file = lora(&format!("{module}.{down}"), &format!("{module}.{up}"), D, D);
        assert_eq!(file.open().unwrap().resolve(&network).deltas.len(), 1, "{module}");
    }
}

/// kohya gives T5 the number 3, although it is Flux's second encoder.
#[test]
fn t5_is_found_under_kohyas_number() {
    let network = target(TextEncoder2, &[("encoder.block.0.layer.0.SelfAttention.q.weight", &[D, D])], &[]);
    let name = "lora_te3_encoder_block_0_layer_0_SelfAttention_q";
    let file = lora(&format!("{name}.lora_down.weight"), &format!("{name}.lora_up.weight"), D, D);
    assert_eq!(file.open().unwrap().resolve(&network).deltas.len(), 1);
}

#[test]
fn fused_modules_are_split_by_rows() {
    let attention =
        |names: [&str; 3]| names.map(|n| format!("transformer_blocks.0.attn.{n}.weight")).to_vec();
    let single = ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"]
        .map(|n| format!("single_transformer_blocks.0.{n}.weight"));
    let (kohya, old) = (("lora_down.weight", "lora_up.weight"), ("down.weight", "up.weight"));
    for (module, (down, up), parts) in [
        ("lora_unet_double_blocks_0_img_attn_qkv", kohya, attention(["to_q", "to_k", "to_v"])),
        (
            "diffusion_model.double_blocks.0.txt_attn.qkv",
            kohya,
            attention(["add_q_proj", "add_k_proj", "add_v_proj"]),
        ),
        ("lora_unet_joint_blocks_0_x_block_attn_qkv", kohya, attention(["to_q", "to_k", "to_v"])),
        ("double_blocks.0.processor.qkv_lora1", old, attention(["to_q", "to_k", "to_v"])),
        ("double_blocks.0.processor.qkv_lora2", old, attention(["add_q_proj", "add_k_proj", "add_v_proj"])),
        ("lora_unet_single_blocks_0_linear1", kohya, single.to_vec()),
        ("single_blocks.0.processor.qkv_lora", old, single[..3].to_vec()),
    ] {
        let network = network(Denoiser);
        let rows_of = |name: &String| network.tensors().iter().find(|(n, _)| n == name).unwrap().1[0];
        let rows = parts.iter().map(rows_of).sum();
        let (down, up) = (format!("{module}.{down}"), format!("{module}.{up}"));
        let file = lora(&down, &up, rows, D);
        let resolution = file.open().unwrap().resolve(&network);
        assert_eq!(resolution.report.skipped, [], "{module}");
        assert_eq!(resolution.report.applied[0].tensors, parts, "{module}");
        let whole = product(&file, &down, &up, D);
        let mut first = 0;
        for part in &parts {
            let len = rows_of(part) * D;
            assert_near(&deltas(&resolution, &network, part), &whole[first..first + len], part);
            first += len;
        }
    }
}

#[test]
fn swapped_halves_are_swapped_back() {
    let network = network(Denoiser);
    let (down, up) = (
        "lora_unet_final_layer_adaLN_modulation_1.lora_down.weight",
        "lora_unet_final_layer_adaLN_modulation_1.lora_up.weight",
    );
    let file = lora(down, up, 2 * D, D);
    let resolution = file.open().unwrap().resolve(&network);
    let whole = product(&file, down, up, D);
    let (shift, scale) = whole.split_at(D * D);
    assert_near(
        &deltas(&resolution, &network, "norm_out.linear.weight"),
        &[scale, shift].concat(),
        "swapped",
    );
}

/// Other kinds of modules that change only some rows of a fused weight.
#[test]
fn all_kinds_are_split_by_rows() {
    let network = network(Denoiser);
    let base = Random::new(5).f32s(3 * D * D);
    let parts = ["to_q", "to_k", "to_v"].map(|n| format!("transformer_blocks.0.attn.{n}.weight"));
    let fused = target(Denoiser, &[("double_blocks.0.img_attn.qkv.weight", &[3 * D, D])], &[]);
    let name = "lora_unet_double_blocks_0_img_attn_qkv";
    let key = |slot: &str| format!("{name}.{slot}");
    let file = |tensors: &[(&str, &[usize])]| {
        tensors.iter().fold(File::default(), |f, (slot, shape)| f.random(&key(slot), shape))
    };
    for (what, file) in [
        (
            "LoHa",
            file(&[
                ("hada_w1_a", &[24, 2]),
                ("hada_w1_b", &[2, 8]),
                ("hada_w2_a", &[24, 2]),
                ("hada_w2_b", &[2, 8]),
            ]),
        ),
        ("LoKr", file(&[("lokr_w1", &[4, 2]), ("lokr_w2_a", &[6, 1]), ("lokr_w2_b", &[1, 4])])),
        (
            "DoRA",
            file(&[("lora_down.weight", &[2, 8]), ("lora_up.weight", &[24, 2]), ("dora_scale", &[24, 1])]),
        ),
        (
            "GLoRA",
            file(&[
                ("a1.weight", &[8, 2]),
                ("a2.weight", &[2, 8]),
                ("b1.weight", &[24, 2]),
                ("b2.weight", &[2, 8]),
            ]),
        ),
        ("IA3", file(&[("weight", &[24])]).number(&key("on_input"), 0.0)),
        ("difference", file(&[("diff", &[24, 8])])),
    ] {
        let adapter = file.open().unwrap();
        let (whole, split) = (adapter.resolve(&fused), adapter.resolve(&network));
        assert_eq!(split.report.skipped, [], "{what}");
        let expected =
            merged(&base, &[3 * D, D], &[(&whole.deltas["double_blocks.0.img_attn.qkv.weight"][0], 0.7)]);
        for (i, part) in parts.iter().enumerate() {
            let rows = i * D * D..(i + 1) * D * D;
            let out = merged(&base[rows.clone()], &[D, D], &[(&split.deltas[part][0], 0.7)]);
            let near = out.iter().zip(&expected[rows]).all(|(a, b)| (a - b).abs() < 1e-6);
            assert!(near, "{what} {part}");
        }
    }
    for (what, file) in [
        ("OFT", file(&[("oft_blocks", &[12, 2, 2])])),
        (
            "DoRA",
            file(&[("lora_down.weight", &[2, 8]), ("lora_up.weight", &[24, 2]), ("dora_scale", &[1, 8])]),
        ),
    ] {
        let reason = &file.open().unwrap().resolve(&network).report.skipped[0].reason;
        assert!(matches!(reason, Reason::Unsupported(why) if why.starts_with(what)), "{reason:?}");
    }
}

/// Separate q, k and v of different ranks, together with a fused module.
#[test]
fn ranks_may_differ_between_parts_and_files() {
    let network = network(Denoiser);
    let mut file = File::default();
    for (part, rank) in [("to_q", 1), ("to_k", 3), ("to_v", 5)] {
        let name = format!("transformer.transformer_blocks.0.attn.{part}");
        file = file
            .random(&format!("{name}.lora_A.weight"), &[rank, D])
            .random(&format!("{name}.lora_B.weight"), &[D, rank]);
    }
    let fused = lora(
        "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight",
        "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight",
        3 * D,
        D,
    );
    let (split, fused) = (file.open().unwrap().resolve(&network), fused.open().unwrap().resolve(&network));
    for part in ["to_q", "to_k", "to_v"] {
        let tensor = format!("transformer_blocks.0.attn.{part}.weight");
        let (one, two) = (deltas(&split, &network, &tensor), deltas(&fused, &network, &tensor));
        let both = merged(
            &[0.0; D * D],
            &[D, D],
            &[(&split.deltas[&tensor][0], 1.0), (&fused.deltas[&tensor][0], 1.0)],
        );
        assert!(
            both.iter().zip(one.iter().zip(&two)).all(|(b, (x, y))| (b - (x + y)).abs() < 1e-5),
            "{part}"
        );
    }
}

#[test]
fn peft_says_alpha_in_its_metadata() {
    let network = network(Denoiser);
    let (down, up) = (
        "unet.transformer_blocks.0.attn.to_q.lora_A.weight",
        "unet.transformer_blocks.0.attn.to_q.lora_B.weight",
    );
    let plain = lora(down, up, D, D);
    let tensor = "transformer_blocks.0.attn.to_q.weight";
    for (text, factor) in [
        (r#"{"unet.lora_alpha": 1, "unet.r": 2}"#, 0.5),
        (r#"{"unet.lora_alpha": 2, "unet.use_rslora": true}"#, 2f64.sqrt()),
        (r#"{"unet.lora_alpha": 2, "unet.alpha_pattern": {"attn.to_q": 8}}"#, 4.0),
        (r#"{"text_encoder.lora_alpha": 8}"#, 1.0),
    ] {
        let file = plain.clone().say("lora_adapter_metadata", text);
        let resolution = file.open().unwrap().resolve(&network);
        let expected: Vec<f64> = product(&file, down, up, D).iter().map(|v| v * factor).collect();
        assert_near(&deltas(&resolution, &network, tensor), &expected, text);
    }
}
