//! The transformers of SD 3.x, Flux and Chroma: `mmditx.py` of Stability AI and `model.py` of Black Forest Labs
//! against `SD3Transformer2DModel`, `FluxTransformer2DModel` and `ChromaTransformer2DModel`.

use super::{Fusion, builder::Builder};

/// Three projections that the original keeps in one matrix.
fn qkv(module: &str, names: [&str; 3]) -> Vec<String> {
    names.iter().map(|name| format!("{module}.{name}")).collect()
}
const IMAGE: [&str; 3] = ["to_q", "to_k", "to_v"];
const TEXT: [&str; 3] = ["add_q_proj", "add_k_proj", "add_v_proj"];

pub(super) fn sd3(b: &mut Builder) {
    b.tensor("pos_embed", "pos_embed.pos_embed", Fusion::Same);
    b.module("x_embedder.proj", "pos_embed.proj");
    b.module("context_embedder", "context_embedder");
    for (from, to) in [("t_embedder.mlp", "timestep_embedder"), ("y_embedder.mlp", "text_embedder")] {
        for (place, layer) in [(0, 1), (2, 2)] {
            b.module(format!("{from}.{place}"), format!("time_text_embed.{to}.linear_{layer}"));
        }
    }
    let blocks = b.count("joint_blocks", "transformer_blocks");
    for index in 0..blocks {
        let block = format!("transformer_blocks.{index}");
        let (x, context) =
            (format!("joint_blocks.{index}.x_block"), format!("joint_blocks.{index}.context_block"));
        b.fused(format!("{x}.attn.qkv"), '.', &qkv(&format!("{block}.attn"), IMAGE));
        b.fused(format!("{context}.attn.qkv"), '.', &qkv(&format!("{block}.attn"), TEXT));
        b.module(format!("{x}.attn.proj"), format!("{block}.attn.to_out.0"));
        b.module(format!("{x}.adaLN_modulation.1"), format!("{block}.norm1.linear"));
        b.module(format!("{x}.mlp.fc1"), format!("{block}.ff.net.0.proj"));
        b.module(format!("{x}.mlp.fc2"), format!("{block}.ff.net.2"));

        // The text is unused after the last block, so that block has only the text's projections and a modulation of one
        // shift and one scale, in diffusers' order scale, shift.
        let (modulation, norm) =
            (format!("{context}.adaLN_modulation.1"), format!("{block}.norm1_context.linear"));
        let last = index + 1 == blocks && !b.any(&format!("{context}.mlp."), &format!("{block}.ff_context."));
        if last {
            b.swapped(modulation, norm);
        } else {
            b.module(modulation, norm);
            b.module(format!("{context}.attn.proj"), format!("{block}.attn.to_add_out"));
            b.module(format!("{context}.mlp.fc1"), format!("{block}.ff_context.net.0.proj"));
            b.module(format!("{context}.mlp.fc2"), format!("{block}.ff_context.net.2"));
        }
        // SD 3.5 medium: a second attention, of the image alone.
        if b.any(&format!("{x}.attn2."), &format!("{block}.attn2.")) {
            b.fused(format!("{x}.attn2.qkv"), '.', &qkv(&format!("{block}.attn2"), IMAGE));
            b.module(format!("{x}.attn2.proj"), format!("{block}.attn2.to_out.0"));
        }
        // SD 3.5: normalised queries and keys.
        for (from, to) in [
            (format!("{x}.attn.ln_q"), "attn.norm_q"),
            (format!("{x}.attn.ln_k"), "attn.norm_k"),
            (format!("{context}.attn.ln_q"), "attn.norm_added_q"),
            (format!("{context}.attn.ln_k"), "attn.norm_added_k"),
            (format!("{x}.attn2.ln_q"), "attn2.norm_q"),
            (format!("{x}.attn2.ln_k"), "attn2.norm_k"),
        ] {
            b.optional_tensor(format!("{from}.weight"), format!("{block}.{to}.weight"), Fusion::Same);
        }
    }
    b.module("final_layer.linear", "proj_out");
    b.swapped("final_layer.adaLN_modulation.1", "norm_out.linear");
}

