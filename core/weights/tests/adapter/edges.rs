//! Mistakes in real files, and how they are handled.

use crate::{
    fixtures::{File, Random, Tensor, bytes, merged, target},
    keys::NETWORK,
};
use sdrun_abi::{DType, ErrorCode};
use sdrun_weights::{
    Component::{Denoiser, TextEncoder},
    adapter::{Adapter, Delta, Kind, Merge, Reason, Target, check, largest},
    checkpoint::Family,
};

pub(crate) fn network() -> Target {
    target(Denoiser, &NETWORK, &[])
}

fn lora(module: &str, rank: usize) -> File {
    File::default()
        .random(&format!("lora_unet_{module}.lora_down.weight"), &[rank, 5])
        .random(&format!("lora_unet_{module}.lora_up.weight"), &[6, rank])
}

fn reason(file: &File) -> Reason {
    let resolution = file.open().unwrap().resolve(&network());
    assert_eq!((resolution.report.applied.len(), resolution.report.skipped.len()), (0, 1));
    resolution.report.skipped[0].reason.clone()
}

fn delta(file: &File, tensor: &str) -> Delta {
    let resolution = file.open().unwrap().resolve(&network());
    assert_eq!(resolution.report.skipped, []);
    resolution.deltas[tensor][0].clone()
}

fn weight() -> Vec<f32> {
    Random::new(9).f32s(30)
}

#[test]
fn zero_rank_and_empty_tensors_are_skipped() {
    for file in [lora("m", 0), File::default().random("lora_unet_m.diff", &[0])] {
        let reason = reason(&file);
        assert!(matches!(&reason, Reason::Empty(_)), "{reason}");
    }
}

#[test]
fn an_adapter_of_the_text_encoder_alone_is_no_fault() {
    let file = File::default()
        .random("lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight", &[2, 8])
        .random("lora_te_text_model_encoder_layers_0_mlp_fc1.lora_up.weight", &[16, 2]);
    let adapter = file.open().unwrap();
    let (unet, text) =
        (network(), target(TextEncoder, &[("text_model.encoder.layers.0.mlp.fc1.weight", &[16, 8])], &[]));
    let (none, one) = (adapter.resolve(&unet), adapter.resolve(&text));
    assert_eq!(none.report.skipped[0].reason, Reason::OtherComponent);
    check(&adapter, &[(&unet, &none), (&text, &one)], false).unwrap();
    let error = check(&adapter, &[(&unet, &none)], true).unwrap_err();
    assert!(error.message.ends_with("applies: its modules are for other components"), "{error}");
}

#[test]
fn an_sdxl_lora_on_sd_15_is_told() {
    let module = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k";
    let name = format!("{module}.weight");
    let sd15 = target(Denoiser, &[(&name, &[640, 768])], &[]);
    let key = format!("lora_unet_{}", module.replace('.', "_"));
    let file = File::default()
        .random(&format!("{key}.lora_down.weight"), &[1, 2048])
        .random(&format!("{key}.lora_up.weight"), &[640, 1]);
    let adapter = file.open().unwrap();
    assert_eq!((adapter.family_guess(), sd15.family()), (Some(Family::Sdxl), Some(Family::Sd1)));
    let resolution = adapter.resolve(&sd15);
    let shapes = Reason::Shape { tensor: name.clone(), adapter: vec![640, 2048], target: vec![640, 768] };
    assert_eq!(resolution.report.skipped[0].reason, shapes);
    for lenient in [false, true] {
        let error = check(&adapter, &[(&sd15, &resolution)], lenient).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument);
        assert!(error.message.ends_with("is made for SDXL, but the engine is SD 1.5"), "{error}");
    }
}

