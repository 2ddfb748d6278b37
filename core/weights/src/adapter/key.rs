//! The grammar of adapter keys: `place module suffix`.
//!
//! A key is split at its dots once, from both ends. Nothing is replaced within a name. The module of an underscored
//! (kohya) key is not decided here, because only the network's own list of modules determines it ([`super::Target`]).

/// The part of a pipeline that a key says it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// UNet or transformer.
    Denoiser,
    /// A text encoder by its number, from 1; CLIP-G is number 2.
    TextEncoder(u8),
    /// T5, whatever its number.
    T5,
    /// The key does not say.
    Unsaid,
}

/// A tensor's role within its module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Slot {
    Up,
    Down,
    Mid,
    /// `lora_B.bias` of PEFT.
    UpBias,
    Alpha,
    Scale,
    DoraScale,
    /// PEFT's DoRA magnitude; always one per output.
    Magnitude,
    HadaW1A,
    HadaW1B,
    HadaW2A,
    HadaW2B,
    HadaT1,
    HadaT2,
    LokrW1,
    LokrW1A,
    LokrW1B,
    LokrW2,
    LokrW2A,
    LokrW2B,
    LokrT2,
    A1,
    A2,
    B1,
    B2,
    Diff,
    DiffBias,
    NormWeight,
    NormBias,
    Ia3,
    OnInput,
    OftBlocks,
    Rescale,
    /// A known role that is not supported, by name.
    Unsupported(&'static str),
}

/// A parsed key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) place: Place,
    /// Path of the module, without prefix.
    pub(crate) path: Path,
    pub(crate) slot: Slot,
    /// Bytes of the key before its suffix.
    pub(crate) name_len: usize,
}

/// How a key spells the path of its module.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Path {
    /// Dots between the parts.
    Dotted(String),
    /// Underscores between the parts, and within them.
    Flat(String),
}

impl Path {
    pub(crate) fn as_str(&self) -> &str {
        match self {
            Path::Dotted(path) | Path::Flat(path) => path,
        }
    }

    /// The path with underscores between its parts.
    pub(crate) fn flat(&self) -> String {
        self.as_str().replace('.', "_")
    }
}

/// Last parts that make up the whole suffix.
const BARE: &[(&str, Slot)] = &[
    ("alpha", Slot::Alpha),
    ("scale", Slot::Scale),
    ("dora_scale", Slot::DoraScale),
    ("diff", Slot::Diff),
    ("diff_b", Slot::DiffBias),
    ("w_norm", Slot::NormWeight),
    ("b_norm", Slot::NormBias),
    ("on_input", Slot::OnInput),
    ("oft_blocks", Slot::OftBlocks),
    ("rescale", Slot::Rescale),
    ("oft_diag", Slot::Unsupported("OFT by its diagonal")),
    ("set_weight", Slot::Unsupported("replacement of a whole weight")),
    ("reshape_weight", Slot::Unsupported("change of a weight's shape")),
    ("bias_indices", Slot::Unsupported("sparse bias")),
    ("bias_values", Slot::Unsupported("sparse bias")),
    ("bias_size", Slot::Unsupported("sparse bias")),
];

/// Parts that may be followed by an adapter's name (PEFT) and by `weight`.
const FACTORS: &[(&str, Slot)] = &[
    ("lora_down", Slot::Down),
    ("lora_up", Slot::Up),
    ("lora_mid", Slot::Mid),
    ("lora_A", Slot::Down),
    ("lora_B", Slot::Up),
    ("lora_magnitude_vector", Slot::Magnitude),
    ("hada_w1_a", Slot::HadaW1A),
    ("hada_w1_b", Slot::HadaW1B),
    ("hada_w2_a", Slot::HadaW2A),
    ("hada_w2_b", Slot::HadaW2B),
    ("hada_t1", Slot::HadaT1),
    ("hada_t2", Slot::HadaT2),
    ("lokr_w1", Slot::LokrW1),
    ("lokr_w1_a", Slot::LokrW1A),
    ("lokr_w1_b", Slot::LokrW1B),
    ("lokr_w2", Slot::LokrW2),
    ("lokr_w2_a", Slot::LokrW2A),
    ("lokr_w2_b", Slot::LokrW2B),
    ("lokr_t2", Slot::LokrT2),
    ("a1", Slot::A1),
    ("a2", Slot::A2),
    ("b1", Slot::B1),
    ("b2", Slot::B2),
    ("bm", Slot::Unsupported("GLoRA with a Tucker core")),
    ("lora_embedding_A", Slot::Unsupported("LoRA of an embedding table")),
    ("lora_embedding_B", Slot::Unsupported("LoRA of an embedding table")),
    ("oft_r", Slot::Unsupported("OFT of PEFT")),
    ("oft_R", Slot::Unsupported("OFT of PEFT")),
    ("boft_R", Slot::Unsupported("BOFT")),
    ("boft_s", Slot::Unsupported("BOFT")),
    ("ia3_l", Slot::Unsupported("IA3 of PEFT")),
    ("vera_lambda_b", Slot::Unsupported("VeRA")),
    ("vera_lambda_d", Slot::Unsupported("VeRA")),
];

