//! Files with random keys and shapes: nothing panics, and every adapter that resolves also merges.

use crate::{
    edges::network,
    fixtures::{File, merged},
    keys::SLOTS,
};
use proptest::prelude::*;
use sdrun_weights::adapter::check;

/// All tensors of each kind, in shapes that fit `m.weight [6, 5]`.
fn whole_kinds() -> Vec<&'static [(&'static str, &'static [usize])]> {
    vec![
        &[("lora_down.weight", &[2, 5]), ("lora_up.weight", &[6, 2]), ("dora_scale", &[6, 1])],
        &[("lora_down.weight", &[2, 5]), ("lora_up.weight", &[6, 2]), ("dora_scale", &[1, 5])],
        &[("lora_down.weight", &[2, 5]), ("lora_up.weight", &[6, 3]), ("lora_mid.weight", &[3, 2, 1, 1])],
        &[("hada_w1_a", &[6, 2]), ("hada_w1_b", &[2, 5]), ("hada_w2_a", &[6, 3]), ("hada_w2_b", &[3, 5])],
        &[
            ("hada_w1_a", &[2, 6]),
            ("hada_w1_b", &[3, 5]),
            ("hada_t1", &[2, 3]),
            ("hada_w2_a", &[6, 3]),
            ("hada_w2_b", &[3, 5]),
        ],
        &[("lokr_w1", &[2, 1]), ("lokr_w2_a", &[3, 2]), ("lokr_w2_b", &[2, 5])],
        &[("lokr_w1_a", &[3, 1]), ("lokr_w1_b", &[1, 5]), ("lokr_w2", &[2, 1])],
        &[("lokr_w1", &[2, 1]), ("lokr_w2_a", &[2, 3]), ("lokr_w2_b", &[2, 5]), ("lokr_t2", &[2, 2, 1, 1])],
        &[("a1.weight", &[5, 2]), ("a2.weight", &[2, 5]), ("b1.weight", &[6, 2]), ("b2.weight", &[2, 5])],
        &[("weight", &[5]), ("on_input", &[])],
        &[("oft_blocks", &[3, 2, 2]), ("rescale", &[6, 1]), ("alpha", &[])],
        &[("diff", &[6, 5]), ("diff_b", &[6])],
    ]
}

/// Without random changes, they do fit.
#[test]
fn all_kinds_fit_together() {
    for kind in whole_kinds() {
        let file = kind
            .iter()
            .fold(File::default(), |f, (slot, shape)| f.random(&format!("lora_unet_m.{slot}"), shape));
        assert_eq!(file.open().unwrap().resolve(&network()).report.skipped, [], "{kind:?}");
        use_all(&file);
    }
}

/// Opens, resolves and merges a file. If it opens and resolves, it must also merge.
fn use_all(file: &File) {
    let Ok(adapter) = file.open() else { return };
    let network = network();
    let resolution = adapter.resolve(&network);
    let _ = (adapter.family_guess(), check(&adapter, &[(&network, &resolution)], false));
    for (tensor, deltas) in &resolution.deltas {
        let (_, shape) = network.tensors().iter().find(|(name, _)| name == tensor).unwrap();
        let deltas: Vec<_> = deltas.iter().map(|d| (d, 0.5)).collect();
        merged(&vec![1.0; shape.iter().product()], shape, &deltas);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn random_modules_never_panic(
        tensors in prop::collection::vec((prop::sample::select(&SLOTS[..]), prop::collection::vec(prop::sample::select(vec![0usize, 1, 2, 3, 5, 6]), 0..5)), 1..6),
        prefix in prop::sample::select(vec!["lora_unet_m", "unet.m", "lora_unet_c", "lora_unet_n", "lycoris_one", "m"]),
    ) {
        let file = tensors.iter().fold(File::default(), |f, (slot, shape)| f.random(&format!("{prefix}.{slot}"), shape));
        use_all(&file);
    }

    /// Shapes that fit, or almost fit.
    #[test]
    fn nearly_right_shapes_never_panic(
        kind in prop::sample::select(whole_kinds()),
        changed in prop::option::of((0usize..6, 0usize..4, 0usize..8)),
        module in prop::sample::select(vec!["m", "m", "m", "c", "n", "one"]),
    ) {
        let mut file = File::default();
        for (i, (slot, shape)) in kind.iter().enumerate() {
            let mut shape = shape.to_vec();
            match changed {
                Some((tensor, dimension, size)) if tensor == i && dimension < shape.len() => shape[dimension] = size,
                Some((tensor, _, size)) if tensor == i => shape.push(size),
                _ => {}
            }
            file = file.random(&format!("lora_unet_{module}.{slot}"), &shape);
        }
        use_all(&file);
    }

    #[test]
    fn random_keys_never_panic(keys in prop::collection::vec("[a-z_.0-9]{0,30}", 1..5)) {
        use_all(&keys.iter().fold(File::default(), |f, key| f.random(key, &[2, 2])));
    }
}
