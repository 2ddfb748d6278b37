"""The architectures that export.py knows: module, public configuration, inputs and outputs of each.

Everything here follows the configuration files published with the models (unet/config.json and the like). Comments explain
numbers that have another reason."""

import dataclasses
import pathlib
import sys
import typing

import torch

import synth

sys.path.append(str(pathlib.Path(__file__).parents[1] / "train"))
import model as demo  # noqa: E402

# Sizes of named dimensions. `NAME_xK` is K times NAME, `NAME_dK` is NAME divided by K.
UNET_SIZES = ({"batch": 2, "height": 16, "width": 24, "sequence": 77}, {"batch": 1, "height": 32, "width": 16, "sequence": 20})
PICTURE_SIZES = ({"batch": 1, "height": 64, "width": 128}, {"batch": 2, "height": 192, "width": 64})
LATENT_SIZES = ({"batch": 1, "height": 8, "width": 16}, {"batch": 2, "height": 24, "width": 8})
# Pictures and latents of an autoencoder with 32x32 pixels for each latent. In diffusers its attention takes another, equal form for
# few latents; the traced size has more.
DC_PICTURE_SIZES = ({"batch": 1, "height": 192, "width": 256}, {"batch": 2, "height": 64, "width": 96})
DC_LATENT_SIZES = ({"batch": 1, "height": 6, "width": 8}, {"batch": 2, "height": 2, "width": 3})
UPSCALE_SIZES = ({"batch": 1, "height": 16, "width": 24}, {"batch": 2, "height": 30, "width": 10})
SHORT_TEXT_SIZES = ({"batch": 1, "sequence": 3}, {"batch": 2, "sequence": 29})
TEXT_SIZES = ({"batch": 2, "sequence": 77}, {"batch": 1, "sequence": 33})
# Few tokens for the largest models: tracing computes every layer.
TOKEN_SIZES = (
    {"batch": 1, "rows": 2, "columns": 3, "img_tokens": 6, "txt_tokens": 2},
    {"batch": 2, "rows": 4, "columns": 6, "img_tokens": 24, "txt_tokens": 7},
)
SMALL_UNET_SIZES = ({"batch": 1, "height": 4, "width": 6, "sequence": 3}, {"batch": 2, "height": 16, "width": 8, "sequence": 20})


@dataclasses.dataclass
class Input:
    """`dims` are numbers and names; `kind` selects the values for tracing and checking."""

    dims: tuple
    kind: str = "noise"  # noise, picture, timestep, sigma, scale, guidance, zeros, time_ids, ids, mask, grid
    dtype: str = "model"  # the model's own, or float32, int64


@dataclasses.dataclass
class Architecture:
    file: str
    tag: str
    dtype: str
    build: typing.Callable  # (**overrides of the configuration) -> module
    inputs: dict
    outputs: dict  # name -> dims, None where the exporter infers them
    call: typing.Callable  # (module's own forward, *inputs) -> output or tuple of outputs
    sizes: tuple  # traced, checked
    # Too large for memory: exported without weights, and checked with these changes to the configuration.
    reduced: dict | None = None
    # Exported with weights, but too large to be checked without these changes.
    check_reduced: dict | None = None

    @property
    def hollow(self):
        return self.reduced is not None


ARCHITECTURES = {}
# Token ids for tracing and checking are below this. The demo model has 629 tokens.
SMALLEST_VOCABULARY = 600


def size(dim, sizes):
    """The size of a dimension."""
    if isinstance(dim, int):
        return dim
    name, _, factor = dim.rpartition("_")
    if name and factor[0] in "xd" and factor[1:].isdigit():
        return sizes[name] * int(factor[1:]) if factor[0] == "x" else sizes[name] // int(factor[1:])
    return sizes[dim]


