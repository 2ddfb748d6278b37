//! Compares adapters that PEFT saved with the weights that PEFT merges, and DoRA by ComfyUI's rule with its formula
//! in f64. `tools/adapters/oracle.py` creates the files.

use crate::fixtures::{File, merged, target};
use sdrun_abi::{DType, ErrorCode, WeightSource};
use sdrun_weights::{
    Component, SafetensorsWeights,
    adapter::{Adapter, DoraRule, Merge, Report, Target, check},
};
use std::{
    fs,
    path::{Path, PathBuf},
};

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/peft")
}

fn f64s(weights: &SafetensorsWeights, name: &str) -> (Vec<f64>, Vec<usize>) {
    let weight = weights.get(name).unwrap();
    let values = match weight.dtype {
        DType::F64 => weight.data().as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        _ => weight.data().as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
    };
    (values, weight.shape.clone())
}

fn base() -> SafetensorsWeights {
    SafetensorsWeights::open(&[data().join("base.safetensors")]).unwrap()
}

fn network(base: &SafetensorsWeights) -> Target {
    let tensors: Vec<(String, Vec<usize>)> =
        base.names().into_iter().map(|name| (name.to_owned(), base.describe(name).unwrap().1)).collect();
    let tensors: Vec<(&str, &[usize])> =
        tensors.iter().map(|(name, shape)| (name.as_str(), &**shape)).collect();
    target(Component::Denoiser, &tensors, &[])
}

/// Compares every tensor of the oracle at every strength. Returns the number of tensors that the adapter changes, and
/// the report.
fn compare(adapter: &Adapter, dora: Option<DoraRule>, oracle: &Path) -> (usize, Report) {
    let base = base();
    let resolution = adapter.resolve_with(&network(&base), dora);
    let oracle = SafetensorsWeights::open(&[oracle]).unwrap();
    assert!(oracle.names().len() >= 8);
    for key in oracle.names() {
        let (strength, name) = key.split_once(':').unwrap();
        let strength: f32 = strength.parse().unwrap();
        let (values, shape) = f64s(&base, name);
        let values: Vec<f32> = values.iter().map(|v| *v as f32).collect();
        let deltas: Vec<_> =
            resolution.deltas.get(name).into_iter().flatten().map(|d| (d, strength)).collect();
        let out = merged(&values, &shape, &deltas);
        for (i, (out, expected)) in out.iter().zip(f64s(&oracle, key).0).enumerate() {
            // Sums of a few products of numbers below 10, in f32.
            let off = (f64::from(*out) - expected).abs();
            assert!(off <= 4e-6 * expected.abs().max(1.0), "{key} {i}: {out} instead of {expected}");
        }
    }
    (resolution.deltas.len(), resolution.report)
}

#[test]
fn folders_of_peft_equal_what_peft_merges() {
    for (case, changed, skipped) in [
        ("plain", 7, 0),
        ("rslora", 7, 0),
        ("dora", 7, 0),
        ("patterns", 7, 0),
        ("lora_bias", 14, 0),
        ("loha", 6, 0),
        ("lokr", 6, 0),
        // Here the saved tensors equal those of the base. They are reported.
        ("bias", 7, 7),
    ] {
        let adapter = Adapter::open(data().join(case)).unwrap();
        let (count, report) = compare(&adapter, None, &data().join(case).join("merged.safetensors"));
        assert_eq!((count, report.skipped.len()), (changed, skipped), "{case}: {:?}", report.skipped);
        let rule = (case == "dora").then_some(DoraRule::Peft);
        assert!(report.applied.iter().all(|module| module.dora == rule), "{case}");
    }
}

/// Weights that PEFT would use in place of the model's own are an error, unless lenient.
#[test]
fn modules_to_save_are_not_dropped_in_silence() {
    let adapter = Adapter::open(data().join("modules_to_save")).unwrap();
    let network = network(&base());
    let resolution = adapter.resolve(&network);
    check(&adapter, &[(&network, &resolution)], true).unwrap();
    let error = check(&adapter, &[(&network, &resolution)], false).unwrap_err();
    assert!(
        error.message.contains("norm.bias: unsupported: a whole tensor in place of the model's"),
        "{error}"
    );
}

