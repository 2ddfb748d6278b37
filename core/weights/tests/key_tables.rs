//! Compares the key tables with those of diffusers' own converters, which were recorded for whole models.

#![allow(clippy::unwrap_used)]

mod common;

use common::tables::{Entry, table, table_files, unpacked};
use proptest::prelude::*;
use sdrun_weights::keys::{Fusion, KeyPair, Naming, Network, Table, identify_network, modules, pairs};
use std::collections::BTreeMap;

fn network_of(entry: &Entry) -> Network {
    if entry.pairs.iter().any(|pair| pair.original.starts_with("transformer.resblocks")) {
        return Network::OpenClip;
    }
    identify_network(entry.diffusers_names()).unwrap().0
}
fn by_original(pairs: &[KeyPair]) -> BTreeMap<&str, (&[String], Fusion)> {
    pairs.iter().map(|pair| (&*pair.original, (&*pair.diffusers, pair.fusion))).collect()
}

#[test]
fn every_pair_is_found_from_either_side() {
    let entries = table_files();
    assert!(entries.len() == 24, "{}", entries.len());
    for entry in &entries {
        let (name, network, expected) = (&entry.name, network_of(entry), by_original(&entry.pairs));
        let forward = Table::new(network, Naming::Diffusers, entry.diffusers_names());
        assert_eq!(by_original(&forward.pairs), expected, "{name} from diffusers");
        let backward = Table::new(network, Naming::Original, entry.original_names());
        assert_eq!(by_original(&backward.pairs), expected, "{name} from the original");
        for table in [&forward, &backward] {
            assert_eq!((&table.missing, &table.extra), (&vec![], &vec![]), "{name}");
            assert_eq!(table.pairs.len(), expected.len(), "{name}");
        }
        assert_eq!(forward.pairs, backward.pairs, "{name}: the same order");
    }
}

#[test]
fn networks_are_told_by_their_names() {
    for entry in table_files() {
        let file = entry.name.as_str();
        let expected = match file {
            _ if file.contains("controlnet") => Network::ControlNet,
            _ if file.contains("unet") => Network::UNet,
            _ if file.contains("vae") => Network::Vae,
            _ if file.starts_with("t5") || file.ends_with("text_encoder_3") => Network::T5,
            _ if file.contains("text_encoder") => Network::Clip,
            _ if file.contains("flux") => Network::Flux,
            _ => Network::Sd3,
        };
        assert_eq!(identify_network(entry.diffusers_names()), Some((expected, Naming::Diffusers)), "{file}");
        let original = identify_network(entry.original_names()).unwrap();
        assert_eq!(original.0, network_of(&entry), "{file}");
    }
    for other in [
        &[][..],
        &["a", "b.weight"],
        &["lora_unet_down_blocks_0.lora_up.weight"],
        // FLUX.2 and a Flux ControlNet.
        &["double_blocks.0.img_attn.qkv.weight", "double_stream_modulation_img.lin.weight"],
        &["transformer_blocks.0.attn.to_q.weight", "x_embedder.weight", "controlnet_blocks.0.weight"],
    ] {
        assert_eq!(identify_network(other.iter().copied()), None);
    }
}

#[test]
fn a_missing_tensor_is_named_and_a_foreign_one_too() {
    for entry in table_files() {
        let (name, network) = (&entry.name, network_of(&entry));
        // A tensor whose absence does not change the recognised structure.
        let ends = [
            "fc1.weight",
            "0.proj.weight",
            "conv1.weight",
            "in_layers.2.weight",
            ".wo.weight",
            "c_fc.weight",
            "linear2.weight",
        ];
        let fits = |pair: &&KeyPair| ends.iter().any(|end| pair.original.ends_with(end));
        let lost = entry.pairs.iter().find(fits).unwrap();
        let originals = entry.original_names().filter(|n| *n != lost.original).chain(["a.foreign.one"]);
        let table = Table::new(network, Naming::Original, originals);
        assert_eq!(table.missing, std::slice::from_ref(&lost.original), "{name}");
        assert_eq!(table.extra, ["a.foreign.one"], "{name}");
        let diffusers = entry.diffusers_names().filter(|n| *n != lost.diffusers[0]);
        let table = Table::new(network, Naming::Diffusers, diffusers);
        assert_eq!(table.missing, std::slice::from_ref(&lost.diffusers[0]), "{name}");
        assert!(table.extra.is_empty(), "{name}");
    }
}