def values(tag, name, spec, sizes, dtype):
    """Seeded values for an input."""
    shape = tuple(size(dim, sizes) for dim in spec.dims)
    key = f"{name}/{'x'.join(map(str, shape))}"
    if spec.kind == "ids":
        count = int(torch.tensor(shape).prod())
        ids = [1 + synth.fnv1a64(f"{tag}/{key}#{i}") % SMALLEST_VOCABULARY for i in range(count)]
        return torch.tensor(ids).reshape(shape)
    if spec.kind == "mask":
        return (torch.arange(shape[-1]) < 2 * shape[-1] // 3).long().expand(shape).contiguous()
    if spec.kind == "grid":
        rows, columns = sizes["rows"], sizes["columns"]
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        value = torch.stack([torch.zeros_like(x), y, x], dim=-1).reshape(rows * columns, 3).float()
    elif spec.kind in ("timestep", "sigma", "scale", "zeros", "guidance"):
        # Times and guidance are no whole numbers and not exact in half precision, so the check notices if a graph rounds them.
        first, others = {"timestep": (801.37, 20.61), "sigma": (0.7351, 0.2517), "scale": (0.75, 0.75), "zeros": (0, 0), "guidance": (3.45, 2.71)}[spec.kind]
        value = torch.full(shape, float(first))
        if shape:
            value[1:] = others  # of the batch
    elif spec.kind == "time_ids":
        # The refiner has an aesthetic score as the fifth number instead of a target size.
        numbers = [1024, 768, 0, 0, *([6.3] if shape[-1] == 5 else [1024, 768])]
        value = torch.tensor(numbers).expand(shape).clone()
    else:
        value = torch.from_numpy(synth.inputs(tag, key, shape))
        if spec.kind == "picture":
            value = value.clamp(-1, 1)
    return value.to(getattr(torch, dtype if spec.dtype == "model" else spec.dtype))


# Stable Diffusion 1.5, 2.1 and XL

SD15_UNET = dict(
    sample_size=64, cross_attention_dim=768, attention_head_dim=8, block_out_channels=(320, 640, 1280, 1280),
    down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",), up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
)  # fmt: skip
# attention_head_dim holds the number of heads (a historic misnomer), of 64 channels each.
SD21_UNET = dict(
    SD15_UNET, sample_size=96, cross_attention_dim=1024, attention_head_dim=(5, 10, 20, 20), use_linear_projection=True,
    # Scores in float32. It leaves no trace in a float32 graph; core/graph/src/passes/precision/keep.rs keeps them so in fp16.
    upcast_attention=True,
)  # fmt: skip
SDXL_UNET = dict(
    sample_size=128, cross_attention_dim=2048, attention_head_dim=(5, 10, 20), block_out_channels=(320, 640, 1280),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), transformer_layers_per_block=(1, 2, 10),
    use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=256,
    projection_class_embeddings_input_dim=2816,
)  # fmt: skip
REFINER_UNET = dict(
    SD15_UNET, sample_size=128, cross_attention_dim=1280, attention_head_dim=(6, 12, 24, 24),
    block_out_channels=(384, 768, 1536, 1536),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), transformer_layers_per_block=4,
    use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=256,
    projection_class_embeddings_input_dim=2560,
)  # fmt: skip
# Channels and downsampling of the residuals that a ControlNet hands to the UNet's skip connections.
SD15_RESIDUALS = [(320, 1)] * 3 + [(320, 2)] + [(640, 2)] * 2 + [(640, 4)] + [(1280, 4)] * 2 + [(1280, 8)] * 3
SDXL_RESIDUALS = [(320, 1)] * 3 + [(320, 2)] + [(640, 2)] * 2 + [(640, 4)] + [(1280, 4)] * 2


def diffusers_module(name, config):
    def build(**overrides):
        import diffusers

        return getattr(diffusers, name)(**{**config, **overrides})

    return build


def controlnet_config(config, channels):
    dropped = ("sample_size", "up_block_types")
    config = {key: value for key, value in config.items() if key not in dropped}
    return dict(config, conditioning_embedding_out_channels=channels)


def latent(channels=4):
    return ("batch", channels, "height", "width")