#[test]
fn families_are_told_by_names_widths_and_metadata() {
    let file = |module: &str, inputs: usize| {
        File::default()
            .random(&format!("{module}.lora_down.weight"), &[1, inputs])
            .random(&format!("{module}.lora_up.weight"), &[2, 1])
    };
    for (file, family) in [
        (file("lora_unet_x_attn2_to_v", 768), Some(Family::Sd1)),
        (file("unet.x.attn2.to_v", 1024), Some(Family::Sd2)),
        (file("lora_unet_double_blocks_0_img_attn_qkv", 3072), Some(Family::Flux)),
        (file("transformer.single_transformer_blocks.0.attn.to_q", 3072), Some(Family::Flux)),
        (file("transformer.transformer_blocks.0.attn.to_q", 1536), Some(Family::Sd3)),
        (file("lora_unet_joint_blocks_0_x_block_attn_qkv", 1536), Some(Family::Sd3)),
        (file("lora_te1_text_model_encoder_layers_0_self_attn_q_proj", 768), Some(Family::Sd1)),
        (file("lora_te2_text_model_encoder_layers_0_self_attn_q_proj", 1280), Some(Family::Sdxl)),
        (file("lora_unet_x", 7), None),
        (file("lora_unet_x", 7).say("ss_base_model_version", "sdxl_base_v1-0"), Some(Family::Sdxl)),
        (file("lora_unet_x", 7).say("modelspec.architecture", "stable-diffusion-v1/lora"), Some(Family::Sd1)),
    ] {
        assert_eq!(file.open().unwrap().family_guess(), family, "{:?}", file.tensors.keys().next());
    }
}

#[test]
fn keys_repeated_with_default_count_once_and_may_not_differ() {
    let plain =
        File::default().random("unet.m.lora_A.weight", &[2, 5]).random("unet.m.lora_B.weight", &[6, 2]);
    let again =
        plain.clone().add("unet.m.lora_A.default.weight", plain.tensors["unet.m.lora_A.weight"].clone());
    let adapter = again.open().unwrap();
    assert_eq!((adapter.len(), adapter.dead_keys()), (1, &["unet.m.lora_A.weight".to_string()][..]));
    let other = plain.random("unet.m.lora_A.default.weight", &[2, 5]);
    let error = other.open().unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidArgument);
    assert!(error.message.contains("are the same factor"), "{error}");
}

#[test]
fn alpha_is_read_in_every_type_and_shape() {
    let base = weight();
    let one =
        merged(&base, &[6, 5], &[(&delta(&lora("m", 4).number("lora_unet_m.alpha", 1.0), "m.weight"), 1.0)]);
    let four = merged(&base, &[6, 5], &[(&delta(&lora("m", 4), "m.weight"), 1.0)]);
    assert_ne!(one, four);
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64, DType::I64] {
        for shape in [vec![], vec![1], vec![1, 1]] {
            for (alpha, expected) in [(1.0, &one), (4.0, &four), (0.0, &four)] {
                let tensor = Tensor { dtype, shape: shape.clone(), values: vec![alpha] };
                let delta = delta(&lora("m", 4).add("lora_unet_m.alpha", tensor), "m.weight");
                assert_eq!(
                    &merged(&base, &[6, 5], &[(&delta, 1.0)]),
                    expected,
                    "{alpha} as {dtype} {shape:?}"
                );
            }
        }
    }
    let pair = lora("m", 4).random("lora_unet_m.alpha", &[2]);
    assert!(matches!(reason(&pair), Reason::Unsupported(why) if why.contains("no number")));
}

#[test]
fn values_that_are_not_finite_are_an_error_that_names_the_tensor() {
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut file = lora("m", 4);
            let mut tensor = Random::new(1).tensor(dtype, &[6, 4]);
            tensor.values[17] = value;
            file.tensors.insert("lora_unet_m.lora_up.weight".into(), tensor);
            let error = file.open().unwrap_err();
            assert_eq!(error.code, ErrorCode::DataLoss);
            assert!(
                error.message.contains("\"lora_unet_m.lora_up.weight\" has values that are not finite"),
                "{error}"
            );
            assert!(error.file.is_some());
        }
    }
}

