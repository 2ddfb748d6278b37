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
            graph_xz: include_bytes!(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/models/",
                $file,
                ".graph.onnx.xz"
            )),
            map_xz: include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/models/", $file, ".map.json.xz")),
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
/// The demo model's vocabulary.
const DEMO_IDS: [Input; 1] =
    [input("input_ids", I64, &[1, 77], TokenIds { first: Some(627), last: 628, below: 627 })];
/// T5's vocabulary; `</s>` is 1.
const T5_IDS: [Input; 1] =
    [input("input_ids", I64, &[1, 512], TokenIds { first: None, last: 1, below: 32_100 })];
const T5_MASKED: [Input; 2] = [T5_IDS[0], input("attention_mask", I64, &[1, 512], Constant(1.0))];
/// Gemma's vocabulary; its mark before a text is 2.
const GEMMA_IDS: [Input; 1] =
    [input("input_ids", I64, &[1, 512], TokenIds { first: Some(2), last: 1, below: 256_000 })];
const LATENT: [Input; 1] = [input("latent_sample", F32, &[1, 4, 64, 64], Noise)];
const LATENT_1024: [Input; 1] = [input("latent_sample", F32, &[1, 4, 128, 128], Noise)];
const LATENT16: [Input; 1] = [input("latent_sample", F32, &[1, 16, 128, 128], Noise)];
const PICTURE: [Input; 1] = [input("sample", F32, &[1, 3, 512, 512], Picture { low: -1.0, high: 1.0 })];
const PICTURE_1024: [Input; 1] =
    [input("sample", F32, &[1, 3, 1024, 1024], Picture { low: -1.0, high: 1.0 })];