/// A graph may hold only part of a state dict: half of an autoencoder, or a block without unused projections.
#[test]
fn parts_of_a_network_have_the_same_names() {
    let entries = table_files();
    let find = |name: &str| entries.iter().find(|entry| entry.name == name).unwrap();
    let vae = find("sd15_vae");
    for half in ["encoder.", "decoder."] {
        let names: Vec<&str> = vae.diffusers_names().filter(|name| name.starts_with(half)).collect();
        assert_eq!(identify_network(names.iter().copied()), Some((Network::Vae, Naming::Diffusers)));
        let expected: Vec<KeyPair> =
            vae.pairs.iter().filter(|pair| pair.original.starts_with(half)).cloned().collect();
        assert_eq!(by_original(&pairs(Network::Vae, names.iter().copied())), by_original(&expected));
    }

    let sd3 = find("sd3_medium");
    let names = sd3.diffusers_names().filter(|name| !name.contains("23.attn.add_q_proj"));
    let table = pairs(Network::Sd3, names);
    assert_eq!(table.len(), sd3.pairs.len());
    let fused = table.iter().find(|p| p.original == "joint_blocks.23.context_block.attn.qkv.weight").unwrap();
    let known = |name: &str| (!name.contains("add_q")).then_some(1536);
    assert_eq!(fused.row_ranges(known), Some(vec![0..1536, 1536..3072, 3072..4608]));
    assert_eq!(fused.row_ranges(|_| None), None);

    let flux = pairs(Network::Flux, find("flux_dev").diffusers_names());
    let linear1 = flux.iter().find(|p| p.original == "single_blocks.37.linear1.bias").unwrap();
    let rows = |name: &str| Some(if name.contains("mlp") { 12288 } else { 3072 });
    assert_eq!(linear1.row_ranges(rows).unwrap()[3], 9216..21504);
    assert_eq!(linear1.row_ranges(|name| (!name.contains("mlp")).then_some(3072)), None);
    let module = modules(&flux).into_iter().find(|m| m.original == "single_blocks.37.linear1").unwrap();
    assert_eq!(module.diffusers[3], "single_transformer_blocks.37.proj_mlp");
    assert_eq!((module.diffusers.len(), module.fusion), (4, Fusion::Rows));
}