fn find(table: &[(&str, Slot)], part: &str) -> Option<Slot> {
    table.iter().find(|(name, _)| *name == part).map(|(_, slot)| *slot)
}

/// Parses a key; `None` if its suffix is not an adapter's.
pub(crate) fn parse(key: &str) -> Option<Key> {
    let parts: Vec<&str> = key.split('.').collect();
    let (slot, module) = suffix(&parts)?;
    let name_len = module.iter().map(|part| part.len()).sum::<usize>() + module.len().checked_sub(1)?;
    let (place, path) = locate(module).filter(|(_, path)| !path.as_str().is_empty())?;
    Some(Key { place, path, slot, name_len })
}

/// The place of a tensor that is in an adapter's file but is not a factor of it; `None` if it cannot change a weight. Other
/// programs replace the model's own tensor with it (PEFT's `modules_to_save` and biases, norms of Flux control LoRAs).
pub(crate) fn stray(key: &str) -> Option<(Place, Path)> {
    let parts: Vec<&str> = key.split('.').collect();
    // A1111 bundles embeddings with an adapter; `position_ids` are constants of CLIP, and only its training uses
    // `logit_scale`.
    let harmless = parts.first() == Some(&"bundle_emb")
        || matches!(parts.last(), Some(&("position_ids" | "logit_scale" | "num_batches_tracked")));
    if harmless {
        return None;
    }
    let module = match parts.split_last() {
        Some((_, module)) if !module.is_empty() => module,
        _ => &parts[..],
    };
    // PEFT wraps the modules it changes.
    let wrapped = ["base_layer", "modules_to_save", "original_module"];
    let module = match module.split_last() {
        Some((last, inner)) if wrapped.contains(last) && !inner.is_empty() => inner,
        _ => module,
    };
    Some(locate(module).unwrap_or_else(|| (Place::Unsaid, Path::Dotted(key.into()))))
}

/// Splits the slot off the end of a key.
fn suffix<'k, 'p>(parts: &'p [&'k str]) -> Option<(Slot, &'p [&'k str])> {
    let (last, rest) = parts.split_last()?;
    if let Some(slot) = find(BARE, last).or_else(|| find(FACTORS, last)) {
        return Some((slot, rest));
    }
    let (before, module) = rest.split_last()?;
    // An adapter's name stands between factor and `weight`: lora_A.default.weight.
    let named = module.split_last().and_then(|(p, m)| Some((find(FACTORS, p)?, m)));
    let factor = find(FACTORS, before).map(|slot| (slot, module)).or(named);
    match (*last, *before, factor) {
        ("weight", _, Some(found)) => Some(found),
        ("bias", _, Some((Slot::Up, module))) => Some((Slot::UpBias, module)),
        ("bias", _, Some(_)) => None,
        // to_q_lora.down.weight, lora_linear_layer.up.weight, lora.down.weight, qkv_lora1.up.weight
        ("weight", "down" | "up", _) => {
            let slot = if *before == "down" { Slot::Down } else { Slot::Up };
            match module.split_last()? {
                (&("lora" | "lora_linear_layer"), module) => Some((slot, module)),
                (attached, _) if attached_lora(attached).is_some() => Some((slot, module)),
                _ => None,
            }
        }
        // The adapter's name and no `weight`: hada_w1_a.default, lora_magnitude_vector.default
        (_, factor, _) if find(FACTORS, factor).is_some() && !matches!(*last, "weight" | "bias") => {
            find(FACTORS, factor).map(|slot| (slot, module))
        }
        // LyCORIS' IA3 and biases. Only in kohya's names are these certainly no weights of a network.
        ("weight", ..) if is_kohya(rest) => Some((Slot::Ia3, rest)),
        ("bias", ..) if is_kohya(rest) => Some((Slot::DiffBias, rest)),
        _ => None,
    }
}

