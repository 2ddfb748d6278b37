"""The small pipelines of tests/tiny in diffusers, with weights by the rule of core/weights/models/README.md."""

import pathlib
import sys

import diffusers
import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "export"))
import synth  # noqa: E402

VOCABULARY = 2048
# Start and end of text. The encoders find their pooled state at the end.
START, END = VOCABULARY - 2, VOCABULARY - 1


def clip(hidden_act="quick_gelu"):
    return transformers.CLIPTextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, projection_dim=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=77, hidden_act=hidden_act, layer_norm_eps=1e-5, bos_token_id=START, eos_token_id=END, pad_token_id=END,
    )


def t5(width):
    return transformers.T5Config(
        vocab_size=1104, d_model=width, d_kv=16, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0, layer_norm_epsilon=1e-6,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, pad_token_id=0, eos_token_id=1,
    )


def vae(latent_channels=4, quant=True, **settings):
    return diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[16, 16, 32, 32], layers_per_block=1, act_fn="silu", latent_channels=latent_channels, norm_num_groups=8,
        sample_size=128, use_quant_conv=quant, use_post_quant_conv=quant, **settings,
    )


def unet(in_channels=4, **settings):
    return diffusers.UNet2DConditionModel(
        sample_size=16, in_channels=in_channels, out_channels=4, down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],
        up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"], block_out_channels=[32, 64], layers_per_block=1, norm_num_groups=16,
        norm_eps=1e-5, cross_attention_dim=32, attention_head_dim=4, **settings,
    )


def controlnet():
    return diffusers.ControlNetModel(
        in_channels=4, conditioning_channels=3, down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"], only_cross_attention=False,
        block_out_channels=[32, 64], layers_per_block=1, norm_num_groups=16, norm_eps=1e-5, cross_attention_dim=32,
        attention_head_dim=4, conditioning_embedding_out_channels=[8, 8, 16, 16],
    )


def sdxl_unet(in_channels=4, text=64, sizes=6):
    return diffusers.UNet2DConditionModel(
        sample_size=16, in_channels=in_channels, out_channels=4, down_block_types=["DownBlock2D", "CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D", "UpBlock2D"], block_out_channels=[32, 64], layers_per_block=1, norm_num_groups=16,
        norm_eps=1e-5, cross_attention_dim=text, attention_head_dim=[4, 8], transformer_layers_per_block=[1, 2],
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=8 * sizes + 32,
    )


def sd3_transformer(**settings):
    return diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=16, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=64, caption_projection_dim=32, pooled_projection_dim=64, out_channels=16, pos_embed_max_size=32, **settings,
    )


def flux_transformer(in_channels=64, **settings):
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=in_channels, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=[4, 6, 6],
        **settings,
    )


def chroma_transformer():
    return diffusers.ChromaTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 6, 6), approximator_num_channels=8, approximator_hidden_dim=32, approximator_layers=2,
    )


def pixart_transformer():
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=32, sample_size=8,
        patch_size=2, norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6, interpolation_scale=2,
        use_additional_conditions=False, caption_channels=32,
    )


def gemma():
    """Its cap is near the scores, so that they feel it."""
    return transformers.Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, query_pre_attn_scalar=16, attn_logit_softcapping=2.0, sliding_window=4096, attn_implementation="eager",
    )


def dc_ae():
    attending, widths = ((),) * 3 + ((5,),) * 3, (8, 8, 16, 16, 32, 64)
    blocks = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
    return diffusers.AutoencoderDC(
        latent_channels=32, attention_head_dim=8, encoder_block_types=blocks, decoder_block_types=blocks, encoder_block_out_channels=widths,
        decoder_block_out_channels=widths, encoder_layers_per_block=(1,) * 6, decoder_layers_per_block=(1,) * 6,
        encoder_qkv_multiscales=attending, decoder_qkv_multiscales=attending, downsample_block_type="conv",
        upsample_block_type="interpolate", scaling_factor=0.41407,
    )


def sana_transformer():
    return diffusers.SanaTransformer2DModel(
        in_channels=32, out_channels=32, num_attention_heads=4, attention_head_dim=8, num_layers=2, num_cross_attention_heads=2,
        cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=32, mlp_ratio=2.5, sample_size=32, patch_size=1,
    )


# Denoisers of models that share the other networks with a small pipeline: place in tests/tiny, and the module.
DENOISERS = {
    "sd/unet_inpainting": lambda: unet(9),
    "sd/unet_lcm": lambda: unet(time_cond_proj_dim=16),
    "sd/unet_depth": lambda: unet(5),
    "sdxl/unet_inpainting": lambda: sdxl_unet(9),
    "sdxl/unet_refiner": lambda: sdxl_unet(text=32, sizes=5),
    "sdxl/transformer_pixart": pixart_transformer,
    "sd3/transformer_35": lambda: sd3_transformer(qk_norm="rms_norm", dual_attention_layers=(0,)),
    "flux/transformer_fill": lambda: flux_transformer(64 + 64 + 256, out_channels=64),
    "flux/transformer_control": lambda: flux_transformer(64 + 64, out_channels=64),
    "flux/transformer_chroma": chroma_transformer,
}


def denoiser(place):
    """One of them with weights A."""
    return filled(DENOISERS[place](), f"tiny-{place.replace('/', '-')}/A", tables=True)


def filled(module, tag, tables=False):
    """Gives a module the weights of checkpoint `tag`. B is rounded to f16 as in its files. With `tables`, a table of positions has the
    weights of the rule too, as in export.py."""
    seen = set()
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            # Tied tensors have the first name.
            if not tensor.is_floating_point() or tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
            # Models compute their table of positions themselves.
            if tables or not name.endswith("pos_embed.pos_embed"):
                tensor.copy_(torch.from_numpy(synth.weight(tag, name, tuple(tensor.shape))))
            if tag.endswith("/B"):
                tensor.copy_(tensor.half().float())
    return module.eval().requires_grad_(False)


def modules(family, checkpoint):
    """The modules of a family with checkpoint A or B, by their names in a diffusers folder."""
    text, projected = transformers.CLIPTextModel, transformers.CLIPTextModelWithProjection
    made = {
        "sd": lambda: {"text_encoder": text(clip()), "unet": unet(), "vae": vae(), "controlnet": controlnet()},
        "sdxl": lambda: {
            "text_encoder": text(clip()), "text_encoder_2": projected(clip("gelu")), "unet": sdxl_unet(),
            "vae": vae(scaling_factor=0.13025),
        },
        "sd3": lambda: {
            "text_encoder": projected(clip()), "text_encoder_2": projected(clip("gelu")),
            "text_encoder_3": transformers.T5EncoderModel(t5(64)), "transformer": sd3_transformer(),
            "vae": vae(16, False, scaling_factor=1.5305, shift_factor=0.0609),
        },
        "flux": lambda: {
            "text_encoder": text(clip()), "text_encoder_2": transformers.T5EncoderModel(t5(32)), "transformer": flux_transformer(),
            "vae": vae(16, False, scaling_factor=0.3611, shift_factor=0.1159),
        },
        "sana": lambda: {"text_encoder": transformers.Gemma2Model(gemma()), "transformer": sana_transformer(), "vae": dc_ae()},
    }[family]()
    # The ControlNet of tests/tiny has the weights A in its graph.
    tag = lambda name: "A" if name == "controlnet" else checkpoint
    return {name: filled(module, f"tiny-{family}-{name}/{tag(name)}") for name, module in made.items()}