def conditions(config, pooled=None):
    """What a UNet and its ControlNet take besides the latents."""
    # Samplers of k-diffusion stop between two timesteps of the training schedule.
    inputs = {"timestep": Input(("batch_t",), "timestep", "float32")}
    inputs["encoder_hidden_states"] = Input(("batch", "sequence", config["cross_attention_dim"]))
    if pooled:
        numbers = (config["projection_class_embeddings_input_dim"] - pooled) // config["addition_time_embed_dim"]
        inputs["text_embeds"] = Input(("batch", pooled))
        inputs["time_ids"] = Input(("batch", numbers), "time_ids", "float32")
    return inputs


def residuals(blocks):
    # Each has its own height and width, since the two networks decide how sizes round.
    shape = lambda channels, factor: ("batch", channels) + (("height", "width") if factor == 1 else (f"height_d{factor}", f"width_d{factor}"))
    named = {f"down_block_{i}_res": Input(shape(*block)) for i, block in enumerate(blocks)}
    return {**named, "mid_block_res": Input(shape(*blocks[-1]))}


def call_unet(forward, given):
    """Calls a UNet or a ControlNet with its inputs by name."""
    added = {name: given.pop(name) for name in ("text_embeds", "time_ids") if name in given}
    down = tuple(given.pop(name) for name in list(given) if name.startswith("down_block_"))
    if down:
        given |= {"down_block_additional_residuals": down, "mid_block_additional_residual": given.pop("mid_block_res")}
    return forward(**given, added_cond_kwargs=added or None, return_dict=False)


def unet(name, file, tag, config, dtype="float32", blocks=None, pooled=None, **more):
    inputs = {"sample": Input(latent(config.get("in_channels", 4))), **conditions(config, pooled)}
    if width := config.get("time_cond_proj_dim"):
        # The guidance scale as sines and cosines: latent consistency models.
        inputs["timestep_cond"] = Input(("batch", width))
    if blocks:
        inputs |= residuals(blocks)
    call = lambda forward, *values: call_unet(forward, dict(zip(inputs, values)))[0]
    build = diffusers_module("UNet2DConditionModel", config)
    ARCHITECTURES[name] = Architecture(file, tag, dtype, build, inputs, {"out_sample": latent()}, call, UNET_SIZES, **more)


def controlnet(name, file, tag, config, dtype, blocks, pooled=None, channels=(16, 32, 96, 256), **more):
    given = conditions(config, pooled)
    picture = Input(("batch", 3, "height_x8", "width_x8"), "picture")
    added = {key: given.pop(key) for key in ("text_embeds", "time_ids") if pooled}
    inputs = {"sample": Input(latent()), **given, "controlnet_cond": picture, "conditioning_scale": Input((), "scale"), **added}
    outputs = {f"down_block_{i}": None for i in range(len(blocks))} | {"mid_block": None}

    def call(forward, *values):
        down, middle = call_unet(forward, dict(zip(inputs, values)))
        return (*down, middle)

    build = diffusers_module("ControlNetModel", controlnet_config(config, channels))
    ARCHITECTURES[name] = Architecture(file, tag, dtype, build, inputs, outputs, call, UNET_SIZES, **more)


