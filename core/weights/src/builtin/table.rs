//! The table of built-in models.

use super::{Builtin, Input, InputKind, InputKind::*};
use sdrun_abi::DType::{self, F16, F32, I64};

macro_rules! model {
    ($name:literal, $file:literal, $summary:literal, $inputs:expr) => {
        Builtin {
            name: $name,
            summary: $summary,
            file: $file,
            inputs: &$inputs,
            graph_gz: include_bytes!(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../../models/",
                $file,
                ".graph.onnx.gz"
            )),
            map_gz: include_bytes!(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../../models/",
                $file,
                ".map.json.gz"
            )),
        }
    };
}

const fn input(name: &'static str, dtype: DType, shape: &'static [usize], kind: InputKind) -> Input {
    Input { name, dtype, shape, kind }
}

/// Timestep half way down the training schedule of 1000 steps.
const TIMESTEP: InputKind = Constant(500.0);
/// CLIP's vocabulary: text, begin of text (49406), end of text (49407).
const CLIP_IDS: [Input; 1] =
    [input("input_ids", I64, &[1, 77], TokenIds { first: Some(49_406), last: 49_407, below: 49_406 })];
/// T5's vocabulary; `</s>` is 1.
const T5_IDS: [Input; 1] =
    [input("input_ids", I64, &[1, 512], TokenIds { first: None, last: 1, below: 32_100 })];
const LATENT: [Input; 1] = [input("latent_sample", F32, &[1, 4, 64, 64], Noise)];
const FLUX: [Input; 7] = [
    input("hidden_states", F16, &[1, 1024, 64], Noise),
    input("encoder_hidden_states", F16, &[1, 512, 4096], Noise),
    input("pooled_projections", F16, &[1, 768], Noise),
    input("timestep", F16, &[1], Constant(0.5)),
    input("img_ids", F32, &[1024, 3], Grid),
    input("txt_ids", F32, &[512, 3], Constant(0.0)),
    input("guidance", F16, &[1], Constant(3.5)),
];
const SD3: [Input; 4] = [
    input("hidden_states", F16, &[1, 16, 128, 128], Noise),
    input("encoder_hidden_states", F16, &[1, 333, 4096], Noise),
    input("pooled_projections", F16, &[1, 2048], Noise),
    input("timestep", F16, &[1], TIMESTEP),
];

