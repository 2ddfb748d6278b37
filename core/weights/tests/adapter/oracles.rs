//! Files in the formats of kohya, LyCORIS, PEFT and diffusers, with the weights that those programs merged, on the
//! small pipelines of `sdrun-tiny`. The weights are bit-for-bit equal to diffusers' `fuse_lora`, LyCORIS' functions
//! or PEFT; see their notes.

use crate::{
    common::tables::{table, table_files, unpacked},
    fixtures::merged,
};
use sdrun_abi::{DType, WeightSource};
use sdrun_weights::{
    Component, SafetensorsWeights,
    adapter::{Adapter, DoraRule, Kind, Reason, Resolution, Target, check},
    synthetic,
};
use serde::Deserialize;
use std::{collections::BTreeMap, fs};

/// The weights of a graph.
#[derive(Deserialize)]
struct Map {
    tag: String,
    tensors: Vec<Mapped>,
}

#[derive(Deserialize)]
struct Mapped {
    src: String,
    src_shape: Vec<usize>,
}

/// A component of a small pipeline: its target and the tag of its weights.
fn component(pipeline: &str, name: &str) -> (Target, String) {
    let map = sdrun_tiny::folder().join(pipeline).join("onnx").join(name).join("map.json");
    let map: Map = serde_json::from_slice(&fs::read(map).unwrap()).unwrap();
    let tensors: BTreeMap<String, Vec<usize>> =
        map.tensors.into_iter().map(|t| (t.src, t.src_shape)).collect();
    let kind = match name {
        "text_encoder" => Component::TextEncoder,
        "text_encoder_2" => Component::TextEncoder2,
        "text_encoder_3" => Component::TextEncoder3,
        _ => Component::Denoiser,
    };
    // Flux's text encoder has no original names.
    let table = table_files().into_iter().find(|entry| entry.name == format!("tiny_{pipeline}/{name}"));
    let pairs = table.map(|entry| entry.pairs).unwrap_or_default();
    assert!(kind != Component::Denoiser || !pairs.is_empty(), "{pipeline} {name}");
    (Target::new(kind, tensors, &pairs), map.tag)
}