SMALL_SDXL = dict(transformer_layers_per_block=(1, 1, 1))
LCM = dict(time_cond_proj_dim=256)
# Latent, mask, latent of the masked picture.
INPAINTING = dict(in_channels=9)
unet("sd15/unet", "sd15_unet", "sd15-unet/A", SD15_UNET)
unet("sd15/unet-fp16", "sd15_unet_fp16", "sd15-unet/A", SD15_UNET, "float16")
unet("sd15/unet-inpainting", "sd15_unet_inpainting", "sd15-unet-inpainting/A", {**SD15_UNET, **INPAINTING})
unet("sd15/unet-lcm", "sd15_unet_lcm", "sd15-unet-lcm/A", {**SD15_UNET, **LCM})
unet("sd15/unet-controlnet", "sd15_unet_controlnet", "sd15-unet/A", SD15_UNET, blocks=SD15_RESIDUALS)
unet("sd21/unet", "sd21_unet", "sd21-unet/A", SD21_UNET)
unet("sd21/unet-inpainting", "sd21_unet_inpainting", "sd21-unet-inpainting/A", {**SD21_UNET, **INPAINTING})
# Latent, depth.
unet("sd21/unet-depth", "sd21_unet_depth", "sd21-unet-depth/A", dict(SD21_UNET, in_channels=5))
unet("sdxl/unet", "sdxl_unet_fp16", "sdxl-unet/A", SDXL_UNET, "float16", pooled=1280, check_reduced=SMALL_SDXL)
unet("sdxl/unet-inpainting", "sdxl_unet_inpainting_fp16", "sdxl-unet-inpainting/A", {**SDXL_UNET, **INPAINTING}, "float16", pooled=1280, check_reduced=SMALL_SDXL)  # fmt: skip
unet("sdxl/unet-lcm", "sdxl_unet_lcm_fp16", "sdxl-unet-lcm/A", {**SDXL_UNET, **LCM}, "float16", pooled=1280, check_reduced=SMALL_SDXL)
unet("sdxl/unet-controlnet", "sdxl_unet_controlnet_fp16", "sdxl-unet/A", SDXL_UNET, "float16", SDXL_RESIDUALS, 1280, check_reduced=SMALL_SDXL)  # fmt: skip
unet("sdxl/refiner", "sdxl_refiner_fp16", "sdxl-refiner/A", REFINER_UNET, "float16", pooled=1280, check_reduced=dict(transformer_layers_per_block=1))  # fmt: skip
controlnet("sd15/controlnet", "sd15_controlnet", "sd15-controlnet/A", SD15_UNET, "float32", SD15_RESIDUALS)
controlnet("sdxl/controlnet", "sdxl_controlnet_fp16", "sdxl-controlnet/A", SDXL_UNET, "float16", SDXL_RESIDUALS, 1280)


# Text encoders

CLIP_L = dict(
    hidden_size=768, intermediate_size=3072, projection_dim=768, num_hidden_layers=12, num_attention_heads=12,
    hidden_act="quick_gelu", vocab_size=49408, max_position_embeddings=77, bos_token_id=49406,
    # As in the published configurations. The pooled output is then taken at the largest id, the end of text.
    eos_token_id=2, pad_token_id=1,
)  # fmt: skip
# OpenCLIP's ViT-H without its last layer, which Stable Diffusion 2 does not use.
CLIP_H = dict(
    CLIP_L, hidden_size=1024, intermediate_size=4096, projection_dim=512, num_hidden_layers=23, num_attention_heads=16,
    hidden_act="gelu", bos_token_id=0,
)  # fmt: skip
CLIP_G = dict(
    CLIP_H, hidden_size=1280, intermediate_size=5120, projection_dim=1280, num_hidden_layers=32, num_attention_heads=20,
)  # fmt: skip
T5_XXL = dict(
    vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, dropout_rate=0.0,
    feed_forward_proj="gated-gelu", tie_word_embeddings=False,
)  # fmt: skip


def transformers_module(model, config_class, config):
    def build(**overrides):
        import transformers

        return getattr(transformers, model)(getattr(transformers, config_class)(**{**config, **overrides}))

    return build


def text_encoder(name, file, tag, config, dtype, model="CLIPTextModel", outputs=("last_hidden_state", "pooler_output"), masked=False, **more):
    hidden = config.get("hidden_size") or config["d_model"]

    def call(forward, input_ids, attention_mask=None):
        middle = "penultimate_hidden_state" in outputs or SKIPPING[0] in outputs
        found = forward(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=middle, return_dict=True)

        def output(name):
            if name == "penultimate_hidden_state":
                return found.hidden_states[-2]
            if name in SKIPPING:
                layer, norm = int(name.removeprefix("clip_skip_")), forward.__self__.text_model.final_layer_norm
                # Not a call of the module: the exporter would number its nodes like modules of their own.
                return torch.nn.functional.layer_norm(found.hidden_states[-layer], norm.normalized_shape, norm.weight, norm.bias, norm.eps)
            return found[name]

        return tuple(map(output, outputs))

    pooled = ("pooler_output", "text_embeds")
    dims = {output: ("batch", hidden) if output in pooled else ("batch", "sequence", hidden) for output in outputs}
    build = transformers_module(model, "T5Config" if model.startswith("T5") else "CLIPTextConfig", config)
    inputs = {"input_ids": Input(("batch", "sequence"), "ids", "int64")}
    if masked:
        inputs["attention_mask"] = Input(("batch", "sequence"), "mask", "int64")
    sizes = SHORT_TEXT_SIZES if more.get("reduced") else TEXT_SIZES
    ARCHITECTURES[name] = Architecture(file, tag, dtype, build, inputs, dims, call, sizes, **more)