pub(super) const MODELS: &[Builtin] = &[
    model!(
        "mobilenet-v2",
        "mobilenet_v2",
        "MobileNet v2 1.0, image classifier, 224x224, fp32",
        [input("input", F32, &[1, 3, 224, 224], Picture { low: -2.0, high: 2.0 })]
    ),
    model!(
        "taef2/encoder",
        "taef2_encoder",
        "TAEF2, tiny autoencoder for FLUX.2 latents, encoder, fp32",
        [input("image", F32, &[1, 3, 512, 512], Picture { low: 0.0, high: 1.0 })]
    ),
    model!(
        "taef2/decoder",
        "taef2_decoder",
        "TAEF2, tiny autoencoder for FLUX.2 latents, decoder, fp32",
        [input("latent", F32, &[1, 32, 64, 64], Noise)]
    ),
    model!(
        "sd15/text-encoder",
        "sd15_text_encoder",
        "Stable Diffusion 1.5, CLIP ViT-L text encoder, fp32",
        CLIP_IDS
    ),
    model!(
        "sd15/unet",
        "sd15_unet",
        "Stable Diffusion 1.5, UNet, fp32",
        [
            input("sample", F32, &[1, 4, 64, 64], Noise),
            input("timestep", I64, &[1], TIMESTEP),
            input("encoder_hidden_states", F32, &[1, 77, 768], Noise),
        ]
    ),
    model!(
        "sd15/unet-fp16",
        "sd15_unet_fp16",
        "Stable Diffusion 1.5, UNet, fp16",
        [
            input("sample", F16, &[1, 4, 64, 64], Noise),
            input("timestep", I64, &[1], TIMESTEP),
            input("encoder_hidden_states", F16, &[1, 77, 768], Noise),
        ]
    ),
    model!(
        "sd15/controlnet",
        "sd15_controlnet",
        "Stable Diffusion 1.5, ControlNet, fp32",
        [
            input("sample", F32, &[1, 4, 64, 64], Noise),
            input("timestep", I64, &[1], TIMESTEP),
            input("encoder_hidden_states", F32, &[1, 77, 768], Noise),
            input("controlnet_cond", F32, &[1, 3, 512, 512], Picture { low: 0.0, high: 1.0 }),
            input("conditioning_scale", F32, &[], Constant(0.75)),
        ]
    ),
    model!(
        "sd15/vae-decoder",
        "sd15_vae_decoder",
        "Stable Diffusion 1.5, VAE decoder, 512x512, fp32",
        LATENT
    ),
    model!(
        "sd15/vae-encoder",
        "sd15_vae_encoder",
        "Stable Diffusion 1.5, VAE encoder, 512x512, fp32",
        [input("sample", F32, &[1, 3, 512, 512], Picture { low: -1.0, high: 1.0 })]
    ),
    model!(
        "sd15/text-encoder-tf5",
        "sd15_text_encoder.tf5",
        "sd15/text-encoder exported from transformers 5 (other weight names)",
        CLIP_IDS
    ),
    model!(
        "sd15/text-encoder-dynamo23",
        "sd15_text_encoder.dynamo23",
        "sd15/text-encoder from the torch.export exporter, opset 23",
        CLIP_IDS
    ),
    model!(
        "sd15/vae-decoder-dynamo18",
        "sd15_vae_decoder.dynamo18",
        "sd15/vae-decoder from the torch.export exporter, opset 18",
        LATENT
    ),
    model!(
        "sd15/vae-decoder-dynamo23",
        "sd15_vae_decoder.dynamo23",
        "sd15/vae-decoder from the torch.export exporter, opset 23",
        LATENT
    ),
    model!(
        "sdxl/text-encoder",
        "sdxl_text_encoder_fp16",
        "Stable Diffusion XL, CLIP ViT-L text encoder, fp16",
        CLIP_IDS
    ),
    model!(
        "sdxl/text-encoder-2",
        "sdxl_text_encoder_2_fp16",
        "Stable Diffusion XL, CLIP ViT-bigG text encoder, fp16",
        CLIP_IDS
    ),
    model!(
        "sdxl/unet",
        "sdxl_unet_fp16",
        "Stable Diffusion XL, UNet, fp16",
        [
            input("sample", F16, &[1, 4, 128, 128], Noise),
            input("timestep", I64, &[1], TIMESTEP),
            input("encoder_hidden_states", F16, &[1, 77, 2048], Noise),
            input("text_embeds", F16, &[1, 1280], Noise),
            input("time_ids", F16, &[1, 6], Row(&[1024.0, 1024.0, 0.0, 0.0, 1024.0, 1024.0])),
        ]
    ),
    model!("sd3/medium", "sd3_medium_fp16", "Stable Diffusion 3 medium, transformer, fp16", SD3),
    model!("sd3/medium-4-layers", "sd3_4l_fp16", "the first 4 of sd3/medium's 24 layers, fp16", SD3),
    model!("sd35/large", "sd35_large_fp16", "Stable Diffusion 3.5 large, transformer, fp16", SD3),
    model!("flux/dev", "flux_dev_fp16", "FLUX.1 dev, transformer, 512x512, fp16", FLUX),
    model!("flux/dev-2x2-layers", "flux_2x2_fp16", "2 double and 2 single blocks of flux/dev, fp16", FLUX),
    model!("t5-xxl", "t5xxl_fp16", "T5 v1.1 XXL text encoder of SD 3 and FLUX.1, fp16", T5_IDS),
    model!("t5-xxl-2-layers", "t5xxl_2l_fp16", "the first 2 of t5-xxl's 24 layers, fp16", T5_IDS),
    model!(
        "pixart/sigma",
        "pixart_sigma_fp16",
        "PixArt Sigma XL 2, transformer, 1024x1024, fp16",
        [
            input("hidden_states", F16, &[1, 4, 128, 128], Noise),
            input("encoder_hidden_states", F16, &[1, 300, 4096], Noise),
            input("timestep", F16, &[1], TIMESTEP),
        ]
    ),
    model!(
        "sana/1600m",
        "sana_1600m_fp16",
        "Sana 1.6B, transformer, 1024x1024, fp16",
        [
            input("hidden_states", F16, &[1, 32, 32, 32], Noise),
            input("encoder_hidden_states", F16, &[1, 300, 2304], Noise),
            input("timestep", F16, &[1], TIMESTEP),
        ]
    ),
];