pub(super) fn flux(b: &mut Builder) {
    let embedders = [
        ("time_in", "timestep_embedder"),
        ("vector_in", "text_embedder"),
        ("guidance_in", "guidance_embedder"),
    ];
    for (from, to) in embedders {
        let to = format!("time_text_embed.{to}");
        // Only models with distilled guidance (Flux dev) have the last one.
        if from == "guidance_in" && !b.any("guidance_in.", &format!("{to}.")) {
            continue;
        }
        b.module(format!("{from}.in_layer"), format!("{to}.linear_1"));
        b.module(format!("{from}.out_layer"), format!("{to}.linear_2"));
    }
    flux_blocks(b, true);
    b.swapped("final_layer.adaLN_modulation.1", "norm_out.linear");
}

/// Chroma: Flux without modulation layers; one small network computes all modulations.
pub(super) fn chroma(b: &mut Builder) {
    let guidance = "distilled_guidance_layer";
    b.module(format!("{guidance}.in_proj"), format!("{guidance}.in_proj"));
    b.module(format!("{guidance}.out_proj"), format!("{guidance}.out_proj"));
    let layers = format!("{guidance}.layers");
    for index in 0..b.count(&layers, &layers) {
        b.module(format!("{layers}.{index}.in_layer"), format!("{layers}.{index}.linear_1"));
        b.module(format!("{layers}.{index}.out_layer"), format!("{layers}.{index}.linear_2"));
        let norm = format!("{guidance}.norms.{index}");
        b.tensor(format!("{norm}.scale"), format!("{norm}.weight"), Fusion::Same);
    }
    flux_blocks(b, false);
}

fn flux_blocks(b: &mut Builder, modulated: bool) {
    b.module("txt_in", "context_embedder");
    b.module("img_in", "x_embedder");
    for index in 0..b.count("double_blocks", "transformer_blocks") {
        let (original, block) = (format!("double_blocks.{index}"), format!("transformer_blocks.{index}"));
        if modulated {
            b.module(format!("{original}.img_mod.lin"), format!("{block}.norm1.linear"));
            b.module(format!("{original}.txt_mod.lin"), format!("{block}.norm1_context.linear"));
        }
        let attention = format!("{block}.attn");
        b.fused(format!("{original}.img_attn.qkv"), '.', &qkv(&attention, IMAGE));
        b.fused(format!("{original}.txt_attn.qkv"), '.', &qkv(&attention, TEXT));
        b.module(format!("{original}.img_attn.proj"), format!("{attention}.to_out.0"));
        b.module(format!("{original}.txt_attn.proj"), format!("{attention}.to_add_out"));
        for (from, to) in [("img_mlp", "ff"), ("txt_mlp", "ff_context")] {
            b.module(format!("{original}.{from}.0"), format!("{block}.{to}.net.0.proj"));
            b.module(format!("{original}.{from}.2"), format!("{block}.{to}.net.2"));
        }
        for (from, to) in [
            ("img_attn.norm.query_norm", "norm_q"),
            ("img_attn.norm.key_norm", "norm_k"),
            ("txt_attn.norm.query_norm", "norm_added_q"),
            ("txt_attn.norm.key_norm", "norm_added_k"),
        ] {
            b.tensor(format!("{original}.{from}.scale"), format!("{attention}.{to}.weight"), Fusion::Same);
        }
    }
    for index in 0..b.count("single_blocks", "single_transformer_blocks") {
        let (original, block) =
            (format!("single_blocks.{index}"), format!("single_transformer_blocks.{index}"));
        if modulated {
            b.module(format!("{original}.modulation.lin"), format!("{block}.norm.linear"));
        }
        let mut parts = qkv(&format!("{block}.attn"), IMAGE);
        parts.push(format!("{block}.proj_mlp"));
        b.fused(format!("{original}.linear1"), '.', &parts);
        b.module(format!("{original}.linear2"), format!("{block}.proj_out"));
        for (from, to) in [("query_norm", "norm_q"), ("key_norm", "norm_k")] {
            let original = format!("{original}.norm.{from}.scale");
            b.tensor(original, format!("{block}.attn.{to}.weight"), Fusion::Same);
        }
    }
    b.module("final_layer.linear", "proj_out");
}
