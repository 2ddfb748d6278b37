//! GGUF checkpoints: plain and quantised tensors under the original keys, and damaged files.

#![allow(clippy::unwrap_used)]

mod common;

use common::{
    gguf::{Meta, bytes, elements, random},
    make::{Made, borrowed, check, original, write_safetensors},
    tables::table,
};
use proptest::prelude::*;
use sdrun_abi::{DType, ErrorCode, Result, WeightSource, WeightSpec};
use sdrun_weights::{
    Adapter, AdapterUse, Binding, BoundTensor, Cast, Checkpoint, Component, Transform, WeightStack,
    checkpoint::{Family, Format, Vocabulary},
    keys::Fusion,
};
use std::{collections::BTreeMap, fs};

fn open(bytes: &[u8]) -> (tempfile::TempDir, Result<Checkpoint>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    fs::write(&path, bytes).unwrap();
    let opened = Checkpoint::open(path);
    (folder, opened)
}
const KINDS: [&str; 12] =
    ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"];

#[test]
fn plain_tensors_are_borrowed() {
    for (version, dtype) in [(2, DType::F32), (3, DType::F16), (3, DType::BF16)] {
        let entries = [table("sd15_unet"), table("sd15_vae"), table("sd15_text_encoder")];
        let tensors: Vec<Made> =
            entries.iter().flat_map(|entry| original(entry, entry.prefix, dtype)).collect();
        let metadata = [
            ("general.architecture", Meta::Text("sd1")),
            ("tokenizer.ggml.tokens", Meta::Words(vec!["a", "b"])),
            ("general.alignment", Meta::Number(64)),
        ];
        let (_folder, checkpoint) = open(&bytes(version, &metadata, &tensors));
        let checkpoint = checkpoint.unwrap();
        let parts = [Component::Denoiser, Component::Vae, Component::TextEncoder];
        for (part, entry) in parts.into_iter().zip(&entries) {
            let state = checkpoint.component(part).unwrap();
            check(&*state, entry, dtype);
            assert_eq!(borrowed(&*state), state.names().len());
        }
        let summary = checkpoint.summary();
        assert_eq!((summary.format, summary.family), (Format::Gguf, Some(Family::Sd1)));
        assert_eq!(summary.metadata["general.architecture"], "sd1");
        assert!(!summary.metadata.contains_key("tokenizer.ggml.tokens"));
    }
}

/// The vocabulary of a T5, in the metadata of GGUF or as a tensor.
#[test]
fn vocabularies_are_found() {
    let tensors = original(&table("sd15_vae"), "first_stage_model.", DType::F16);
    let words = vec!["<pad>", "</s>", "<unk>", "▁a", "b", "▁", "c", "d", "e"];
    let metadata = [
        ("tokenizer.ggml.tokens", Meta::Words(words.clone())),
        ("tokenizer.ggml.scores", Meta::Floats(vec![0.0, 0.0, 0.0, -1.5, -2.0, -2.5, -3.0, -3.5, -4.25])),
        ("tokenizer.ggml.token_type", Meta::Shape(vec![3, 3, 2, 1, 1, 1, 1, 1, 1])),
        ("tokenizer.ggml.add_space_prefix", Meta::Bool(true)),
    ];
    let (_folder, checkpoint) = open(&bytes(3, &metadata, &tensors));
    let expected = Vocabulary::Pieces {
        texts: words.iter().map(|word| word.to_string()).collect(),
        scores: vec![0.0, 0.0, 0.0, -1.5, -2.0, -2.5, -3.0, -3.5, -4.25],
        kinds: vec![3, 3, 2, 1, 1, 1, 1, 1, 1],
        charsmap: Vec::new(),
        space_prefix: true,
        collapse_spaces: false,
    };
    assert_eq!(checkpoint.unwrap().vocabulary().unwrap(), Some(expected));
    let (_folder, without) = open(&bytes(3, &metadata[1..], &tensors));
    assert_eq!(without.unwrap().vocabulary().unwrap(), None);
}