/// `to_q` of `to_q_lora`, and the number behind (XLabs).
fn attached_lora(part: &str) -> Option<(&str, Option<u8>)> {
    let numbered = |digit, number| Some((part.strip_suffix(digit)?.strip_suffix("_lora")?, Some(number)));
    part.strip_suffix("_lora").map(|name| (name, None)).or(numbered("1", 1)).or(numbered("2", 2))
}

/// Prefixes of underscored names, the longer of two that match first.
const FLAT_PREFIXES: &[(&str, Place)] = &[
    ("lora_unet", Place::Denoiser),
    ("lora_transformer", Place::Denoiser),
    ("lora_te1", Place::TextEncoder(1)),
    ("lora_te2", Place::TextEncoder(2)),
    ("lora_te3", Place::TextEncoder(3)),
    ("lora_te", Place::TextEncoder(1)),
    ("lora_t5", Place::T5),
    ("lycoris", Place::Unsaid),
];

fn flat_prefix(part: &str) -> Option<(Place, &str)> {
    FLAT_PREFIXES.iter().find_map(|(prefix, place)| match part.strip_prefix(prefix)? {
        "" => Some((*place, "")),
        rest => Some((*place, rest.strip_prefix('_')?)),
    })
}

fn is_kohya(module: &[&str]) -> bool {
    matches!(module, [one] if flat_prefix(one).is_some())
}

fn locate(module: &[&str]) -> Option<(Place, Path)> {
    let first = module.first()?;
    if let Some((place, rest)) = flat_prefix(first) {
        let later = &module[1..];
        return match rest {
            // `lora_te1.text_model.encoder…`
            "" if later.is_empty() => None,
            "" => Some((place, Path::Dotted(normal(later).join(".")))),
            _ => Some((place, Path::Flat([&[rest], later].concat().join("_")))),
        };
    }
    let (place, path) = dotted_prefix(module);
    if path.is_empty() || path.iter().all(|part| part.is_empty()) {
        return None;
    }
    Some((place, Path::Dotted(normal(path).join("."))))
}

/// Strips the prefix of a dotted name before the path in the network.
fn dotted_prefix<'k, 'p>(mut path: &'p [&'k str]) -> (Place, &'p [&'k str]) {
    let mut place = Place::Unsaid;
    loop {
        (place, path) = match (place, path) {
            (_, ["base_model", "model", rest @ ..]) => (place, rest),
            (Place::Unsaid, ["model", "diffusion_model", rest @ ..]) => (Place::Denoiser, rest),
            (Place::Unsaid, ["unet" | "transformer" | "diffusion_model", rest @ ..]) => {
                (Place::Denoiser, rest)
            }
            (Place::Unsaid, ["text_encoder" | "te1", rest @ ..]) => (Place::TextEncoder(1), rest),
            (Place::Unsaid, ["text_encoder_2" | "te2", rest @ ..]) => (Place::TextEncoder(2), rest),
            (Place::Unsaid, ["text_encoder_3" | "te3", rest @ ..]) => (Place::TextEncoder(3), rest),
            (Place::Unsaid, ["text_encoders", rest @ ..]) => (place, rest),
            (Place::Unsaid, ["clip_l" | "clip_h", rest @ ..]) => (Place::TextEncoder(1), rest),
            (Place::Unsaid, ["clip_g", rest @ ..]) => (Place::TextEncoder(2), rest),
            (Place::Unsaid, ["t5xxl" | "t5", rest @ ..]) => (Place::T5, rest),
            // ComfyUI wraps its text encoders in one more module. OpenCLIP's own `transformer.resblocks` stays.
            (Place::TextEncoder(_) | Place::T5, ["transformer", rest @ ..])
                if rest.first() != Some(&"resblocks") =>
            {
                (place, rest)
            }
            _ => return (place, path),
        };
    }
}