/// A configuration next to a file applies only if it belongs to that file.
#[test]
fn the_configuration_is_found_beside_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let (plain, oracle) = (data().join("plain"), data().join("plain/merged.safetensors"));
    let copy = |from: &str, to: &str| fs::copy(plain.join(from), folder.path().join(to)).unwrap();
    copy("adapter_config.json", "adapter_config.json");
    copy("adapter_model.safetensors", "style.safetensors");
    compare(&Adapter::open(folder.path().join("style.safetensors")).unwrap(), None, &oracle);
    // With two files the configuration could belong to either. Only the name that PEFT itself uses decides.
    copy("adapter_model.safetensors", "adapter_model.safetensors");
    compare(&Adapter::open(folder.path().join("adapter_model.safetensors")).unwrap(), None, &oracle);
    let alone = Adapter::open(folder.path().join("style.safetensors")).unwrap();
    let network = network(&base());
    let differs = |adapter: &Adapter| {
        let resolution = adapter.resolve(&network);
        merged(&[0.0; 30], &[6, 5], &[(&resolution.deltas["blocks.0.to_q.weight"][0], 1.0)])
    };
    assert_ne!(differs(&alone), differs(&Adapter::open(&plain).unwrap()));

    let empty = tempfile::tempdir().unwrap();
    assert_eq!(Adapter::open(empty.path()).unwrap_err().code, ErrorCode::NotFound);
    for (text, code, words) in [
        (r#"{"peft_type": "VERA"}"#, ErrorCode::Unimplemented, "type VERA"),
        ("[]", ErrorCode::InvalidArgument, "no JSON object"),
    ] {
        fs::write(folder.path().join("adapter_config.json"), text).unwrap();
        let error = Adapter::open(folder.path()).unwrap_err();
        assert!(error.code == code && error.message.contains(words), "{error}");
        assert!(error.file.unwrap().ends_with("adapter_config.json"));
    }
}

#[test]
fn factors_that_contradict_the_configuration_are_a_fault() {
    let lora = |rank: usize| {
        File::default()
            .random("base_model.model.blocks.0.to_q.lora_A.weight", &[rank, 5])
            .random("base_model.model.blocks.0.to_q.lora_B.weight", &[6, rank])
    };
    let network = network(&base());
    for (text, words) in [
        (r#"{"transformer.r": 4, "transformer.lora_alpha": 4}"#, None),
        (r#"{"unet.r": 8}"#, Some("factors of rank 4, while the adapter's configuration says 8")),
        (r#"{"unet.r": 4, "unet.use_dora": true}"#, Some("DoRA's magnitudes are missing")),
    ] {
        let file = lora(4).say("lora_adapter_metadata", text);
        let tensors =
            file.tensors.into_iter().map(|(key, t)| (key.replace("model.blocks", "model.unet.blocks"), t));
        let file = File { tensors: tensors.collect(), metadata: file.metadata };
        let report = file.open().unwrap().resolve(&network).report;
        let why = report.skipped.first().map(|skipped| skipped.reason.to_string());
        assert!(why.as_deref().unwrap_or_default().contains(words.unwrap_or_default()), "{why:?}");
        assert_eq!(why.is_some(), words.is_some(), "{text}");
    }
}

#[test]
fn dora_in_kohyas_names_follows_comfyui() {
    let adapter = Adapter::open(data().join("comfyui.safetensors")).unwrap();
    let oracle = data().join("comfyui_merged.safetensors");
    for dora in [None, Some(DoraRule::ComfyUi)] {
        let (changed, report) = compare(&adapter, dora, &oracle);
        let rules = report.applied.iter().filter(|module| module.dora == Some(DoraRule::ComfyUi)).count();
        assert_eq!((changed, rules, report.skipped.len()), (4, 3, 0));
    }
    let resolved = |rule| adapter.resolve_with(&network(&base()), Some(rule)).deltas;
    let (peft, comfyui) = (resolved(DoraRule::Peft), resolved(DoraRule::ComfyUi));
    for (name, at_one) in
        [("blocks.0.to_q.weight", false), ("blocks.0.to_k.weight", true), ("conv.weight", false)]
    {
        let (values, shape) = f64s(&base(), name);
        let values: Vec<f32> = values.iter().map(|v| *v as f32).collect();
        let far = |s: f32| {
            let [one, two] =
                [&peft, &comfyui].map(|deltas| merged(&values, &shape, &[(&deltas[name][0], s)]));
            one.iter().zip(two).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max)
        };
        // Magnitudes per input: both rules agree at strength 1 and differ elsewhere.
        assert_eq!(far(1.0) < 1e-5, at_one, "{name}");
        assert!(far(0.5) > 1e-2, "{name}");
        // With both rules, strength 0 changes no bit. Near 0, PEFT's rule is discontinuous and ComfyUI's is not.
        for deltas in [&peft, &comfyui] {
            let zero = Merge::new(&shape, &[(&deltas[name][0], 0.0)]).unwrap();
            assert!(zero.is_identity());
        }
        let near = |deltas: &std::collections::BTreeMap<String, Vec<_>>| {
            let out = merged(&values, &shape, &[(&deltas[name][0], 1e-6)]);
            out.iter().zip(&values).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max)
        };
        assert!(near(&comfyui) < 1e-5 && near(&peft) > 1e-2, "{name}");
    }
}