/// Structures without a recorded table: pruned and distilled models, and other generations.
#[test]
fn other_structures_go_there_and_back() {
    let entries = table_files();
    let find = |name: &str| entries.iter().find(|entry| entry.name == name).unwrap();
    let there_and_back = |network, names: &[String]| {
        let forward = Table::new(network, Naming::Diffusers, names.iter().map(String::as_str));
        assert_eq!((&forward.missing, &forward.extra), (&vec![], &vec![]));
        let originals = forward.pairs.iter().map(|pair| &*pair.original);
        let backward = Table::new(network, Naming::Original, originals);
        assert_eq!(backward.pairs, forward.pairs);
        assert_eq!((&backward.missing, &backward.extra), (&vec![], &vec![]));
        forward.pairs
    };
    let keep = |entry: &Entry, keep: &dyn Fn(&str) -> bool| -> Vec<String> {
        entry.diffusers_names().filter(|name| keep(name)).map(str::to_string).collect()
    };
    let original_of = |pairs: &[KeyPair], name: &str| -> String {
        let pair = pairs.iter().find(|pair| pair.diffusers.iter().any(|n| n == name));
        pair.unwrap_or_else(|| panic!("{name}")).original.clone()
    };

    // SSD-1B: no attention and only one residual block in the middle, and fewer transformer layers.
    let names = keep(find("sdxl_unet"), &|name| {
        let shallow = name.starts_with("down_blocks.2") && name.contains("transformer_blocks.9.");
        !shallow && !name.starts_with("mid_block.attentions") && !name.starts_with("mid_block.resnets.1")
    });
    let table = there_and_back(Network::UNet, &names);
    assert_eq!(original_of(&table, "mid_block.resnets.0.conv1.bias"), "middle_block.0.in_layers.2.bias");
    assert_eq!(original_of(&table, "up_blocks.1.upsamplers.0.conv.bias"), "output_blocks.5.2.conv.bias");

    // BK-SDM: one layer fewer in each level.
    let names = keep(find("sd15_unet"), &|name| {
        !(name.starts_with("down_blocks") && (name.contains("resnets.1") || name.contains("attentions.1")))
            && !(name.starts_with("up_blocks")
                && (name.contains("resnets.2") || name.contains("attentions.2")))
    });
    let table = there_and_back(Network::UNet, &names);
    assert_eq!(original_of(&table, "down_blocks.0.downsamplers.0.conv.bias"), "input_blocks.2.0.op.bias");
    assert_eq!(original_of(&table, "up_blocks.0.upsamplers.0.conv.bias"), "output_blocks.1.1.conv.bias");
    assert_eq!(original_of(&table, "up_blocks.3.resnets.1.conv1.bias"), "output_blocks.7.0.in_layers.2.bias");

    // Flux schnell.
    let names = keep(find("flux_dev"), &|name| !name.contains("guidance_embedder"));
    there_and_back(Network::Flux, &names);

    // SD 3.5 medium: a second attention in the first blocks.
    let mut names = keep(find("sd35_large"), &|_| true);
    for index in 0..13 {
        for part in ["to_q", "to_k", "to_v", "to_out.0"] {
            names.extend(["weight", "bias"].map(|p| format!("transformer_blocks.{index}.attn2.{part}.{p}")));
        }
        names.extend(["q", "k"].map(|p| format!("transformer_blocks.{index}.attn2.norm_{p}.weight")));
    }
    let table = there_and_back(Network::Sd3, &names);
    assert_eq!(
        original_of(&table, "transformer_blocks.12.attn2.to_k.bias"),
        "joint_blocks.12.x_block.attn2.qkv.bias"
    );

    // Chroma: no modulation, but a guidance network.
    let mut names = keep(find("flux_dev"), &|name| {
        let modulation = name.contains("norm") && name.contains("linear");
        !modulation && !name.starts_with("time_text")
    });
    names.extend((0..5).flat_map(|index| {
        [
            "layers.#.linear_1.weight",
            "layers.#.linear_1.bias",
            "layers.#.linear_2.weight",
            "layers.#.linear_2.bias",
            "norms.#.weight",
        ]
        .map(|name| format!("distilled_guidance_layer.{}", name.replace('#', &index.to_string())))
    }));
    names.extend(
        ["in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias"]
            .map(|n| format!("distilled_guidance_layer.{n}")),
    );
    assert_eq!(
        identify_network(names.iter().map(String::as_str)),
        Some((Network::Chroma, Naming::Diffusers))
    );
    let table = there_and_back(Network::Chroma, &names);
    let originals: Vec<&str> = table.iter().map(|pair| &*pair.original).collect();
    assert_eq!(identify_network(originals), Some((Network::Chroma, Naming::Original)));
    assert_eq!(
        original_of(&table, "distilled_guidance_layer.layers.4.linear_2.bias"),
        "distilled_guidance_layer.layers.4.out_layer.bias"
    );

    // SD XL ControlNet, from the UNet's down blocks and the SD 1.5 ControlNet's own parts.
    let mut names = keep(find("sdxl_unet"), &|name| {
        !name.starts_with("up_blocks") && !name.starts_with("conv_norm_out") && !name.starts_with("conv_out")
    });
    names.extend(keep(find("sd15_controlnet"), &|name| {
        name.starts_with("controlnet_cond") || name.starts_with("controlnet_mid")
    }));
    names.extend((0..9).flat_map(|i| ["weight", "bias"].map(|p| format!("controlnet_down_blocks.{i}.{p}"))));
    let table = there_and_back(Network::ControlNet, &names);
    assert_eq!(original_of(&table, "controlnet_cond_embedding.conv_out.bias"), "input_hint_block.14.bias");
    assert_eq!(original_of(&table, "add_embedding.linear_2.bias"), "label_emb.0.2.bias");

    // TAESD (layers with weights as in its `taesd.py`).
    let block = |place: usize| {
        (0..3).flat_map(move |i| ["weight", "bias"].map(|p| format!("{place}.conv.{}.{p}", 2 * i)))
    };
    let ends = |place: usize| ["weight", "bias"].map(|p| format!("{place}.{p}")).into_iter();
    let plain = |place: usize| std::iter::once(format!("{place}.weight"));
    let encoder = ends(0)
        .chain(block(1))
        .chain(plain(2))
        .chain((3..6).flat_map(block))
        .chain(plain(6))
        .chain((7..10).flat_map(block))
        .chain(plain(10))
        .chain((11..14).flat_map(block))
        .chain(ends(14));
    let decoder = ends(0)
        .chain((2..5).flat_map(block))
        .chain(plain(6))
        .chain((7..10).flat_map(block))
        .chain(plain(11))
        .chain((12..15).flat_map(block))
        .chain(plain(16))
        .chain(block(17))
        .chain(ends(18));
    let names: Vec<String> = encoder
        .map(|n| format!("encoder.layers.{n}"))
        .chain(decoder.map(|n| format!("decoder.layers.{n}")))
        .collect();
    assert_eq!(
        identify_network(names.iter().map(String::as_str)),
        Some((Network::TinyVae, Naming::Diffusers))
    );
    let table = there_and_back(Network::TinyVae, &names);
    assert_eq!(original_of(&table, "decoder.layers.18.weight"), "taesd_decoder.19.weight");
    assert_eq!(original_of(&table, "encoder.layers.14.bias"), "taesd_encoder.14.bias");
}