GEMMA2_2B = dict(
    vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4,
    head_dim=256, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192, rms_norm_eps=1e-6, rope_theta=10000.0,
    query_pre_attn_scalar=256, sliding_window=4096, attn_logit_softcapping=50.0,
)  # fmt: skip


def language_model(name, file, tag, config, dtype, **more):
    """Gemma 2 without its prediction of words. Each token sees only those before it, so padding after the text needs no mask."""

    def build(**overrides):
        import transformers

        # Other forms of attention leave the cap of the scores out.
        module = transformers.Gemma2Model(transformers.Gemma2Config(**{**config, **overrides}, attn_implementation="eager"))
        # As T5's `wo`: in float16, what comes out may overflow.
        module._keep_in_fp32_modules = ["down_proj"]
        # The residual stream and the norms stay in float32.
        module.embed_tokens.register_forward_hook(lambda _, inputs, found: found.float())
        for layer in module.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(lambda layer, inputs: (inputs[0].to(layer.weight.dtype),))
        return module

    def call(forward, input_ids):
        # To the type of the other matrices, which the denoiser takes.
        found = forward(input_ids=input_ids, use_cache=False).last_hidden_state
        return found.to(forward.__self__.embed_tokens.weight.dtype)

    ARCHITECTURES[name] = Architecture(
        file, tag, dtype, build, {"input_ids": Input(("batch", "sequence"), "ids", "int64")},
        {"last_hidden_state": ("batch", "sequence", config["hidden_size"])}, call, SHORT_TEXT_SIZES, **more,
    )  # fmt: skip


XL = ("last_hidden_state", "penultimate_hidden_state")
# What Stable Diffusion 1 takes with clip skip 2, 3, …: the states before the last 1, 2, … layers, through the final norm.
SKIPPING = tuple(f"clip_skip_{layer}" for layer in range(2, CLIP_L["num_hidden_layers"] + 1))
text_encoder("sd15/text-encoder", "sd15_text_encoder", "sd15-text/A", CLIP_L, "float32", outputs=("last_hidden_state", "pooler_output", *SKIPPING))  # fmt: skip
text_encoder("sd21/text-encoder", "sd21_text_encoder", "sd21-text/A", CLIP_H, "float32")
text_encoder("sdxl/text-encoder", "sdxl_text_encoder_fp16", "sd15-text/A", CLIP_L, "float16", outputs=("pooler_output", *XL))
text_encoder("sdxl/text-encoder-2", "sdxl_text_encoder_2_fp16", "sdxl-text2/A", CLIP_G, "float16", "CLIPTextModelWithProjection", ("text_embeds", *XL))  # fmt: skip
text_encoder("sd3/text-encoder", "sd3_text_encoder_fp16", "sd15-text/A", CLIP_L, "float16", "CLIPTextModelWithProjection", ("text_embeds", *XL))  # fmt: skip
text_encoder("t5-xxl", "t5xxl_fp16", "t5/A", T5_XXL, "float16", "T5EncoderModel", ("last_hidden_state",), reduced=dict(num_layers=2))
text_encoder("t5-xxl-masked", "t5xxl_masked_fp16", "t5/A", T5_XXL, "float16", "T5EncoderModel", ("last_hidden_state",), masked=True, reduced=dict(num_layers=2))  # fmt: skip
text_encoder("t5-xxl-2-layers", "t5xxl_2l_fp16", "t5/A", dict(T5_XXL, num_layers=2), "float16", "T5EncoderModel", ("last_hidden_state",))
language_model("gemma2-2b", "gemma2_2b_fp16", "gemma2/A", GEMMA2_2B, "float16", reduced=dict(num_hidden_layers=2))