/// A narrow Flux with one block of each kind. All wide matrices are quantised, in every type.
#[test]
fn quantised_blocks_have_the_values_of_the_format() {
    let mut flux = table("flux_dev").only(|key| !key.contains("_blocks.") || key.contains("_blocks.0."));
    flux.divisor = 12;
    for kind in KINDS {
        let mut expected: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        let mut tensors = original(&flux, "", DType::F16);
        for (seed, tensor) in tensors.iter_mut().enumerate() {
            if matches!(tensor.shape[..], [_, columns] if columns % 256 == 0) {
                *tensor = random(&tensor.name, kind, &tensor.shape, seed as u64);
                expected.insert(tensor.name.clone(), elements(tensor));
            }
        }
        assert!(expected.len() > 15);
        let (_folder, checkpoint) = open(&bytes(3, &[], &tensors));
        let checkpoint = checkpoint.unwrap();
        let state = checkpoint.component(Component::Denoiser).unwrap();
        for pair in flux.pairs.iter().filter(|pair| expected.contains_key(&pair.original)) {
            let mut values = expected[&pair.original].clone();
            if pair.fusion == Fusion::SwappedHalves {
                let half = values.len() / 2;
                values.rotate_left(half);
            }
            let mut got = Vec::new();
            for name in &pair.diffusers {
                let weight = state.get(name).unwrap();
                assert_eq!(state.describe(name).unwrap(), (weight.dtype, weight.shape.clone()));
                assert_eq!((weight.dtype, weight.shape[1] % 256), (DType::F32, 0));
                got.extend(weight.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
            }
            let same =
                got.iter().zip(&values).all(|(a, b)| a.to_bits() == b.to_bits() || (*a == 0.0 && *b == 0.0));
            assert!(same && got.len() == values.len(), "{kind} {}", pair.original);

            // The blocks as stored in the file, fused or not. Rearranged tensors have no blocks.
            let file = tensors.iter().find(|tensor| tensor.name == pair.original).unwrap();
            let mut blocks = Vec::new();
            for name in &pair.diffusers {
                let other: Vec<&str> = KINDS.into_iter().filter(|other| *other != kind).collect();
                assert!(state.encoded(name, &other).unwrap().is_none());
                let Some(weight) = state.encoded(name, &KINDS).unwrap() else { continue };
                assert_eq!((&*weight.encoding, &weight.shape), (kind, &state.describe(name).unwrap().1));
                let (path, offset) = weight.file.as_ref().unwrap();
                assert_eq!(
                    fs::read(path).unwrap()[*offset as usize..][..weight.data().len()],
                    *weight.data()
                );
                blocks.extend_from_slice(weight.data());
            }
            let held: &[u8] = if pair.fusion == Fusion::SwappedHalves { &[] } else { &file.data };
            assert!(blocks == held, "{kind} {}", pair.original);
        }
        let mlp = state.get("single_transformer_blocks.0.proj_mlp.weight").unwrap();
        assert_eq!(mlp.shape, [1024, 256]);
        let summary = &checkpoint.summary().components[0];
        assert_eq!(summary.dtypes[kind], expected.len());
    }
}

/// Blocks reach a graph through a stack and a cast, but only for whole tensors and their transposes that nothing
/// changes.
#[test]
fn stacks_pass_blocks_on() {
    const QUERY: &str = "transformer_blocks.0.attn.to_q.weight";
    const KEY: &str = "transformer_blocks.0.attn.to_k.weight";
    const NORM: &str = "transformer_blocks.0.attn.norm_q.weight";
    let mut flux = table("flux_dev").only(|key| !key.contains("_blocks.") || key.contains("_blocks.0."));
    flux.divisor = 12;
    let mut tensors = original(&flux, "", DType::F16);
    let fused = tensors.iter_mut().find(|made| made.name == "double_blocks.0.img_attn.qkv.weight").unwrap();
    assert_eq!(fused.shape, [768, 256]);
    *fused = random(&fused.name, "q4_k", &fused.shape, 7);
    let blocks = fused.data.clone();
    let (folder, checkpoint) = open(&bytes(3, &[], &tensors));
    let checkpoint = checkpoint.unwrap();

    let bound = |name: &str, sources: &[&str], transform, from: &[usize], to: &[usize]| BoundTensor {
        name: name.into(),
        sources: sources.iter().map(ToString::to_string).collect(),
        transform,
        source_shape: from.to_vec(),
        shape: to.to_vec(),
        dtype: DType::F16,
    };
    let square = [256, 256];
    let binding = Binding {
        component: Some(Component::Denoiser),
        tensors: vec![
            bound("plain", &[KEY], Transform::Identity, &square, &square),
            bound("transposed", &[KEY], Transform::Transpose, &square, &square),
            bound("convolution", &[KEY], Transform::Reshape, &square, &[256, 256, 1, 1]),
            bound("fused", &[QUERY, KEY], Transform::Identity, &[512, 256], &[512, 256]),
            bound("query", &[QUERY], Transform::Identity, &square, &square),
            bound("norm", &[NORM], Transform::Identity, &[128 / 12], &[128 / 12]),
        ],
    };
    let specs: Vec<WeightSpec> = binding
        .tensors
        .iter()
        .map(|bound| WeightSpec { name: bound.name.clone(), dtype: bound.dtype, shape: bound.shape.clone() })
        .collect();
    let state = || checkpoint.component(Component::Denoiser).unwrap();
    let stack = WeightStack::of_state_dict(binding, state());
    let third = |index: usize| &blocks[index * blocks.len() / 3..][..blocks.len() / 3];
    let asked = |stack: &WeightStack, name: &str, encodings: &[&str]| {
        let cast = Cast::new(stack, &specs);
        let weight = cast.encoded(name, encodings).unwrap();
        weight.map(|weight| (weight.encoding.clone(), weight.shape.clone(), weight.data().to_vec()))
    };
    let both = ["q8_0", "q4_k", "q8_0:transposed", "q4_k:transposed"];
    for (name, encoding, index) in
        [("plain", "q4_k", 1), ("transposed", "q4_k:transposed", 1), ("query", "q4_k", 0)]
    {
        let expected = Some((encoding.to_string(), square.to_vec(), third(index).to_vec()));
        assert_eq!(asked(&stack, name, &both), expected, "{name}");
        // In the other orientation, the blocks would be a different matrix.
        let wrong = if encoding == "q4_k" { "q4_k:transposed" } else { "q4_k" };
        assert_eq!(asked(&stack, name, &["q8_0", wrong]), None, "{name}");
    }
    for name in ["convolution", "fused", "norm"] {
        assert_eq!(asked(&stack, name, &both), None, "{name}");
    }

    // A changed tensor has new values. Its neighbour in the file keeps its blocks.
    let path = folder.path().join("lora.safetensors");
    let module = "transformer.transformer_blocks.0.attn.to_q";
    let half = |end: &str, shape: &[usize]| {
        Made::new(&format!("{module}.{end}.weight"), "F32", shape, vec![0x3c; 4 * 256])
    };
    write_safetensors(&path, &[], &[half("lora_A", &[1, 256]), half("lora_B", &[256, 1])]);
    let adapter = Adapter::open(&path).unwrap();
    let changed = stack.clone().with_adapter(&adapter, AdapterUse::at(1.0)).unwrap();
    assert_eq!(asked(&changed, "query", &both), None);
    assert_eq!(asked(&changed, "plain", &both), asked(&stack, "plain", &both));
    let without = stack.with_adapter(&adapter, AdapterUse::at(0.0)).unwrap();
    assert!(asked(&without, "query", &both).is_some());
}

#[test]
fn shapes_the_format_cannot_hold_are_restored() {
    // The format drops leading dimensions of 1.
    let sd3 = table("sd3_medium");
    let mut tensors = original(&sd3, "", DType::F16);
    let table_of_positions = tensors.iter_mut().find(|made| made.name == "pos_embed").unwrap();
    assert_eq!(table_of_positions.shape.remove(0), 1);
    // ComfyUI-GGUF stores some tensors flat and records their original shape.
    let patch = tensors.iter_mut().find(|made| made.name == "x_embedder.proj.weight").unwrap();
    let shape: Vec<i32> = patch.shape.iter().map(|d| *d as i32).collect();
    patch.shape = vec![patch.shape.iter().product()];
    let metadata = [("comfy.gguf.orig_shape.x_embedder.proj.weight", Meta::Shape(shape.clone()))];
    let (_folder, checkpoint) = open(&bytes(3, &metadata, &tensors));
    check(&*checkpoint.unwrap().component(Component::Denoiser).unwrap(), &sd3, DType::F16);

    let wrong = [("comfy.gguf.orig_shape.x_embedder.proj.weight", Meta::Shape(vec![7, 7]))];
    assert_eq!(open(&bytes(3, &wrong, &tensors)).1.unwrap_err().code, ErrorCode::DataLoss);
}

#[test]
fn t5_under_the_names_of_llama_cpp() {
    let t5 = table("t5xxl");
    let names = [
        ("shared", "token_embd"),
        ("encoder.final_layer_norm", "enc.output_norm"),
        ("encoder.block", "enc.blk"),
        ("layer.0.SelfAttention.relative_attention_bias", "attn_rel_b"),
        ("layer.0.SelfAttention.", "attn_"),
        ("layer.0.layer_norm", "attn_norm"),
        ("layer.1.layer_norm", "ffn_norm"),
        ("layer.1.DenseReluDense.wi_0", "ffn_gate"),
        ("layer.1.DenseReluDense.wi_1", "ffn_up"),
        ("layer.1.DenseReluDense.wo", "ffn_down"),
    ];
    let respelt = |name: &str| names.into_iter().fold(name.to_string(), |n, (from, to)| n.replace(from, to));
    let tensors: Vec<Made> =
        original(&t5, "", DType::F16).into_iter().map(|made| made.renamed(respelt)).collect();
    assert!(tensors.iter().any(|made| made.name == "enc.blk.23.attn_q.weight"));
    let (_folder, checkpoint) = open(&bytes(3, &[], &tensors));
    check(&*checkpoint.unwrap().component(Component::TextEncoder3).unwrap(), &t5, DType::F16);
}

/// A small file that is recognised: half of a tiny autoencoder.
fn tiny(kind: &str) -> Vec<Made> {
    let mut tensors = vec![random("1.conv.0.weight", kind, &[2, 1, 1, 256], 5)];
    for name in ["0.weight", "0.bias", "1.conv.0.bias"] {
        tensors.push(Made::new(name, "F32", &[2, 2], (0..16).collect()));
    }
    tensors
}

#[test]
fn damage_is_told() {
    let metadata = || [("a.b", Meta::Text("c")), ("n", Meta::Number(7)), ("s", Meta::Shape(vec![1, 2]))];
    let whole = bytes(3, &metadata(), &tiny("q4_k"));
    let (_folder, checkpoint) = open(&whole);
    assert_eq!(checkpoint.unwrap().components(), [Component::Vae]);
    // The last tensor's padding may be missing.
    for len in 5..whole.len() - 16 {
        let error = open(&whole[..len]).1.unwrap_err();
        assert_eq!(error.code, ErrorCode::DataLoss, "{len}: {error}");
        assert!(error.file.is_some());
    }
    for version in [1, 4] {
        assert_eq!(open(&bytes(version, &[], &tiny("q4_k"))).1.unwrap_err().code, ErrorCode::Unimplemented);
    }
    let mut twice = tiny("q4_k");
    twice.push(twice[0].clone());
    let mut ragged = tiny("q4_k");
    ragged[0].shape = vec![2, 256, 1, 1];
    // Two tensors at one offset: the second tensor's offset, 8 bytes before the third's name, becomes 0.
    let mut overlapping = whole.clone();
    let third = whole.windows(6).position(|window| window == b"0.bias").unwrap() - 8;
    overlapping[third - 8..third].fill(0);
    let mut unaligned = whole.clone();
    unaligned[third - 8] += 1;
    let crooked = bytes(3, &[("general.alignment", Meta::Number(48))], &tiny("q4_k"));
    for (bytes, words) in [
        (bytes(3, &[], &twice), "twice"),
        (bytes(3, &[], &ragged), "whole blocks"),
        (overlapping, "overlap"),
        (unaligned, "aligned"),
        (crooked, "power of two"),
    ] {
        let error = open(&bytes).1.unwrap_err();
        assert!(error.code == ErrorCode::DataLoss && error.message.contains(words), "{words}: {error}");
    }
    // An unsupported type matters only if its tensor is needed.
    let (_folder, checkpoint) = open(&bytes(3, &[], &tiny("iq2_s")));
    let state = checkpoint.unwrap().component(Component::Vae).unwrap();
    let error = state.get("encoder.layers.1.conv.0.weight").unwrap_err();
    assert!(error.code == ErrorCode::Unimplemented && error.message.contains("iq2_s"), "{error}");
    assert!(state.get("encoder.layers.0.weight").is_ok());
}

/// Opens the bytes as a file. If that succeeds, every tensor it names must be delivered or refused.
fn open_and_read(bytes: &[u8]) {
    if let (_folder, Ok(checkpoint)) = open(bytes) {
        let _ = checkpoint.summary();
        for component in checkpoint.components() {
            let state = checkpoint.component(component).unwrap();
            for name in state.names() {
                if let Ok(weight) = state.get(name) {
                    assert_eq!(state.describe(name).unwrap(), (weight.dtype, weight.shape.clone()));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]
    #[test]
    fn mutated_files_never_panic(
        kind in prop::sample::select(KINDS.to_vec()),
        places in prop::collection::vec((0usize..2000, any::<u8>()), 1..4),
        cut in prop::option::of(0usize..2000),
    ) {
        let metadata = [("s", Meta::Shape(vec![1, 2])), ("w", Meta::Words(vec!["x"]))];
        let mut file = bytes(3, &metadata, &tiny(kind));
        for (place, byte) in places {
            // Most of the file is data, where any byte is valid.
            let place = place % 420.min(file.len());
            file[place] = byte;
        }
        if let Some(cut) = cut {
            file.truncate(cut);
        }
        open_and_read(&file);
    }

    #[test]
    fn any_number_anywhere_never_panics(place in 4usize..420, number in prop_oneof![any::<u64>(), 0u64..300]) {
        let mut file = bytes(2, &[("s", Meta::Shape(vec![1, 2]))], &tiny("q8_0"));
        file[place..place + 8].copy_from_slice(&number.to_le_bytes());
        open_and_read(&file);
    }
}
