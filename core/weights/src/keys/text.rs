//! Text encoders: CLIP as transformers and as OpenCLIP name it, T5, and Gemma 2.

use super::{Fusion, builder::Builder};

/// Checkpoints in the original layouts keep the names of transformers for these.
fn same(b: &mut Builder, module: &str) {
    b.module(module, module);
}

/// `CLIPTextModel` and `CLIPTextModelWithProjection`.
pub(super) fn clip(b: &mut Builder) {
    for table in ["token_embedding", "position_embedding"] {
        let name = format!("text_model.embeddings.{table}");
        b.weight(&name, &name);
    }
    let layers = "text_model.encoder.layers";
    for index in 0..b.count(layers, layers) {
        for part in ["k_proj", "v_proj", "q_proj", "out_proj"] {
            same(b, &format!("{layers}.{index}.self_attn.{part}"));
        }
        for part in ["layer_norm1", "mlp.fc1", "mlp.fc2", "layer_norm2"] {
            same(b, &format!("{layers}.{index}.{part}"));
        }
    }
    same(b, "text_model.final_layer_norm");
    b.optional_tensor("text_projection.weight", "text_projection.weight", Fusion::Same);
}

/// The text half of OpenCLIP (SD 2, SD XL's second encoder), whose projection multiplies from the right.
pub(super) fn open_clip(b: &mut Builder) {
    let embeddings = "text_model.embeddings";
    b.tensor("positional_embedding", format!("{embeddings}.position_embedding.weight"), Fusion::Same);
    b.weight("token_embedding", format!("{embeddings}.token_embedding"));
    let layers = b.count("transformer.resblocks", "text_model.encoder.layers");
    for index in 0..layers {
        let (original, layer) =
            (format!("transformer.resblocks.{index}"), format!("text_model.encoder.layers.{index}"));
        let parts = ["q_proj", "k_proj", "v_proj"].map(|part| format!("{layer}.self_attn.{part}"));
        b.fused(format!("{original}.attn.in_proj"), '_', &parts);
        for (from, to) in [
            ("attn.out_proj", "self_attn.out_proj"),
            ("ln_1", "layer_norm1"),
            ("ln_2", "layer_norm2"),
            ("mlp.c_fc", "mlp.fc1"),
            ("mlp.c_proj", "mlp.fc2"),
        ] {
            b.module(format!("{original}.{from}"), format!("{layer}.{to}"));
        }
    }
    b.module("ln_final", "text_model.final_layer_norm");
    b.optional_tensor("text_projection", "text_projection.weight", Fusion::Transposed);
}

/// The encoder of T5 1.1 (gated) and 1.0.
pub(super) fn t5(b: &mut Builder) {
    b.weight("shared", "shared");
    let blocks = "encoder.block";
    for index in 0..b.count(blocks, blocks) {
        let block = format!("{blocks}.{index}");
        let attention = format!("{block}.layer.0.SelfAttention");
        for part in ["q", "k", "v", "o"] {
            b.weight(format!("{attention}.{part}"), format!("{attention}.{part}"));
        }
        // The first block's table serves all; UMT5 has one in each.
        let bias = format!("{attention}.relative_attention_bias.weight");
        b.optional_tensor(&bias, &bias, Fusion::Same);
        let dense = format!("{block}.layer.1.DenseReluDense");
        let plain = format!("{dense}.wi.");
        let inner: &[&str] = if b.any(&plain, &plain) { &["wi", "wo"] } else { &["wi_0", "wi_1", "wo"] };
        for part in inner {
            let name = format!("{dense}.{part}");
            b.weight(&name, &name);
        }
        for layer in 0..2 {
            let norm = format!("{block}.layer.{layer}.layer_norm");
            b.weight(&norm, &norm);
        }
    }
    b.weight("encoder.final_layer_norm", "encoder.final_layer_norm");
}

/// Gemma 2 as transformers names it.
pub(super) fn gemma2(b: &mut Builder) {
    b.weight("embed_tokens", "embed_tokens");
    for index in 0..b.count("layers", "layers") {
        for part in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            let name = format!("layers.{index}.self_attn.{part}");
            b.weight(&name, &name);
        }
        for part in ["gate_proj", "up_proj", "down_proj"] {
            let name = format!("layers.{index}.mlp.{part}");
            b.weight(&name, &name);
        }
        for norm in ["input", "post_attention", "pre_feedforward", "post_feedforward"] {
            let name = format!("layers.{index}.{norm}_layernorm");
            b.weight(&name, &name);
        }
    }
    b.weight("norm", "norm");
}