# Autoencoders

VAE = dict(
    down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    block_out_channels=(128, 256, 512, 512), layers_per_block=2, sample_size=512,
)  # fmt: skip
# Deep compression autoencoder.
DC_AE = dict(
    latent_channels=32, encoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    decoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",) * 3, encoder_block_out_channels=(128, 256, 512, 512, 1024, 1024),
    decoder_block_out_channels=(128, 256, 512, 512, 1024, 1024), encoder_layers_per_block=(2, 2, 2, 3, 3, 3),
    decoder_layers_per_block=(3, 3, 3, 3, 3, 3), encoder_qkv_multiscales=((), (), (), (5,), (5,), (5,)),
    decoder_qkv_multiscales=((), (), (), (5,), (5,), (5,)), downsample_block_type="conv", upsample_block_type="interpolate",
)  # fmt: skip
VAE16 = dict(VAE, latent_channels=16, use_quant_conv=False, use_post_quant_conv=False, sample_size=1024)


class Part(torch.nn.Module):
    """Runs some children of a model in sequence, under their own names."""

    def __init__(self, whole, names):
        super().__init__()
        self.order = [name for name in names if getattr(whole, name, None) is not None]
        for name in self.order:
            setattr(self, name, getattr(whole, name))

    def forward(self, x):
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def autoencoder(prefix, file, tag, config, channels, model="AutoencoderKL"):
    # The others give latents instead of a distribution of them.
    is_kl, is_deep = model == "AutoencoderKL", model == "AutoencoderDC"
    factor, pictures, latents = (32, DC_PICTURE_SIZES, DC_LATENT_SIZES) if is_deep else (8, PICTURE_SIZES, LATENT_SIZES)
    whole = diffusers_module(model, config)
    small = ("batch", 2 * channels if is_kl else channels, f"height_d{factor}", f"width_d{factor}")
    encoded = "latent_parameters" if is_kl else "latents"
    ARCHITECTURES[f"{prefix}encoder"] = Architecture(
        f"{file}_encoder", tag, "float32", lambda **o: Part(whole(**o), ("encoder", "quant_conv")),
        {"sample": Input(("batch", 3, "height", "width"), "picture")}, {encoded: small}, lambda forward, sample: forward(sample), pictures,
    )  # fmt: skip
    ARCHITECTURES[f"{prefix}decoder"] = Architecture(
        f"{file}_decoder", tag, "float32", lambda **o: Part(whole(**o), ("post_quant_conv", "decoder")),
        {"latent_sample": Input(latent(channels))}, {"sample": ("batch", 3, f"height_x{factor}", f"width_x{factor}")},
        lambda forward, latent_sample: forward(latent_sample), latents,
    )  # fmt: skip


autoencoder("sd15/vae-", "sd15_vae", "sd15-vae/A", VAE, 4)
autoencoder("sd3/vae-", "sd3_vae", "sd3-vae/A", VAE16, 16)
autoencoder("sana/vae-", "sana_vae", "sana-vae/A", DC_AE, 32, "AutoencoderDC")
autoencoder("taesd/", "taesd", "taesd/A", {}, 4, "AutoencoderTiny")
autoencoder("taesd3/", "taesd3", "taesd3/A", dict(latent_channels=16), 16, "AutoencoderTiny")


# The demo model

DEMO_TOKENS = 629
DEMO_RESIDUALS = [(48, 1)] * 2 + [(48, 2), (96, 2)]
unet("demo/unet", "demo_unet", "demo-unet/A", demo.UNET)
unet("demo/unet-controlnet", "demo_unet_controlnet", "demo-unet/A", demo.UNET, blocks=DEMO_RESIDUALS)
controlnet("demo/controlnet", "demo_controlnet", "demo-controlnet/A", demo.UNET, "float32", DEMO_RESIDUALS, channels=demo.CONTROL_CHANNELS)
text_encoder("demo/text-encoder", "demo_text_encoder", "demo-text/A", {**demo.TEXT_ENCODER, **demo.vocabulary(DEMO_TOKENS)}, "float32", outputs=("last_hidden_state", "pooler_output", SKIPPING[0]))  # fmt: skip
autoencoder("demo/vae-", "demo_vae", "demo-vae/A", demo.AUTOENCODER, 4)