const UPSCALED: [Input; 1] = [input("image", F32, &[1, 3, 128, 128], Picture { low: 0.0, high: 1.0 })];
const SD15: [Input; 3] = [
    input("sample", F32, &[1, 4, 64, 64], Noise),
    input("timestep", F32, &[1], TIMESTEP),
    input("encoder_hidden_states", F32, &[1, 77, 768], Noise),
];
const DEMO: [Input; 3] = [
    input("sample", F32, &[1, 4, 8, 8], Noise),
    SD15[1],
    input("encoder_hidden_states", F32, &[1, 77, 128], Noise),
];
const SD21_TEXT: Input = input("encoder_hidden_states", F32, &[1, 77, 1024], Noise);
const SDXL: [Input; 5] = [
    input("sample", F16, &[1, 4, 128, 128], Noise),
    input("timestep", F32, &[1], TIMESTEP),
    input("encoder_hidden_states", F16, &[1, 77, 2048], Noise),
    input("text_embeds", F16, &[1, 1280], Noise),
    input("time_ids", F32, &[1, 6], Row(&[1024.0, 1024.0, 0.0, 0.0, 1024.0, 1024.0])),
];
const FLUX: [Input; 7] = [
    input("hidden_states", F16, &[1, 1024, 64], Noise),
    input("encoder_hidden_states", F16, &[1, 512, 4096], Noise),
    input("pooled_projections", F16, &[1, 768], Noise),
    input("timestep", F32, &[1], Constant(0.5)),
    input("img_ids", F32, &[1024, 3], Grid),
    input("txt_ids", F32, &[512, 3], Constant(0.0)),
    input("guidance", F32, &[1], Constant(3.5)),
];
/// Flux with other latents.
const fn flux(latents: &'static [usize]) -> [Input; 7] {
    let mut inputs = FLUX;
    inputs[0].shape = latents;
    inputs
}
/// Flux without guidance: schnell.
const FLUX_SCHNELL: [Input; 6] = [FLUX[0], FLUX[1], FLUX[2], FLUX[3], FLUX[4], FLUX[5]];
/// Flux without guidance and pooled text.
const CHROMA: [Input; 5] = [FLUX[0], FLUX[1], FLUX[3], FLUX[4], FLUX[5]];
const SD3: [Input; 4] = [
    input("hidden_states", F16, &[1, 16, 128, 128], Noise),
    input("encoder_hidden_states", F16, &[1, 333, 4096], Noise),
    input("pooled_projections", F16, &[1, 2048], Noise),
    SD15[1],
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
    model!("demo/text-encoder", "demo_text_encoder", "the demo model, CLIP text encoder, fp32", DEMO_IDS),
    model!("demo/unet", "demo_unet", "the demo model, UNet, fp32", DEMO),
    model!(
        "demo/unet-controlnet",
        "demo_unet_controlnet",
        "demo/unet with the residuals of a ControlNet as inputs, fp32",
        [
            DEMO[0],
            DEMO[1],
            DEMO[2],
            input("down_block_0_res", F32, &[1, 48, 8, 8], Noise),
            input("down_block_1_res", F32, &[1, 48, 8, 8], Noise),
            input("down_block_2_res", F32, &[1, 48, 4, 4], Noise),
            input("down_block_3_res", F32, &[1, 96, 4, 4], Noise),
            input("mid_block_res", F32, &[1, 96, 4, 4], Noise)
        ]
    ),
    model!(
        "demo/controlnet",
        "demo_controlnet",
        "the demo model, ControlNet, fp32",
        [
            DEMO[0],
            DEMO[1],
            DEMO[2],
            input("controlnet_cond", F32, &[1, 3, 64, 64], Picture { low: 0.0, high: 1.0 }),
            input("conditioning_scale", F32, &[], Constant(0.75)),
        ]
    ),
    model!(
        "demo/vae-decoder",
        "demo_vae_decoder",
        "the demo model, VAE decoder, 64x64, fp32",
        [input("latent_sample", F32, &[1, 4, 8, 8], Noise)]
    ),
    model!(
        "demo/vae-encoder",
        "demo_vae_encoder",
        "the demo model, VAE encoder, 64x64, fp32",
        [input("sample", F32, &[1, 3, 64, 64], Picture { low: -1.0, high: 1.0 })]
    ),
    model!(
        "sd15/text-encoder",
        "sd15_text_encoder",
        "Stable Diffusion 1.5, CLIP ViT-L text encoder, fp32",
        CLIP_IDS
    ),
    model!("sd15/unet", "sd15_unet", "Stable Diffusion 1.5, UNet, fp32", SD15),
    model!(
        "sd15/unet-fp16",
        "sd15_unet_fp16",
        "Stable Diffusion 1.5, UNet, fp16",
        [
            input("sample", F16, &[1, 4, 64, 64], Noise),
            SD15[1],
            input("encoder_hidden_states", F16, &[1, 77, 768], Noise),
        ]
    ),
    model!(
        "sd15/unet-inpainting",
        "sd15_unet_inpainting",
        "Stable Diffusion 1.5 inpainting, UNet, fp32: latent, mask and latent of the masked picture",
        [input("sample", F32, &[1, 9, 64, 64], Noise), SD15[1], SD15[2]]
    ),
    model!(
        "sd15/unet-lcm",
        "sd15_unet_lcm",
        "Stable Diffusion 1.5 latent consistency model, UNet, fp32: the guidance scale is an input",
        [SD15[0], SD15[1], SD15[2], input("timestep_cond", F32, &[1, 256], Noise)]
    ),
    model!(
        "sd15/unet-controlnet",
        "sd15_unet_controlnet",
        "sd15/unet with the residuals of a ControlNet as inputs, fp32",
        [
            SD15[0],
            SD15[1],
            SD15[2],
            input("down_block_0_res", F32, &[1, 320, 64, 64], Noise),
            input("down_block_1_res", F32, &[1, 320, 64, 64], Noise),
            input("down_block_2_res", F32, &[1, 320, 64, 64], Noise),
            input("down_block_3_res", F32, &[1, 320, 32, 32], Noise),
            input("down_block_4_res", F32, &[1, 640, 32, 32], Noise),
            input("down_block_5_res", F32, &[1, 640, 32, 32], Noise),
            input("down_block_6_res", F32, &[1, 640, 16, 16], Noise),
            input("down_block_7_res", F32, &[1, 1280, 16, 16], Noise),
            input("down_block_8_res", F32, &[1, 1280, 16, 16], Noise),
            input("down_block_9_res", F32, &[1, 1280, 8, 8], Noise),
            input("down_block_10_res", F32, &[1, 1280, 8, 8], Noise),
            input("down_block_11_res", F32, &[1, 1280, 8, 8], Noise),
            input("mid_block_res", F32, &[1, 1280, 8, 8], Noise)
        ]
    ),
    model!(
        "sd15/controlnet",
        "sd15_controlnet",
        "Stable Diffusion 1.5, ControlNet, fp32",
        [
            SD15[0],
            SD15[1],
            SD15[2],
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
        PICTURE
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
        "sd21/text-encoder",
        "sd21_text_encoder",
        "Stable Diffusion 2.1, OpenCLIP ViT-H text encoder, fp32",
        CLIP_IDS
    ),
    model!(
        "sd21/unet",
        "sd21_unet",
        "Stable Diffusion 2.1, UNet, 768x768, fp32",
        [input("sample", F32, &[1, 4, 96, 96], Noise), SD15[1], SD21_TEXT]
    ),
    model!(
        "sd21/unet-inpainting",
        "sd21_unet_inpainting",
        "Stable Diffusion 2 inpainting, UNet, fp32: latent, mask and latent of the masked picture",
        [input("sample", F32, &[1, 9, 64, 64], Noise), SD15[1], SD21_TEXT]
    ),
    model!(
        "sd21/unet-depth",
        "sd21_unet_depth",
        "Stable Diffusion 2 depth, UNet, fp32: latent and depth",
        [input("sample", F32, &[1, 5, 64, 64], Noise), SD15[1], SD21_TEXT]
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
        "sd3/text-encoder",
        "sd3_text_encoder_fp16",
        "Stable Diffusion 3 and 3.5, CLIP ViT-L text encoder with its projection, fp16",
        CLIP_IDS
    ),
    model!("sdxl/unet", "sdxl_unet_fp16", "Stable Diffusion XL, UNet, fp16", SDXL),
    model!(
        "sdxl/unet-inpainting",
        "sdxl_unet_inpainting_fp16",
        "Stable Diffusion XL inpainting, UNet, fp16: latent, mask and latent of the masked picture",
        [input("sample", F16, &[1, 9, 128, 128], Noise), SDXL[1], SDXL[2], SDXL[3], SDXL[4]]
    ),
    model!(
        "sdxl/unet-lcm",
        "sdxl_unet_lcm_fp16",
        "Stable Diffusion XL latent consistency model, UNet, fp16: the guidance scale is an input",
        [SDXL[0], SDXL[1], SDXL[2], SDXL[3], SDXL[4], input("timestep_cond", F16, &[1, 256], Noise)]
    ),
    model!(
        "sdxl/refiner",
        "sdxl_refiner_fp16",
        "Stable Diffusion XL refiner, UNet, fp16",
        [
            SDXL[0],
            SDXL[1],
            input("encoder_hidden_states", F16, &[1, 77, 1280], Noise),
            SDXL[3],
            input("time_ids", F32, &[1, 5], Row(&[1024.0, 1024.0, 0.0, 0.0, 6.0]))
        ]
    ),
    model!(
        "sdxl/unet-controlnet",
        "sdxl_unet_controlnet_fp16",
        "sdxl/unet with the residuals of a ControlNet as inputs, fp16",
        [
            SDXL[0],
            SDXL[1],
            SDXL[2],
            SDXL[3],
            SDXL[4],
            input("down_block_0_res", F16, &[1, 320, 128, 128], Noise),
            input("down_block_1_res", F16, &[1, 320, 128, 128], Noise),
            input("down_block_2_res", F16, &[1, 320, 128, 128], Noise),
            input("down_block_3_res", F16, &[1, 320, 64, 64], Noise),
            input("down_block_4_res", F16, &[1, 640, 64, 64], Noise),
            input("down_block_5_res", F16, &[1, 640, 64, 64], Noise),
            input("down_block_6_res", F16, &[1, 640, 32, 32], Noise),
            input("down_block_7_res", F16, &[1, 1280, 32, 32], Noise),
            input("down_block_8_res", F16, &[1, 1280, 32, 32], Noise),
            input("mid_block_res", F16, &[1, 1280, 32, 32], Noise)
        ]
    ),
    model!(
        "sdxl/controlnet",
        "sdxl_controlnet_fp16",
        "Stable Diffusion XL, ControlNet, fp16",
        [
            SDXL[0],
            SDXL[1],
            SDXL[2],
            input("controlnet_cond", F16, &[1, 3, 1024, 1024], Picture { low: 0.0, high: 1.0 }),
            input("conditioning_scale", F16, &[], Constant(0.75)),
            SDXL[3],
            SDXL[4]
        ]
    ),
    model!(
        "sdxl/vae-decoder",
        "sd15_vae_decoder",
        "Stable Diffusion XL, VAE decoder, fp32 (the graph of sd15/vae-decoder)",
        LATENT_1024
    ),
    model!(
        "sdxl/vae-encoder",
        "sd15_vae_encoder",
        "Stable Diffusion XL, VAE encoder, fp32 (the graph of sd15/vae-encoder)",
        PICTURE_1024
    ),
    model!(
        "sd3/vae-decoder",
        "sd3_vae_decoder",
        "Stable Diffusion 3, 16-channel VAE decoder, fp32",
        LATENT16
    ),
    model!(
        "sd3/vae-encoder",
        "sd3_vae_encoder",
        "Stable Diffusion 3, 16-channel VAE encoder, fp32",
        PICTURE_1024
    ),
    model!("sd3/medium", "sd3_medium_fp16", "Stable Diffusion 3 medium, transformer, fp16", SD3),
    model!("sd3/medium-4-layers", "sd3_4l_fp16", "the first 4 of sd3/medium's 24 layers, fp16", SD3),
    model!("sd35/medium", "sd35_medium_fp16", "Stable Diffusion 3.5 medium, transformer, fp16", SD3),
    model!("sd35/large", "sd35_large_fp16", "Stable Diffusion 3.5 large, transformer, fp16", SD3),
    model!("flux/dev", "flux_dev_fp16", "FLUX.1 dev, transformer, 512x512, fp16", FLUX),
    model!("flux/dev-2x2-layers", "flux_2x2_fp16", "2 double and 2 single blocks of flux/dev, fp16", FLUX),
    model!(
        "flux/fill",
        "flux_fill_fp16",
        "FLUX.1 Fill, transformer, 512x512, fp16: latent, latent of the masked picture and mask",
        flux(&[1, 1024, 384])
    ),
    model!(
        "flux/canny-depth",
        "flux_canny_depth_fp16",
        "FLUX.1 Canny and Depth, transformer, 512x512, fp16: latent and that of edges or depths",
        flux(&[1, 1024, 128])
    ),
    model!("flux/schnell", "flux_schnell_fp16", "FLUX.1 schnell, transformer, 512x512, fp16", FLUX_SCHNELL),
    model!(
        "flux/vae-decoder",
        "sd3_vae_decoder",
        "FLUX.1, VAE decoder, fp32 (the graph of sd3/vae-decoder)",
        LATENT16
    ),
    model!(
        "flux/vae-encoder",
        "sd3_vae_encoder",
        "FLUX.1, VAE encoder, fp32 (the graph of sd3/vae-encoder)",
        PICTURE_1024
    ),
    model!("chroma", "chroma_fp16", "Chroma, transformer, 512x512, fp16", CHROMA),
    model!(
        "taesd/encoder",
        "taesd_encoder",
        "TAESD, tiny autoencoder of SD 1, 2 and XL, encoder, fp32",
        PICTURE
    ),
    model!(
        "taesd/decoder",
        "taesd_decoder",
        "TAESD, tiny autoencoder of SD 1, 2 and XL, decoder, fp32",
        LATENT
    ),
    model!(
        "taesd3/encoder",
        "taesd3_encoder",
        "TAESD of SD 3 and FLUX.1, 16 channels, encoder, fp32",
        PICTURE_1024
    ),
    model!(
        "taesd3/decoder",
        "taesd3_decoder",
        "TAESD of SD 3 and FLUX.1, 16 channels, decoder, fp32",
        LATENT16
    ),
    model!("esrgan/x4", "esrgan_x4", "ESRGAN and Real-ESRGAN, upscaler, x4, fp32", UPSCALED),
    model!(
        "esrgan/x4-6-blocks",
        "esrgan_x4_6b",
        "esrgan/x4 with 6 blocks instead of 23 (Real-ESRGAN anime), fp32",
        UPSCALED
    ),
    model!(
        "esrgan/x2",
        "esrgan_x2",
        "Real-ESRGAN, upscaler, x2, fp32",
        [input("image", F32, &[1, 3, 256, 256], Picture { low: 0.0, high: 1.0 })]
    ),
    model!("t5-xxl", "t5xxl_fp16", "T5 v1.1 XXL text encoder of SD 3 and FLUX.1, fp16", T5_IDS),
    model!(
        "t5-xxl-masked",
        "t5xxl_masked_fp16",
        "t5-xxl with an attention mask, as Chroma and PixArt use it, fp16",
        T5_MASKED
    ),
    model!("t5-xxl-2-layers", "t5xxl_2l_fp16", "the first 2 of t5-xxl's 24 layers, fp16", T5_IDS),
    model!(
        "pixart/sigma",
        "pixart_sigma_fp16",
        "PixArt Sigma XL 2, transformer, 1024x1024, fp16",
        [
            input("hidden_states", F16, &[1, 4, 128, 128], Noise),
            input("encoder_hidden_states", F16, &[1, 300, 4096], Noise),
            SD15[1],
        ]
    ),
    model!(
        "sana/1600m",
        "sana_1600m_fp16",
        "Sana 1.6B, transformer, 1024x1024, fp16",
        [
            input("hidden_states", F16, &[1, 32, 32, 32], Noise),
            input("encoder_hidden_states", F16, &[1, 300, 2304], Noise),
            SD15[1],
        ]
    ),
    model!(
        "sana/vae-decoder",
        "sana_vae_decoder",
        "Sana, deep compression autoencoder (DC-AE), decoder, fp32",
        [input("latent_sample", F32, &[1, 32, 32, 32], Noise)]
    ),
    model!(
        "sana/vae-encoder",
        "sana_vae_encoder",
        "Sana, deep compression autoencoder (DC-AE), encoder, fp32",
        PICTURE_1024
    ),
    model!("gemma2-2b", "gemma2_2b_fp16", "Gemma 2 2B as text encoder of Sana, fp16", GEMMA_IDS),
];