fn base(tag: &str, name: &str, shape: &[usize]) -> Vec<f32> {
    let mut bytes = vec![0; 4 * shape.iter().product::<usize>()];
    synthetic::fill(tag, name, shape, DType::F32, &mut bytes).unwrap();
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Merges all tensors in an adapter's oracle and compares them. Returns the adapter and the resolutions.
fn compare(pipeline: &str, adapter: &str, components: &[&str], tolerance: f32) -> (Adapter, Vec<Resolution>) {
    let path = sdrun_tiny::folder().join(pipeline).join("lora").join(adapter);
    let file = Adapter::open(path.with_extension("safetensors")).unwrap();
    let oracle = SafetensorsWeights::open(&[path.with_extension("oracle.safetensors")]).unwrap();
    let (mut resolutions, mut compared, mut targets) = (Vec::new(), 0, Vec::new());
    for name in components {
        let (target, tag) = component(pipeline, name);
        // diffusers wrote the oracles. It follows PEFT's rule for every spelling.
        let resolution = file.resolve_with(&target, Some(DoraRule::Peft));
        for key in oracle.names() {
            let Some((strength, tensor)) =
                key.strip_prefix("out.weightA@").and_then(|k| k.split_once(&format!(".{name}.")))
            else {
                continue;
            };
            let strength: f32 = strength.parse().unwrap();
            let expected = oracle.get(key).unwrap();
            let deltas = resolution.deltas.get(tensor).unwrap_or_else(|| panic!("{adapter}: no {tensor}"));
            let deltas: Vec<_> = deltas.iter().map(|d| (d, strength)).collect();
            let base = base(&tag, tensor, &expected.shape);
            let out = merged(&base, &expected.shape, &deltas);
            assert_ne!(out, base, "{adapter} {key}");
            let expected = expected.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
            let worst = out.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(worst <= tolerance, "{adapter} {key}: off by {worst:e}");
            compared += 1;
        }
        resolutions.push(resolution);
        targets.push(target);
    }
    assert!(compared > 0, "{adapter}");
    let resolved: Vec<_> = targets.iter().zip(&resolutions).collect();
    check(&file, &resolved, false).unwrap();
    // Each module must be applied to exactly one component.
    let applied: usize = resolutions.iter().map(|r| r.report.applied.len()).sum();
    assert_eq!(applied, file.len(), "{adapter}");
    (file, resolutions)
}

/// f32 rounding of weights of magnitude up to 2, summed in a different order.
const CLOSE: f32 = 1e-6;

#[test]
fn sd_adapters_equal_their_oracles() {
    let both = ["unet", "text_encoder"];
    for (adapter, kind, components) in [
        ("kohya", Kind::Lora, &both[..]),
        ("peft", Kind::Lora, &both),
        ("diffusers_old", Kind::Lora, &both[..1]),
        ("locon", Kind::Lora, &both[..1]),
        ("loha", Kind::Loha, &both[..1]),
        ("lokr", Kind::Lokr, &both[..1]),
        ("dora", Kind::Lora, &both[..1]),
        ("full_diff", Kind::Diff, &both[..1]),
    ] {
        let (file, _) = compare("sd", adapter, components, CLOSE);
        assert!(file.kinds().contains_key(&kind), "{adapter}: {:?}", file.kinds());
        assert!(file.dead_keys().is_empty(), "{adapter}: {:?}", file.dead_keys());
    }
}

#[test]
fn sdxl_sd3_and_flux_adapters_equal_their_oracles() {
    let all = ["unet", "text_encoder", "text_encoder_2"];
    compare("sdxl", "kohya_diffusers_names", &all, CLOSE);
    compare("sd3", "peft", &["transformer"], CLOSE);
    compare("flux", "peft", &["transformer"], CLOSE);
    let (_, fused) = compare("flux", "kohya_fused", &["transformer"], CLOSE);
    let splits = fused[0].report.applied.iter().map(|a| a.tensors.len()).max();
    assert_eq!(splits, Some(4), "q, k, v and MLP of a single block");
}

#[test]
fn an_adapter_of_another_architecture_is_told() {
    let file =
        Adapter::open(sdrun_tiny::folder().join("sdxl/lora/kohya_diffusers_names.safetensors")).unwrap();
    let (target, _) = component("flux", "transformer");
    let resolution = file.resolve(&target);
    assert!(resolution.deltas.is_empty());
    let reasons = |r: &Reason| matches!(r, Reason::UnknownModule | Reason::OtherComponent);
    assert!(resolution.report.skipped.iter().all(|s| reasons(&s.reason)));
    let error = check(&file, &[(&target, &resolution)], true).unwrap_err();
    assert!(error.message.ends_with("is made for SDXL, but the engine is Flux"), "{error}");
}

/// All modules of the full-size UNets in both of kohya's spellings.
#[test]
fn every_kohya_name_of_full_size_unets_resolves() {
    for model in ["sd15", "sdxl"] {
        let entry = table(&format!("{model}_unet"));
        let rows = unpacked(&format!("kohya_{model}_unet.tsv.gz"));
        let rows: Vec<Vec<&str>> =
            rows.lines().filter(|l| !l.starts_with('#')).map(|l| l.split('\t').collect()).collect();
        let shape = |row: &[&str]| row[3].split('x').map(|n| n.parse().unwrap()).collect::<Vec<usize>>();
        let tensors = rows.iter().map(|row| (format!("{}.weight", row[0]), shape(row)));
        let target = Target::new(Component::Denoiser, tensors, &entry.pairs);
        for spelling in [1, 2] {
            let mut file = crate::fixtures::File::default();
            for row in &rows {
                let shape = shape(row);
                let down: Vec<usize> = [&[1], &shape[1..]].concat();
                file = file.random(&format!("{}.lora_down.weight", row[spelling]), &down);
                file = file.random(&format!("{}.lora_up.weight", row[spelling]), &[shape[0], 1]);
            }
            let resolution = file.open().unwrap().resolve(&target);
            assert_eq!(resolution.report.skipped, [], "{model} {spelling}");
            assert_eq!(resolution.deltas.len(), rows.len(), "{model} {spelling}");
            for row in &rows {
                let deltas = &resolution.deltas[&format!("{}.weight", row[0])];
                assert_eq!(deltas.iter().map(|d| d.module()).collect::<Vec<_>>(), [row[spelling]]);
            }
        }
    }
}