# Transformers

SD3_MEDIUM = dict(
    sample_size=128, patch_size=2, in_channels=16, num_layers=24, attention_head_dim=64, num_attention_heads=24,
    joint_attention_dim=4096, caption_projection_dim=1536, pooled_projection_dim=2048, out_channels=16, pos_embed_max_size=192,
)  # fmt: skip
# The first 13 blocks have a second attention, of the picture alone.
SD35_MEDIUM = dict(SD3_MEDIUM, pos_embed_max_size=384, qk_norm="rms_norm", dual_attention_layers=tuple(range(13)))
SD35_LARGE = dict(SD3_MEDIUM, num_layers=38, num_attention_heads=38, caption_projection_dim=2432, qk_norm="rms_norm")
PIXART_SIGMA = dict(
    num_attention_heads=16, attention_head_dim=72, in_channels=4, out_channels=8, num_layers=28, cross_attention_dim=1152,
    attention_bias=True, sample_size=128, patch_size=2, num_embeds_ada_norm=1000, norm_type="ada_norm_single",
    norm_elementwise_affine=False, norm_eps=1e-6, interpolation_scale=2, use_additional_conditions=False, caption_channels=4096,
)  # fmt: skip
SANA_1600M = dict(
    in_channels=32, out_channels=32, num_attention_heads=70, attention_head_dim=32, num_layers=20,
    num_cross_attention_heads=20, cross_attention_head_dim=112, cross_attention_dim=2240, caption_channels=2304, mlp_ratio=2.5,
    sample_size=32, patch_size=1,
)  # fmt: skip
FLUX = dict(guidance_embeds=True)
# Packed latents, and those of the masked picture with the mask (8x8 values for each latent).
FLUX_FILL = dict(FLUX, in_channels=64 + 64 + 256, out_channels=64)
# Packed latents, and those of a picture of edges or depths.
FLUX_CONTROL = dict(FLUX, in_channels=64 + 64, out_channels=64)
FEW_BLOCKS = dict(num_layers=2, num_single_layers=2)


def by_name(names, **constant):
    """Calls a transformer with its inputs by name."""
    return lambda forward, *inputs: forward(**dict(zip(names, inputs)), **constant, return_dict=False)[0]


def with_exact_times(call, names):
    """Hands timestep and guidance to their embeddings in float32. Flux and Chroma would round them to the type of the latents
    first, and with them the angles, which are up to 1000."""

    def exact(forward, *inputs):
        given = dict(zip(names, inputs))
        times = tuple(given[name] * 1000 for name in ("timestep", "guidance") if name in given)
        hook = forward.__self__.time_text_embed.register_forward_pre_hook(lambda _, rounded: times + rounded[len(times) :])
        try:
            return call(forward, *inputs)
        finally:
            hook.remove()

    return exact


def transformer(name, file, tag, model, config, width, pooled=None, constant=None, **more):
    """A transformer over a latent picture."""
    inputs = {"hidden_states": Input(latent(config["in_channels"])), "encoder_hidden_states": Input(("batch", "sequence", width))}
    if pooled:
        inputs["pooled_projections"] = Input(("batch", pooled))
    inputs["timestep"] = Input(("batch",), "timestep", "float32")
    build, call = diffusers_module(model, config), by_name(list(inputs), **(constant or {}))
    outputs = {"out_sample": latent(config["out_channels"])}
    ARCHITECTURES[name] = Architecture(file, tag, "float16", build, inputs, outputs, call, SMALL_UNET_SIZES, **more)