#[test]
fn kernels_of_one_fit_linear_layers_and_the_other_way_round() {
    let base = weight();
    let flat = lora("m", 2);
    let reshaped = |module: &str, kernel: &[usize]| {
        let mut file = File::default();
        for (key, tensor) in &flat.tensors {
            let shape = [&tensor.shape[..], kernel].concat();
            file = file
                .add(&key.replace("unet_m", &format!("unet_{module}")), Tensor { shape, ..tensor.clone() });
        }
        file
    };
    let expected = merged(&base, &[6, 5], &[(&delta(&flat, "m.weight"), 1.0)]);
    for (module, kernel, shape) in
        [("m", &[1, 1][..], &[6, 5][..]), ("one", &[], &[6, 5, 1, 1]), ("one", &[1, 1], &[6, 5, 1, 1])]
    {
        let delta = delta(&reshaped(module, kernel), &format!("{module}.weight"));
        assert_eq!(merged(&base, shape, &[(&delta, 1.0)]), expected, "{module} {kernel:?}");
    }
    let wide = reshaped("m", &[1, 1]).random("lora_unet_m.lora_down.weight", &[2, 5, 3, 3]);
    assert!(
        matches!(reason(&wide), Reason::Shape { adapter, target, .. } if adapter == [6, 5, 3, 3] && target == [6, 5])
    );
}

#[test]
fn a_then_b_then_a_is_a() {
    let (a, b) = (delta(&lora("m", 2), "m.weight"), delta(&lora("m", 3), "m.weight"));
    let base = weight();
    let first = merged(&base, &[6, 5], &[(&a, 0.7)]);
    assert_ne!(merged(&base, &[6, 5], &[(&b, 0.7)]), first);
    assert_eq!(merged(&base, &[6, 5], &[(&a, 0.7)]), first);
}

#[test]
fn identical_tensors_in_one_file_stay_apart() {
    let mut file = lora("m", 2);
    for slot in ["down", "up"] {
        let tensor = file.tensors[&format!("lora_unet_m.lora_{slot}.weight")].clone();
        file = file.add(&format!("lora_unet_one.lora_{slot}.weight"), tensor);
    }
    let resolution = file.open().unwrap().resolve(&network());
    assert_eq!(resolution.deltas.keys().collect::<Vec<_>>(), ["m.weight", "one.weight"]);
}

#[test]
fn biases_and_norms_are_changed_too() {
    let file = lora("m", 2)
        .random("lora_unet_m.diff_b", &[6])
        .random("lora_unet_n.w_norm", &[6])
        .random("lora_unet_n.b_norm", &[6]);
    let resolution = file.open().unwrap().resolve(&network());
    assert_eq!(resolution.deltas.keys().collect::<Vec<_>>(), ["m.bias", "m.weight", "n.bias", "n.weight"]);
    for (tensor, key) in [
        ("m.bias", "lora_unet_m.diff_b"),
        ("n.weight", "lora_unet_n.w_norm"),
        ("n.bias", "lora_unet_n.b_norm"),
    ] {
        let delta = &resolution.deltas[tensor][0];
        assert_eq!((delta.kind(), delta.is_additive()), (Kind::Diff, true));
        let out = merged(&[1.0; 6], &[6], &[(delta, 0.5)]);
        let expected: Vec<f32> = file.values(key).iter().map(|v| (1.0 + 0.5 * v) as f32).collect();
        assert_eq!(out, expected, "{tensor}");
    }
    // PEFT scales the bias of the up factor like the rest.
    let peft = File::default()
        .random("unet.m.lora_A.weight", &[4, 5])
        .random("unet.m.lora_B.weight", &[6, 4])
        .random("unet.m.lora_B.bias", &[6])
        .number("unet.m.alpha", 2.0);
    let out = merged(&[0.0; 6], &[6], &[(&delta(&peft, "m.bias"), 1.0)]);
    assert_eq!(out, peft.values("unet.m.lora_B.bias").iter().map(|v| (v / 2.0) as f32).collect::<Vec<_>>());
    let none = File::default().random("lora_unet_c.diff_b", &[4]);
    assert_eq!(reason(&none), Reason::NoBias);
}

