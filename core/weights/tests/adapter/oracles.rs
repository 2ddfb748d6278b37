//! Files in the formats of kohya, LyCORIS, PEFT and diffusers with the weights that those programs merged
//! (bit-for-bit equal to diffusers' `fuse_lora`, to LyCORIS' functions, or to PEFT, see their notes), on the small
//! pipelines of `SDRUN_TINY_DIR`.

use crate::fixtures::merged;
use flate2::read::GzDecoder;
use sdrun_abi::{DType, WeightSource};
use sdrun_weights::{
    Component, SafetensorsWeights,
    adapter::{Adapter, Kind, Reason, Resolution, Target, check},
    keys::{Fusion, KeyPair},
    synthetic,
};
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
};

/// The folder, or a loud word that the test did not run.
fn tiny() -> Option<PathBuf> {
    let folder = std::env::var_os("SDRUN_TINY_DIR").map(PathBuf::from);
    if folder.is_none() {
        say("SDRUN_TINY_DIR is not set, so adapters were not compared with other programs");
    }
    folder
}

/// Past the test harness, which swallows what passing tests print.
fn say(why: &str) {
    let mut stderr = std::io::stderr();
    writeln!(stderr, "NOT RUN: {why}").unwrap();
}

/// The tables of full-size models beside it.
pub(crate) fn tables() -> Option<PathBuf> {
    let tables = tiny()?.join("../tables");
    if !tables.is_dir() {
        say(&format!("{} does not exist", tables.display()));
        return None;
    }
    Some(tables)
}

#[derive(Deserialize)]
struct Entry {
    op: String,
    src: Vec<String>,
}

#[derive(Deserialize)]
struct Table {
    #[serde(alias = "tensors")]
    table: BTreeMap<String, Entry>,
}

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

pub(crate) fn unzipped(path: &Path) -> String {
    let mut text = String::new();
    GzDecoder::new(fs::File::open(path).unwrap()).read_to_string(&mut text).unwrap();
    text
}

fn pairs(table: BTreeMap<String, Entry>) -> Vec<KeyPair> {
    let prefixes = ["model.diffusion_model.", "first_stage_model.", "cond_stage_model."];
    table
        .into_iter()
        .map(|(key, entry)| KeyPair {
            original: prefixes.iter().find_map(|p| key.strip_prefix(p)).unwrap_or(&key).to_owned(),
            diffusers: entry.src,
            fusion: match &*entry.op {
                "id" => Fusion::Same,
                "conv1x1" => Fusion::Conv1x1,
                "t" => Fusion::Transposed,
                "cat0" => Fusion::Rows,
                "swap" => Fusion::SwappedHalves,
                other => panic!("{other}"),
            },
        })
        .collect()
}

/// A component of a small pipeline: its target and the tag of its weights.
fn component(folder: &Path, pipeline: &str, name: &str) -> (Target, String) {
    let map = folder.join(pipeline).join("onnx").join(name).join("map.json");
    let map: Map = serde_json::from_slice(&fs::read(map).unwrap()).unwrap();
    let tensors: BTreeMap<String, Vec<usize>> =
        map.tensors.into_iter().map(|t| (t.src, t.src_shape)).collect();
    let tables = unzipped(&folder.join(pipeline).join("single_file/key_table.json.gz"));
    let mut tables: BTreeMap<String, Table> = serde_json::from_str(&tables).unwrap();
    let kind = match name {
        "text_encoder" => Component::TextEncoder,
        "text_encoder_2" => Component::TextEncoder2,
        "text_encoder_3" => Component::TextEncoder3,
        _ => Component::Denoiser,
    };
    let pairs = tables.remove(name).map(|t| pairs(t.table)).unwrap_or_default();
    assert!(kind != Component::Denoiser || !pairs.is_empty(), "{pipeline} {name}");
    (Target::new(kind, tensors, &pairs), map.tag)
}

