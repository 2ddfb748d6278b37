//! UNet of SD 1.x, 2.x and XL, and ControlNet: `openaimodel.py` and `cldm.py` of the original implementations against
//! `UNet2DConditionModel` and `ControlNetModel`.
//!
//! The original numbers all layers of the way down in one sequence (`input_blocks.N`: the first convolution, then
//! residual blocks, with `op` at the end of each level but the last), and all of the way up in another.

use super::{Fusion, Naming, builder::Builder};

pub(super) fn unet(b: &mut Builder) {
    way_down(b);
    way_up(b);
    b.module("out.0", "conv_norm_out");
    b.module("out.2", "conv_out");
}

pub(super) fn controlnet(b: &mut Builder) {
    let layers = way_down(b);
    // Hint encoder: convolutions at even places, activations between them.
    let blocks = match b.naming() {
        Naming::Diffusers => b.count("", "controlnet_cond_embedding.blocks"),
        // Places 0, 2, 4, …; the last is `conv_out`.
        Naming::Original => {
            let mut places = 0;
            while b.any(&format!("input_hint_block.{}.", 2 * places), "") {
                places += 1;
            }
            usize::saturating_sub(places, 2)
        }
    };
    let hint = "controlnet_cond_embedding";
    b.module("input_hint_block.0", format!("{hint}.conv_in"));
    for block in 0..blocks {
        b.module(format!("input_hint_block.{}", 2 * (block + 1)), format!("{hint}.blocks.{block}"));
    }
    b.module(format!("input_hint_block.{}", 2 * (blocks + 1)), format!("{hint}.conv_out"));
    for layer in 0..layers {
        b.module(format!("zero_convs.{layer}.0"), format!("controlnet_down_blocks.{layer}"));
    }
    b.module("middle_block_out.0", "controlnet_mid_block");
}

/// Embeddings, the way down and the middle. Returns the number of input blocks.
fn way_down(b: &mut Builder) -> usize {
    b.module("time_embed.0", "time_embedding.linear_1");
    b.module("time_embed.2", "time_embedding.linear_2");
    // Distilled guidance (latent consistency models).
    b.optional_tensor("time_embed.cond_proj.weight", "time_embedding.cond_proj.weight", Fusion::Same);
    // Size and pooled-text conditioning of SD XL.
    if b.any("label_emb.0.", "add_embedding.") {
        b.module("label_emb.0.0", "add_embedding.linear_1");
        b.module("label_emb.0.2", "add_embedding.linear_2");
    }
    b.module("input_blocks.0.0", "conv_in");

    let mut n = 1;
    for level in 0.. {
        let block = format!("down_blocks.{level}");
        for layer in 0.. {
            let (original, resnet) = (format!("input_blocks.{n}.0"), format!("{block}.resnets.{layer}"));
            if !b.any(&format!("{original}.in_layers."), &format!("{resnet}.")) {
                break;
            }
            residual(b, &original, &resnet);
            attention(b, &format!("input_blocks.{n}.1"), &format!("{block}.attentions.{layer}"));
            n += 1;
        }
        let (original, sampler) = (format!("input_blocks.{n}.0.op"), format!("{block}.downsamplers.0.conv"));
        let sampled = b.any(&format!("{original}."), &format!("{sampler}."));
        if sampled {
            b.module(original, sampler);
            n += 1;
        }
        // Only diffusers' names show a level that follows without sampling in between.
        let follows = b.naming() == Naming::Diffusers && b.any("", &format!("down_blocks.{}.", level + 1));
        if !sampled && !follows {
            break;
        }
    }

    for layer in 0.. {
        let (original, resnet) =
            (format!("middle_block.{}", 2 * layer), format!("mid_block.resnets.{layer}"));
        if !b.any(&format!("{original}.in_layers."), &format!("{resnet}.")) {
            break;
        }
        residual(b, &original, &resnet);
        let original = format!("middle_block.{}", 2 * layer + 1);
        attention(b, &original, &format!("mid_block.attentions.{layer}"));
    }
    n
}

fn way_up(b: &mut Builder) {
    let mut n = 0;
    for level in 0.. {
        let block = format!("up_blocks.{level}");
        let mut follows = false;
        for layer in 0.. {
            let (original, resnet) = (format!("output_blocks.{n}"), format!("{block}.resnets.{layer}"));
            if !b.any(&format!("{original}.0.in_layers."), &format!("{resnet}.")) {
                break;
            }
            residual(b, &format!("{original}.0"), &resnet);
            let attends = attention(b, &format!("{original}.1"), &format!("{block}.attentions.{layer}"));
            n += 1;
            // Sampling comes last in the level's last layer.
            let next = format!("{block}.resnets.{}.", layer + 1);
            if b.naming() == Naming::Diffusers && b.any("", &next) {
                continue;
            }
            let original = format!("{original}.{}.conv", if attends { 2 } else { 1 });
            let sampler = format!("{block}.upsamplers.0.conv");
            if b.any(&format!("{original}."), &format!("{sampler}.")) {
                b.module(original, sampler);
                follows = true;
                break;
            }
        }
        follows |= b.naming() == Naming::Diffusers && b.any("", &format!("up_blocks.{}.", level + 1));
        if !follows {
            break;
        }
    }
}

/// `ResBlock` and `ResnetBlock2D`.
fn residual(b: &mut Builder, original: &str, resnet: &str) {
    for (from, to) in [
        ("in_layers.0", "norm1"),
        ("in_layers.2", "conv1"),
        ("emb_layers.1", "time_emb_proj"),
        ("out_layers.0", "norm2"),
        ("out_layers.3", "conv2"),
    ] {
        b.module(format!("{original}.{from}"), format!("{resnet}.{to}"));
    }
    b.optional_module(format!("{original}.skip_connection"), format!("{resnet}.conv_shortcut"));
}

/// `SpatialTransformer` and `Transformer2DModel`, which name their parts alike. False if there is none.
fn attention(b: &mut Builder, original: &str, module: &str) -> bool {
    // The place after a residual block without attention may hold the level's sampling.
    if !b.any(&format!("{original}.transformer_blocks."), &format!("{module}.")) {
        return false;
    }
    for part in ["norm", "proj_in", "proj_out"] {
        b.module(format!("{original}.{part}"), format!("{module}.{part}"));
    }
    let depth = b.count(&format!("{original}.transformer_blocks"), &format!("{module}.transformer_blocks"));
    for index in 0..depth {
        let block = |part: &str| {
            let path = format!("transformer_blocks.{index}.{part}");
            (format!("{original}.{path}"), format!("{module}.{path}"))
        };
        for part in
            ["norm1", "norm2", "norm3", "attn1.to_out.0", "attn2.to_out.0", "ff.net.0.proj", "ff.net.2"]
        {
            let (original, module) = block(part);
            b.module(original, module);
        }
        for attention in ["attn1", "attn2"] {
            for projection in ["to_q", "to_k", "to_v"] {
                let (original, module) = block(&format!("{attention}.{projection}"));
                b.weight(&original, &module);
                b.optional_tensor(format!("{original}.bias"), format!("{module}.bias"), Fusion::Same);
            }
        }
    }
    true
}