#[test]
fn what_cannot_be_applied_says_why() {
    let file = |tensors: &[(&str, &[usize])]| {
        tensors.iter().fold(File::default(), |f, (key, shape)| f.random(key, shape))
    };
    for (file, words) in [
        (lora("gone", 2), "unknown module"),
        (file(&[("lora_unet_m.lora_up.weight", &[6, 2])]), "incomplete: the down factor is missing"),
        (file(&[("lora_unet_m.lora_down.weight", &[2, 5])]), "incomplete: the up factor is missing"),
        (file(&[("lora_unet_m.alpha", &[])]), "incomplete: it has no factors"),
        (
            file(&[("lora_unet_m.hada_w1_a", &[6, 2]), ("lora_unet_m.hada_w1_b", &[2, 5])]),
            "incomplete: a factor of LoHa",
        ),
        (file(&[("lora_unet_m.lokr_w1", &[6, 5])]), "incomplete: a factor of LoKr"),
        (file(&[("lora_unet_m.weight", &[6])]), "incomplete: IA3's on_input"),
        (file(&[("lora_unet_m.dora_scale", &[6, 1])]), "incomplete: DoRA's magnitudes have no LoRA"),
        (file(&[("lora_unet_m.oft_blocks", &[1, 3, 2, 2])]), "unsupported: BOFT"),
        (file(&[("unet.m.oft_R.default.weight", &[3, 3])]), "unsupported: OFT of PEFT"),
        (
            file(&[("lora_unet_m.oft_blocks", &[4, 2, 2])]),
            "made for shape [8, 0], but \"m.weight\" has [6, 5]",
        ),
        (
            file(&[("lora_unet_m.lora_down.weight", &[2, 5]), ("lora_unet_m.lora_up.weight", &[6, 3])]),
            "do not fit together",
        ),
        (lora("m", 2).random("lora_unet_m.dora_scale", &[4]), "made for shape [4]"),
        (file(&[("lora_unet_m.diff", &[5, 6])]), "made for shape [5, 6], but \"m.weight\" has [6, 5]"),
    ] {
        let reason = reason(&file).to_string();
        assert!(reason.contains(words), "{reason:?} without {words:?}");
    }
}

#[test]
fn strict_or_lenient() {
    let network = network();
    let adapter =
        lora("m", 2).random("lora_unet_gone.diff", &[1]).random("what.is.this", &[1]).open().unwrap();
    let resolution = adapter.resolve(&network);
    assert!(resolution.report.dead_keys.is_empty());
    check(&adapter, &[(&network, &resolution)], true).unwrap();
    let error = check(&adapter, &[(&network, &resolution)], false).unwrap_err();
    assert!(
        error.message.contains("not all of") && error.message.contains("lora_unet_gone: unknown module"),
        "{error}"
    );
    let nothing = lora("gone", 2).open().unwrap();
    let error = check(&nothing, &[(&network, &nothing.resolve(&network))], true).unwrap_err();
    assert!(error.message.contains("nothing of"), "{error}");
}

/// Tensors that another program would use in place of the model's own tensors change its results.
#[test]
fn whole_tensors_beside_an_adapter_are_refused_unless_lenient() {
    let network = network();
    let text = target(TextEncoder, &[("text_model.encoder.layers.0.mlp.fc1.weight", &[16, 8])], &[]);
    let tensor = |key: &str| lora("m", 2).random(key, &[6]).open().unwrap();
    for key in [
        "unet.n.weight",
        "n.bias",
        "base_model.model.unet.m.base_layer.bias",
        "base_model.model.n.modules_to_save.weight",
        "unet.nowhere.weight",
        "what.is.this",
        "lonely",
    ] {
        let adapter = tensor(key);
        let resolution = adapter.resolve(&network);
        assert_eq!(resolution.deltas.len(), 1, "{key}");
        check(&adapter, &[(&network, &resolution)], true).unwrap();
        let error = check(&adapter, &[(&network, &resolution)], false).unwrap_err();
        assert!(error.message.contains(&format!("; {key}: ")), "{error}");
    }
    let stray = tensor("unet.n.weight").resolve(&network).report.skipped[0].reason.to_string();
    assert_eq!(stray, "unsupported: a whole tensor in place of the model's");
    // Tensors for another component, or tensors known to have no effect.
    for key in
        ["text_encoder.final_layer_norm.weight", "unet.x.position_ids", "bundle_emb.word.string_to_param"]
    {
        let adapter = tensor(key);
        let resolution = adapter.resolve(&network);
        check(&adapter, &[(&network, &resolution)], false).unwrap();
    }
    let none = tensor("unet.n.weight").resolve(&text);
    assert!(none.report.skipped.iter().all(|s| s.reason == Reason::OtherComponent));
    let nothing = File::default().random("unet.n.weight", &[6]).open().unwrap_err();
    assert!(nothing.message.contains("is no adapter: none of its 1 keys"), "{nothing}");
}