def token_transformer(name, file, tag, model, config, pooled=None, guidance=False, **more):
    """Flux and its relatives: pictures as rows of 2x2 patches."""
    channels = config.get("in_channels", 64)
    inputs = {"hidden_states": Input(("batch", "img_tokens", channels)), "encoder_hidden_states": Input(("batch", "txt_tokens", 4096))}
    if pooled:
        inputs["pooled_projections"] = Input(("batch", pooled))
    inputs["timestep"] = Input(("batch",), "sigma", "float32")
    inputs["img_ids"] = Input(("img_tokens", 3), "grid", "float32")
    inputs["txt_ids"] = Input(("txt_tokens", 3), "zeros", "float32")
    if guidance:
        inputs["guidance"] = Input(("batch",), "guidance", "float32")
    build, call = diffusers_module(model, config), with_exact_times(by_name(list(inputs)), list(inputs))
    outputs = {"out_hidden_states": ("batch", "img_tokens", 64)}
    ARCHITECTURES[name] = Architecture(file, tag, "float16", build, inputs, outputs, call, TOKEN_SIZES, **more)


transformer("sd3/medium", "sd3_medium_fp16", "sd3/A", "SD3Transformer2DModel", SD3_MEDIUM, 4096, 2048, reduced=dict(num_layers=2))
transformer("sd3/medium-4-layers", "sd3_4l_fp16", "sd3/A", "SD3Transformer2DModel", dict(SD3_MEDIUM, num_layers=4), 4096, 2048)
transformer("sd35/medium", "sd35_medium_fp16", "sd35m/A", "SD3Transformer2DModel", SD35_MEDIUM, 4096, 2048, reduced=dict(num_layers=2, dual_attention_layers=(0,)))  # fmt: skip
transformer("sd35/large", "sd35_large_fp16", "sd35l/A", "SD3Transformer2DModel", SD35_LARGE, 4096, 2048, reduced=dict(num_layers=2))
transformer(
    "pixart/sigma", "pixart_sigma_fp16", "pixart/A", "PixArtTransformer2DModel", PIXART_SIGMA, 4096,
    constant=dict(added_cond_kwargs={"resolution": None, "aspect_ratio": None}), reduced=dict(num_layers=2),
)  # fmt: skip
transformer("sana/1600m", "sana_1600m_fp16", "sana/A", "SanaTransformer2DModel", SANA_1600M, 2304, reduced=dict(num_layers=2))
token_transformer("flux/dev", "flux_dev_fp16", "flux/A", "FluxTransformer2DModel", FLUX, 768, True, reduced=FEW_BLOCKS)
token_transformer("flux/dev-2x2-layers", "flux_2x2_fp16", "flux/A", "FluxTransformer2DModel", dict(FLUX, **FEW_BLOCKS), 768, True)
token_transformer("flux/fill", "flux_fill_fp16", "flux-fill/A", "FluxTransformer2DModel", FLUX_FILL, 768, True, reduced=FEW_BLOCKS)
token_transformer("flux/canny-depth", "flux_canny_depth_fp16", "flux-canny-depth/A", "FluxTransformer2DModel", FLUX_CONTROL, 768, True, reduced=FEW_BLOCKS)  # fmt: skip
token_transformer("flux/schnell", "flux_schnell_fp16", "flux-schnell/A", "FluxTransformer2DModel", {}, 768, reduced=FEW_BLOCKS)
token_transformer("chroma", "chroma_fp16", "chroma/A", "ChromaTransformer2DModel", {}, reduced=FEW_BLOCKS)


# Upscalers


def upscaler(name, file, scale, blocks=23):
    def build(**overrides):
        import rrdbnet

        return rrdbnet.RRDBNet(**{"scale": scale, "blocks": blocks, **overrides})

    larger = ("batch", 3, f"height_x{scale}", f"width_x{scale}")
    ARCHITECTURES[name] = Architecture(
        file, f"{file.replace('_', '-')}/A", "float32", build, {"image": Input(("batch", 3, "height", "width"), "picture")},
        {"upscaled": larger}, lambda forward, image: forward(image), UPSCALE_SIZES,
    )  # fmt: skip


upscaler("esrgan/x4", "esrgan_x4", 4)
upscaler("esrgan/x4-6-blocks", "esrgan_x4_6b", 4, blocks=6)
upscaler("esrgan/x2", "esrgan_x2", 2)
