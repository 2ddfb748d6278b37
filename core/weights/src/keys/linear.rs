//! The transformers of PixArt and Sana, whose original layouts share most names: `PixArtMS.py` of PixArt-sigma and
//! `sana_multi_scale.py` of Sana against `PixArtTransformer2DModel` and `SanaTransformer2DModel`. The pairs are those of
//! diffusers' `scripts/convert_pixart_sigma_to_diffusers.py` and `scripts/convert_sana_to_diffusers.py`.

use super::{Fusion, builder::Builder};

pub(super) fn pixart(b: &mut Builder) {
    b.module("x_embedder.proj", "pos_embed.proj");
    caption(b);
    let embeddings = "adaln_single.emb";
    timestep(b, "t_embedder", &format!("{embeddings}.timestep_embedder"));
    // Conditioning on resolution and aspect ratio: PixArt alpha.
    for (from, to) in [("csize_embedder", "resolution_embedder"), ("ar_embedder", "aspect_ratio_embedder")] {
        if b.any(&format!("{from}."), &format!("{embeddings}.{to}.")) {
            timestep(b, from, &format!("{embeddings}.{to}"));
        }
    }
    b.module("t_block.1", "adaln_single.linear");
    for index in 0..b.count("blocks", "transformer_blocks") {
        let (original, block) = (format!("blocks.{index}"), format!("transformer_blocks.{index}"));
        attention(b, &original, &block);
        b.rows(&format!("{original}.attn.qkv.bias"), &projections(&block, "attn1", &["q", "k", "v"], "bias"));
        for norm in ["q_norm", "k_norm"] {
            b.optional_module(format!("{original}.attn.{norm}"), format!("{block}.attn1.{norm}"));
        }
        b.module(format!("{original}.mlp.fc1"), format!("{block}.ff.net.0.proj"));
        b.module(format!("{original}.mlp.fc2"), format!("{block}.ff.net.2"));
    }
    last(b);
}

pub(super) fn sana(b: &mut Builder) {
    b.module("x_embedder.proj", "patch_embed.proj");
    caption(b);
    b.weight("attention_y_norm", "caption_norm");
    // Sana Sprint has guidance as an input, and no `emb` in its path.
    if b.any("cfg_embedder.", "time_embed.guidance_embedder.") {
        timestep(b, "t_embedder", "time_embed.timestep_embedder");
        timestep(b, "cfg_embedder", "time_embed.guidance_embedder");
    } else {
        timestep(b, "t_embedder", "time_embed.emb.timestep_embedder");
    }
    b.module("t_block.1", "time_embed.linear");
    for index in 0..b.count("blocks", "transformer_blocks") {
        let (original, block) = (format!("blocks.{index}"), format!("transformer_blocks.{index}"));
        attention(b, &original, &block);
        // Sana 1.5 and Sprint: normalised queries and keys.
        for (from, to) in [("attn", "attn1"), ("cross_attn", "attn2")] {
            for part in ["q", "k"] {
                b.optional_tensor(
                    format!("{original}.{from}.{part}_norm.weight"),
                    format!("{block}.{to}.norm_{part}.weight"),
                    Fusion::Same,
                );
            }
        }
        b.module(format!("{original}.mlp.inverted_conv.conv"), format!("{block}.ff.conv_inverted"));
        b.module(format!("{original}.mlp.depth_conv.conv"), format!("{block}.ff.conv_depth"));
        b.weight(format!("{original}.mlp.point_conv.conv"), format!("{block}.ff.conv_point"));
    }
    last(b);
}

/// The projection of the text.
fn caption(b: &mut Builder) {
    for layer in [1, 2] {
        b.module(format!("y_embedder.y_proj.fc{layer}"), format!("caption_projection.linear_{layer}"));
    }
}

fn timestep(b: &mut Builder, original: &str, module: &str) {
    for (place, layer) in [(0, 1), (2, 2)] {
        b.module(format!("{original}.mlp.{place}"), format!("{module}.linear_{layer}"));
    }
}

/// What both have in their attentions, and the block's modulation.
fn attention(b: &mut Builder, original: &str, block: &str) {
    let table = "scale_shift_table";
    b.tensor(format!("{original}.{table}"), format!("{block}.{table}"), Fusion::Same);
    b.rows(&format!("{original}.attn.qkv.weight"), &projections(block, "attn1", &["q", "k", "v"], "weight"));
    b.module(format!("{original}.attn.proj"), format!("{block}.attn1.to_out.0"));
    b.module(format!("{original}.cross_attn.q_linear"), format!("{block}.attn2.to_q"));
    for part in ["weight", "bias"] {
        let names = projections(block, "attn2", &["k", "v"], part);
        b.rows(&format!("{original}.cross_attn.kv_linear.{part}"), &names);
    }
    b.module(format!("{original}.cross_attn.proj"), format!("{block}.attn2.to_out.0"));
}

fn projections(block: &str, attention: &str, names: &[&str], part: &str) -> Vec<String> {
    names.iter().map(|name| format!("{block}.{attention}.to_{name}.{part}")).collect()
}

fn last(b: &mut Builder) {
    b.module("final_layer.linear", "proj_out");
    b.tensor("final_layer.scale_shift_table", "scale_shift_table", Fusion::Same);
}
