//! Spellings of names that differ from those of the key tables.

use crate::keys::{Naming, Network, T5_TOKENS, identify_network, modern_vae_attention, names::Names};
use std::borrow::Cow;

/// A network and the spelling of its names.
pub(super) struct Found {
    pub(super) network: Network,
    pub(super) naming: Naming,
    spelling: Spelling,
}

enum Spelling {
    /// As in the tables, with small differences.
    Table,
    /// Without a leading word that the tables have.
    Without(&'static str),
    /// With a leading word that the tables lack.
    Below(&'static str),
    /// T5 as llama.cpp names it.
    LlamaCpp,
    /// ESRGAN's second naming, which BSRGAN has too.
    Trunk,
}

/// Recognises the names of one network, without prefix.
pub(super) fn recognise(names: &Names) -> Option<Found> {
    use Naming::{Diffusers, Original};
    let found = |network, naming, spelling| Some(Found { network, naming, spelling });
    // transformers 5 names CLIP without `text_model.`.
    if names.any("encoder.layers.0.self_attn.") {
        return found(Network::Clip, Diffusers, Spelling::Without("text_model."));
    }
    // transformers names Gemma so where it predicts words.
    if names.any("model.layers.0.pre_feedforward_layernorm.")
        && !names.any("model.layers.0.self_attn.q_norm.")
    {
        return found(Network::Gemma2, Diffusers, Spelling::Below("model."));
    }
    if names.any("enc.blk.0.attn_q.") {
        return found(Network::T5, Diffusers, Spelling::LlamaCpp);
    }
    // TAESD's own files: one half each, or both under their plain names.
    if names.has("0.weight") && names.any("1.conv.0.") {
        return found(Network::TinyVae, Original, Spelling::Without("taesd_encoder."));
    }
    if names.has("1.weight") && names.any("3.conv.0.") {
        return found(Network::TinyVae, Original, Spelling::Without("taesd_decoder."));
    }
    if names.any("encoder.1.conv.0.") || names.any("decoder.3.conv.0.") {
        return found(Network::TinyVae, Original, Spelling::Without("taesd_"));
    }
    if names.any("RRDB_trunk.0.RDB1.") {
        return found(Network::Esrgan, Diffusers, Spelling::Trunk);
    }
    let (network, naming) = identify_network(names.iter())?;
    found(network, naming, Spelling::Table)
}

impl Found {
    /// A name as the table spells it.
    pub(super) fn respell<'n>(&self, name: &'n str) -> Cow<'n, str> {
        let respelt = match (&self.spelling, self.network) {
            (_, Network::T5) if name == T5_TOKENS[1] => Some(T5_TOKENS[0].into()),
            (Spelling::Without("text_model."), _) if name.starts_with("text_") => None,
            (Spelling::Without(front), _) => Some(format!("{front}{name}")),
            (Spelling::Below(front), _) => name.strip_prefix(front).map(str::to_string),
            (Spelling::LlamaCpp, _) => llama_cpp_t5(name),
            (Spelling::Trunk, _) => trunk(name),
            (Spelling::Table, Network::Vae) if self.naming == Naming::Diffusers => modern_vae_attention(name),
            // Scales of RMS norms, which some tools save as weights.
            (Spelling::Table, Network::Flux | Network::Chroma) if self.naming == Naming::Original => {
                name.strip_suffix("_norm.weight").map(|path| format!("{path}_norm.scale"))
            }
            (Spelling::Table, _) => None,
        };
        respelt.map_or(Cow::Borrowed(name), Cow::Owned)
    }
}

/// The names of `RRDBNet_arch.py` in ESRGAN's repository.
fn trunk(name: &str) -> Option<String> {
    if let Some(block) = name.strip_prefix("RRDB_trunk.") {
        return Some(format!("body.{}", block.replace(".RDB", ".rdb")));
    }
    let (module, part) = name.split_once('.')?;
    let new = match module {
        "trunk_conv" => "conv_body",
        "upconv1" => "conv_up1",
        "upconv2" => "conv_up2",
        "HRconv" => "conv_hr",
        _ => return None,
    };
    Some(format!("{new}.{part}"))
}

/// The tensor names of llama.cpp's GGUF files (`gguf-py/gguf/tensor_mapping.py`, architecture `t5encoder`).
fn llama_cpp_t5(name: &str) -> Option<String> {
    match name {
        "token_embd.weight" => return Some(T5_TOKENS[0].into()),
        "enc.output_norm.weight" => return Some("encoder.final_layer_norm.weight".into()),
        _ => {}
    }
    let (index, part) = name.strip_prefix("enc.blk.")?.split_once('.')?;
    let place = match part.strip_suffix(".weight")? {
        "attn_q" => "0.SelfAttention.q",
        "attn_k" => "0.SelfAttention.k",
        "attn_v" => "0.SelfAttention.v",
        "attn_o" => "0.SelfAttention.o",
        "attn_rel_b" => "0.SelfAttention.relative_attention_bias",
        "attn_norm" => "0.layer_norm",
        "ffn_gate" => "1.DenseReluDense.wi_0",
        "ffn_up" => "1.DenseReluDense.wi_1",
        "ffn_down" => "1.DenseReluDense.wo",
        "ffn_norm" => "1.layer_norm",
        _ => return None,
    };
    Some(format!("encoder.block.{index}.layer.{place}.weight"))
}