/// The names of modules in kohya's adapters, in the original spelling (`tests/data/kohya_*`: diffusers module, name
/// in diffusers' spelling, name in the original spelling, shape).
#[test]
fn modules_have_the_names_of_adapters() {
    for (file, name) in [("kohya_sd15_unet.tsv.gz", "sd15_unet"), ("kohya_sdxl_unet.tsv.gz", "sdxl_unet")] {
        let text = unpacked(file);
        let modules = modules(&pairs(Network::UNet, table(name).diffusers_names()));
        let by_name: BTreeMap<&str, &str> =
            modules.iter().map(|module| (&*module.diffusers[0], &*module.original)).collect();
        let rows = text.lines().filter(|line| !line.starts_with('#'));
        let mut count = 0;
        for row in rows {
            let fields: Vec<&str> = row.split('\t').collect();
            assert_eq!(format!("lora_unet_{}", by_name[fields[0]].replace('.', "_")), fields[2]);
            count += 1;
        }
        assert!(count > 200, "{file}: {count}");
    }
}

const NETWORKS: [Network; 15] = [
    Network::UNet,
    Network::ControlNet,
    Network::Vae,
    Network::DeepVae,
    Network::TinyVae,
    Network::Sd3,
    Network::Flux,
    Network::Chroma,
    Network::PixArt,
    Network::Sana,
    Network::Clip,
    Network::OpenClip,
    Network::T5,
    Network::Gemma2,
    Network::Esrgan,
];

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]
    /// For arbitrary names with arbitrary numbers, the table is no larger than the list, and every name is accounted
    /// for.
    #[test]
    fn tables_of_any_names_are_bounded(
        network in prop::sample::select(NETWORKS.to_vec()),
        original in any::<bool>(),
        names in prop::collection::vec(
            "(input_blocks|down_blocks|double_blocks|transformer_blocks|joint_blocks|encoder\\.(layers|down_blocks|block)|taesd_decoder|text_model\\.encoder\\.layers)\\.[0-9]{1,19}\\.(0|1|resnets|attn|attentions\\.[0-9]{1,19}|transformer_blocks\\.[0-9]{1,9})\\.(weight|x|in_layers\\.0)",
            0..40,
        ),
    ) {
        let naming = if original { Naming::Original } else { Naming::Diffusers };
        let table = Table::new(network, naming, names.iter().map(String::as_str));
        prop_assert!(table.pairs.len() <= names.len());
        prop_assert!(table.missing.len() <= 60 * (4 * names.len() + 10), "{}", table.missing.len());
        let distinct: std::collections::BTreeSet<&str> = names.iter().map(String::as_str).collect();
        let known = |name: &str| table.pairs.iter().any(|p| p.original == name || p.diffusers.iter().any(|d| d == name));
        for name in distinct {
            prop_assert!(known(name) || table.extra.iter().any(|extra| extra == name));
        }
    }
}