/// Removes the wrappers of older spellings from a path.
fn normal<'k>(path: &[&'k str]) -> Vec<&'k str> {
    let Some((name, number, before)) =
        path.split_last().and_then(|(last, before)| attached_lora(last).map(|(n, i)| (n, i, before)))
    else {
        return path.to_vec();
    };
    let before = before.strip_suffix(&["processor"]).unwrap_or(before);
    let place = |middle: &[&'k str]| [before, middle].concat();
    match (before, name, number) {
        // XLabs: 1 is the image stream, 2 the text stream; single blocks have one of each.
        (["double_blocks", _], "qkv" | "proj", Some(1)) => place(&["img_attn", name]),
        (["double_blocks", _], "qkv" | "proj", Some(2)) => place(&["txt_attn", name]),
        (["single_blocks", _], "qkv", _) => place(&["linear1", "qkv"]),
        (["single_blocks", _], "proj", _) => place(&["linear2"]),
        // Early diffusers named a text encoder's projections like a UNet's.
        ([.., "self_attn"], "to_q", None) => place(&["q_proj"]),
        ([.., "self_attn"], "to_k", None) => place(&["k_proj"]),
        ([.., "self_attn"], "to_v", None) => place(&["v_proj"]),
        ([.., "self_attn"], "to_out", None) => place(&["out_proj"]),
        (_, "to_out", None) => place(&["to_out", "0"]),
        (_, _, None) => place(&[name]),
        (_, _, Some(_)) => path.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn dotted(place: Place, path: &str, slot: Slot) -> Option<(Place, Path, Slot)> {
        Some((place, Path::Dotted(path.into()), slot))
    }
    fn flat(place: Place, path: &str, slot: Slot) -> Option<(Place, Path, Slot)> {
        Some((place, Path::Flat(path.into()), slot))
    }

    #[test]
    fn every_spelling_is_taken_apart() {
        use Place::*;
        let one = TextEncoder(1);
        for (key, expected) in [
            (
                "lora_unet_mid_block_attn_to_q.lora_down.weight",
                flat(Denoiser, "mid_block_attn_to_q", Slot::Down),
            ),
            (
                "lora_te_text_model_encoder_layers_0_mlp_fc1.alpha",
                flat(one, "text_model_encoder_layers_0_mlp_fc1", Slot::Alpha),
            ),
            ("lora_te1_a_b.lora_up.weight", flat(one, "a_b", Slot::Up)),
            ("lora_te2_a_b.lora_mid.weight", flat(TextEncoder(2), "a_b", Slot::Mid)),
            ("lora_te3_encoder_block_0.alpha", flat(TextEncoder(3), "encoder_block_0", Slot::Alpha)),
            (
                "lora_transformer_single_transformer_blocks_0_attn_to_q.dora_scale",
                flat(Denoiser, "single_transformer_blocks_0_attn_to_q", Slot::DoraScale),
            ),
            ("lycoris_blocks_0.lokr_w1_a", flat(Unsaid, "blocks_0", Slot::LokrW1A)),
            ("lora_unet_conv_in.weight", flat(Denoiser, "conv_in", Slot::Ia3)),
            ("lora_unet_conv_in.diff_b", flat(Denoiser, "conv_in", Slot::DiffBias)),
            ("lora_unet_conv_in.bias", flat(Denoiser, "conv_in", Slot::DiffBias)),
            ("lora_unet_conv_in.a1.weight", flat(Denoiser, "conv_in", Slot::A1)),
            (
                "unet.mid_block.attn.to_out.0.lora_A.weight",
                dotted(Denoiser, "mid_block.attn.to_out.0", Slot::Down),
            ),
            ("transformer.x.lora_B.default.weight", dotted(Denoiser, "x", Slot::Up)),
            ("transformer.x.lora_B.default_0.bias", dotted(Denoiser, "x", Slot::UpBias)),
            ("base_model.model.unet.x.y.lora_A.weight", dotted(Denoiser, "x.y", Slot::Down)),
            ("base_model.model.x.y.lora_magnitude_vector", dotted(Unsaid, "x.y", Slot::Magnitude)),
            (
                "text_encoder_2.x.lora_magnitude_vector.default.weight",
                dotted(TextEncoder(2), "x", Slot::Magnitude),
            ),
            ("x.hada_w1_a.default", dotted(Unsaid, "x", Slot::HadaW1A)),
            ("unet.a.attn1.processor.to_q_lora.down.weight", dotted(Denoiser, "a.attn1.to_q", Slot::Down)),
            ("a.attn1.processor.to_out_lora.up.weight", dotted(Unsaid, "a.attn1.to_out.0", Slot::Up)),
            ("a.attn1.processor.to_out_lora.alpha", dotted(Unsaid, "a.attn1.to_out.0", Slot::Alpha)),
            (
                "text_encoder.text_model.encoder.layers.0.self_attn.to_q_lora.up.weight",
                dotted(one, "text_model.encoder.layers.0.self_attn.q_proj", Slot::Up),
            ),
            ("text_encoder.x.q_proj.lora_linear_layer.up.weight", dotted(one, "x.q_proj", Slot::Up)),
            ("unet.x.lora.down.weight", dotted(Denoiser, "x", Slot::Down)),
            (
                "double_blocks.3.processor.qkv_lora1.down.weight",
                dotted(Unsaid, "double_blocks.3.img_attn.qkv", Slot::Down),
            ),
            (
                "diffusion_model.double_blocks.3.processor.proj_lora2.up.weight",
                dotted(Denoiser, "double_blocks.3.txt_attn.proj", Slot::Up),
            ),
            (
                "single_blocks.0.processor.qkv_lora.up.weight",
                dotted(Unsaid, "single_blocks.0.linear1.qkv", Slot::Up),
            ),
            (
                "single_blocks.0.processor.proj_lora.up.weight",
                dotted(Unsaid, "single_blocks.0.linear2", Slot::Up),
            ),
            (
                "diffusion_model.input_blocks.1.0.in_layers.2.lora_up.weight",
                dotted(Denoiser, "input_blocks.1.0.in_layers.2", Slot::Up),
            ),
            ("model.diffusion_model.out.2.diff", dotted(Denoiser, "out.2", Slot::Diff)),
            (
                "text_encoders.clip_g.transformer.text_model.x.lora_A.weight",
                dotted(TextEncoder(2), "text_model.x", Slot::Down),
            ),
            (
                "text_encoders.t5xxl.transformer.encoder.block.0.lora_A.weight",
                dotted(T5, "encoder.block.0", Slot::Down),
            ),
            (
                "clip_g.transformer.resblocks.0.mlp.c_fc.lora_A.weight",
                dotted(TextEncoder(2), "transformer.resblocks.0.mlp.c_fc", Slot::Down),
            ),
            ("lora_te1.text_model.x.lora_down.weight", dotted(one, "text_model.x", Slot::Down)),
            ("x.oft_R.default.weight", dotted(Unsaid, "x", Slot::Unsupported("OFT of PEFT"))),
            // Not an adapter's.
            ("model.diffusion_model.out.2.weight", None),
            ("x.bias", None),
            ("x.down.weight", None),
            ("lora_down.weight", None),
            ("lora_unet.alpha", None),
            ("unet.lora_A.weight", None),
            ("", None),
            (".", None),
            (".alpha", None),
        ] {
            let found = parse(key).map(|k| (k.place, k.path, k.slot));
            assert_eq!(found, expected, "{key}");
        }
    }

    #[test]
    fn the_name_is_what_comes_before_the_suffix() {
        for (key, name) in [
            ("lora_unet_x.lora_down.weight", "lora_unet_x"),
            ("unet.x.y.lora_A.default.weight", "unet.x.y"),
            ("a.processor.to_q_lora.down.weight", "a.processor.to_q_lora"),
        ] {
            assert_eq!(&key[..parse(key).unwrap().name_len], name);
        }
    }

    proptest! {
        #[test]
        fn no_key_panics(key in r"[a-zA-Z0-9_.äß]{0,60}") {
            if let Some(parsed) = parse(&key) {
                prop_assert!(key.is_char_boundary(parsed.name_len));
            }
        }

        #[test]
        fn no_shuffle_of_known_parts_panics(parts in prop::collection::vec(prop::sample::select(vec![
            "base_model", "model", "unet", "transformer", "text_encoders", "clip_l", "processor", "to_q_lora", "qkv_lora1", "lora",
            "double_blocks", "0", "lora_A", "lora_B", "default", "weight", "bias", "down", "up", "alpha", "lora_unet_x", "lora_te", "", "self_attn",
        ]), 0..8)) {
            let key = parts.join(".");
            if let Some(parsed) = parse(&key) {
                prop_assert!(parsed.name_len < key.len());
                prop_assert!(!parsed.path.as_str().is_empty());
            }
        }
    }
}
