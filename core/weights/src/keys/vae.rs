//! Autoencoders: `AutoencoderKL` of the original implementations against diffusers', the tiny autoencoders (TAESD and its
//! relatives) against `AutoencoderTiny`, and `AutoencoderDC` in diffusers' layout.

use super::{Fusion, builder::Builder};

pub(super) fn kl(b: &mut Builder) {
    for (half, way, from, to) in [("encoder", "down", "down", "down"), ("decoder", "up", "up", "up")] {
        if !b.any(&format!("{half}."), &format!("{half}.")) {
            continue;
        }
        for part in ["conv_in", "conv_out"] {
            b.module(format!("{half}.{part}"), format!("{half}.{part}"));
        }
        b.module(format!("{half}.norm_out"), format!("{half}.conv_norm_out"));
        middle(b, half);
        let levels = b.count(&format!("{half}.{from}"), &format!("{half}.{to}_blocks"));
        for level in 0..levels {
            // The original numbers levels by resolution, so the decoder's run backwards.
            let number = if way == "up" { levels - 1 - level } else { level };
            let (original, block) =
                (format!("{half}.{from}.{number}"), format!("{half}.{to}_blocks.{level}"));
            let layers = b.count(&format!("{original}.block"), &format!("{block}.resnets"));
            for layer in 0..layers {
                residual(b, &format!("{original}.block.{layer}"), &format!("{block}.resnets.{layer}"));
            }
            b.optional_module(
                format!("{original}.{way}sample.conv"),
                format!("{block}.{way}samplers.0.conv"),
            );
        }
    }
    for part in ["quant_conv", "post_quant_conv"] {
        b.optional_module(part, part);
    }
}

fn middle(b: &mut Builder, half: &str) {
    for layer in 0..2 {
        let original = format!("{half}.mid.block_{}", layer + 1);
        residual(b, &original, &format!("{half}.mid_block.resnets.{layer}"));
    }
    let (original, module) = (format!("{half}.mid.attn_1"), format!("{half}.mid_block.attentions.0"));
    if !b.any(&format!("{original}."), &format!("{module}.")) {
        return;
    }
    b.module(format!("{original}.norm"), format!("{module}.group_norm"));
    for (from, to) in [("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "to_out.0")] {
        let (from, to) = (format!("{original}.{from}"), format!("{module}.{to}"));
        b.tensor(format!("{from}.weight"), format!("{to}.weight"), Fusion::Conv1x1);
        b.tensor(format!("{from}.bias"), format!("{to}.bias"), Fusion::Same);
    }
}

fn residual(b: &mut Builder, original: &str, resnet: &str) {
    for part in ["norm1", "conv1", "norm2", "conv2"] {
        b.module(format!("{original}.{part}"), format!("{resnet}.{part}"));
    }
    b.optional_module(format!("{original}.nin_shortcut"), format!("{resnet}.conv_shortcut"));
}

/// Both are one sequence of layers; layers without weights are numbered too. The original's decoder begins with a clamp,
/// which is no layer in diffusers. (`taesd.py`, github.com/madebyollin/taesd.)
pub(super) fn tiny(b: &mut Builder) {
    for (half, first) in [("encoder", 0), ("decoder", 1)] {
        let (original, module) = (format!("taesd_{half}"), format!("{half}.layers"));
        let places = b.count(&original, &module);
        for place in first..places + first {
            // In either naming, the sequence ends at or before this place.
            let (original, module) = (format!("{original}.{place}"), format!("{module}.{}", place - first));
            // `pool` belongs to TAEF2, which has wider blocks in the middle.
            for part in ["", ".conv.0", ".conv.2", ".conv.4", ".skip", ".pool.0", ".pool.1", ".pool.3"] {
                b.optional_module(format!("{original}{part}"), format!("{module}{part}"));
            }
        }
    }
}

/// Levels are sequences of layers: residual blocks, attentions, and the convolution that changes the size.
pub(super) fn deep(b: &mut Builder) {
    for (half, way) in [("encoder", "down"), ("decoder", "up")] {
        if !b.any(&format!("{half}."), &format!("{half}.")) {
            continue;
        }
        same(b, &format!("{half}.conv_in"));
        let blocks = format!("{half}.{way}_blocks");
        for level in 0..b.count(&blocks, &blocks) {
            let level = format!("{blocks}.{level}");
            for layer in 0..b.count(&level, &level) {
                deep_layer(b, &format!("{level}.{layer}"));
            }
        }
        if half == "decoder" {
            same(b, "decoder.norm_out");
        }
        same(b, &format!("{half}.conv_out"));
    }
}

fn deep_layer(b: &mut Builder, layer: &str) {
    let has = |b: &Builder, part: &str| b.any(&format!("{layer}.{part}."), &format!("{layer}.{part}."));
    let weight = |b: &mut Builder, part: &str| b.weight(format!("{layer}.{part}"), format!("{layer}.{part}"));
    if has(b, "conv1") {
        same(b, &format!("{layer}.conv1"));
        weight(b, "conv2");
        same(b, &format!("{layer}.norm"));
    } else if has(b, "attn") {
        for part in ["to_q", "to_k", "to_v", "to_out"] {
            weight(b, &format!("attn.{part}"));
        }
        let scales = format!("{layer}.attn.to_qkv_multiscale");
        for scale in 0..b.count(&scales, &scales) {
            for part in ["proj_in", "proj_out"] {
                weight(b, &format!("attn.to_qkv_multiscale.{scale}.{part}"));
            }
        }
        for part in ["attn.norm_out", "conv_out.conv_inverted", "conv_out.conv_depth", "conv_out.norm"] {
            same(b, &format!("{layer}.{part}"));
        }
        weight(b, "conv_out.conv_point");
    } else {
        same(b, &format!("{layer}.conv"));
    }
}

/// A module of the same name in both layouts.
fn same(b: &mut Builder, module: &str) {
    b.module(module, module);
}