#[test]
fn a_name_that_fits_two_modules_is_not_guessed() {
    let network = target(Denoiser, &[("a.b_c.weight", &[6, 5]), ("a_b.c.weight", &[6, 5])], &[]);
    let resolution = lora("a_b_c", 2).open().unwrap().resolve(&network);
    assert_eq!(resolution.report.skipped[0].reason, Reason::AmbiguousName);
    let dotted = File::default()
        .random("unet.a_b.c.lora_A.weight", &[2, 5])
        .random("unet.a_b.c.lora_B.weight", &[6, 2]);
    assert!(dotted.open().unwrap().resolve(&network).deltas.contains_key("a_b.c.weight"));
}

#[test]
fn files_that_are_no_adapters_are_refused() {
    let checkpoint = File::default().random("model.diffusion_model.out.2.weight", &[4, 4]);
    let error = checkpoint.open().unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidArgument);
    assert!(error.message.contains("is no adapter"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let error = Adapter::open(lora("m", 1).write(&folder, "lora.pt")).unwrap_err();
    assert_eq!(error.code, ErrorCode::Unimplemented);
    assert!(error.hint.unwrap().to_string().contains("safetensors"));
}

#[test]
fn merging_checks_what_it_is_given() {
    let delta = delta(&lora("m", 2), "m.weight");
    for strength in [f32::NAN, f32::INFINITY] {
        assert_eq!(Merge::new(&[6, 5], &[(&delta, strength)]).unwrap_err().code, ErrorCode::InvalidArgument);
    }
    for shape in [&[5, 6][..], &[6], &[], &[60, 5], &[6, 5, 2]] {
        assert!(Merge::new(shape, &[(&delta, 1.0)]).is_err(), "{shape:?}");
    }
    let merge = Merge::new(&[6, 5], &[(&delta, 1e6)]).unwrap();
    let base = bytes(DType::F32, &[0.0; 30]);
    let error = merge.tensor((DType::F32, &base), (DType::F16, &mut [0; 60])).unwrap_err();
    assert_eq!(error.code, ErrorCode::OutOfRange);
    assert!(!merge.surely_fits(DType::F32, DType::F16, || largest(&base, DType::F32)));
    let mut out = [0; 120];
    for (rows, from, length) in [(0..7, DType::F32, 120), (0..6, DType::F32, 119), (0..6, DType::F16, 120)] {
        assert!(merge.rows(rows, (from, &base[..length]), (DType::F32, &mut out)).is_err());
    }
    let error = merge.tensor((DType::I32, &base), (DType::F32, &mut out)).unwrap_err();
    assert_eq!(error.code, ErrorCode::Unimplemented);
    let oft = File::default().random("lora_unet_m.oft_blocks", &[3, 2, 2]);
    let merge = Merge::new(&[6, 5], &[(&self::delta(&oft, "m.weight"), 1.0)]).unwrap();
    let error = merge.rows(0..2, (DType::F32, &base[..40]), (DType::F32, &mut out[..40])).unwrap_err();
    assert_eq!(error.code, ErrorCode::FailedPrecondition);
}

/// Without any deltas, bytes are copied and types are converted only once.
#[test]
fn nothing_to_merge_is_a_copy() {
    let plain = Merge::new(&[6, 5], &[]).unwrap();
    let base: Vec<u8> = (0..60).collect();
    let mut out = vec![0; 60];
    plain.tensor((DType::F16, &base), (DType::F16, &mut out)).unwrap();
    assert_eq!(out, base);
}