fn base(tag: &str, name: &str, shape: &[usize]) -> Vec<f32> {
    let mut bytes = vec![0; 4 * shape.iter().product::<usize>()];
    synthetic::fill(tag, name, shape, DType::F32, &mut bytes).unwrap();
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Merges all tensors the oracle of an adapter has, and compares. Gives the resolutions.
fn compare(
    folder: &Path,
    pipeline: &str,
    adapter: &str,
    components: &[&str],
    tolerance: f32,
) -> (Adapter, Vec<Resolution>) {
    let path = folder.join(pipeline).join("lora").join(adapter);
    let file = Adapter::open(path.with_extension("safetensors")).unwrap();
    let oracle = SafetensorsWeights::open(&[path.with_extension("oracle.safetensors")]).unwrap();
    let (mut resolutions, mut compared, mut targets) = (Vec::new(), 0, Vec::new());
    for name in components {
        let (target, tag) = component(folder, pipeline, name);
        let resolution = file.resolve(&target);
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
    // Every module is applied somewhere, and only there.
    let applied: usize = resolutions.iter().map(|r| r.report.applied.len()).sum();
    assert_eq!(applied, file.len(), "{adapter}");
    (file, resolutions)
}

/// f32 rounding of weights up to 2 in magnitude, added up in another order.
const CLOSE: f32 = 1e-6;

#[test]
fn sd_adapters_equal_their_oracles() {
    let Some(folder) = tiny() else { return };
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
        let (file, _) = compare(&folder, "sd", adapter, components, CLOSE);
        assert!(file.kinds().contains_key(&kind), "{adapter}: {:?}", file.kinds());
        assert!(file.dead_keys().is_empty(), "{adapter}: {:?}", file.dead_keys());
    }
}

#[test]
fn sdxl_sd3_and_flux_adapters_equal_their_oracles() {
    let Some(folder) = tiny() else { return };
    let all = ["unet", "text_encoder", "text_encoder_2"];
    compare(&folder, "sdxl", "kohya_diffusers_names", &all, CLOSE);
    compare(&folder, "sd3", "peft", &["transformer"], CLOSE);
    compare(&folder, "flux", "peft", &["transformer"], CLOSE);
    let (_, fused) = compare(&folder, "flux", "kohya_fused", &["transformer"], CLOSE);
    let splits = fused[0].report.applied.iter().map(|a| a.tensors.len()).max();
    assert_eq!(splits, Some(4), "q, k, v and MLP of a single block");
}

#[test]
fn an_adapter_of_another_architecture_is_told() {
    let Some(folder) = tiny() else { return };
    let file = Adapter::open(folder.join("sdxl/lora/kohya_diffusers_names.safetensors")).unwrap();
    let (target, _) = component(&folder, "flux", "transformer");
    let resolution = file.resolve(&target);
    assert!(resolution.deltas.is_empty());
    let reasons = |r: &Reason| matches!(r, Reason::UnknownModule | Reason::OtherComponent);
    assert!(resolution.report.skipped.iter().all(|s| reasons(&s.reason)));
    let error = check(&file, &[(&target, &resolution)], true).unwrap_err();
    assert!(error.message.ends_with("is made for SDXL, but the engine is Flux"), "{error}");
}

/// All modules of the full-size UNets under both of kohya's spellings.
#[test]
fn every_kohya_name_of_full_size_unets_resolves() {
    let Some(tables) = tables() else { return };
    for model in ["sd15", "sdxl"] {
        let table: Table =
            serde_json::from_str(&unzipped(&tables.join(format!("{model}_unet.json.gz")))).unwrap();
        let rows = unzipped(&tables.join(format!("kohya_{model}_unet.tsv.gz")));
        let rows: Vec<Vec<&str>> =
            rows.lines().filter(|l| !l.starts_with('#')).map(|l| l.split('\t').collect()).collect();
        let shape = |row: &[&str]| row[3].split('x').map(|n| n.parse().unwrap()).collect::<Vec<usize>>();
        let tensors = rows.iter().map(|row| (format!("{}.weight", row[0]), shape(row)));
        let target = Target::new(Component::Denoiser, tensors, &pairs(table.table));
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
