"""The demo model: SD 1.x's parts with small widths, its tokenizer, and where each part is stored."""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import scenes

TOKENS = 77
WIDTH = 128  # of the text states
START, END = "<|startoftext|>", "<|endoftext|>"
SCHEDULE = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}


# SD's KL autoencoder: a picture of 64x64 becomes 4 channels of 8x8. One group in the norms, not 32: a group then holds all
# colours, so the norm keeps their ratios.
AUTOENCODER = {
    "block_out_channels": (16, 16, 48, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 1,
    "sample_size": scenes.SIDE,
    "scaling_factor": 0.18215,
}
UNET = {
    "sample_size": scenes.SIDE // 8,
    "block_out_channels": (48, 96),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": WIDTH,
    "attention_head_dim": 2,  # the number of heads, in SD 1.x's configurations
    "norm_num_groups": 16,
}
CONTROL_CHANNELS = (8, 16, 24, 32)  # of the network that makes the edges small
TEXT_ENCODER = {
    "hidden_size": WIDTH,
    "projection_dim": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": TOKENS,
    "hidden_act": "quick_gelu",
}


def autoencoder():
    """The autoencoder. Its latents start with little noise (log variance -6), which otherwise hides the picture for the
    first thousands of steps.
    """
    vae = AutoencoderKL(**AUTOENCODER)
    torch.nn.init.constant_(vae.quant_conv.bias[4:], -6)
    return vae


def unet():
    return UNet2DConditionModel(**UNET)


def vocabulary(tokens):
    """The part of the text encoder's configuration that depends on its vocabulary. The last entry is the end token."""
    return {"vocab_size": tokens, "bos_token_id": tokens - 2, "eos_token_id": tokens - 1, "pad_token_id": tokens - 1}


def text_encoder(tokens):
    """CLIP's text encoder for a vocabulary of `tokens` entries."""
    return CLIPTextModel(CLIPTextConfig(**TEXT_ENCODER, **vocabulary(tokens)))


def scheduler():
    return DDIMScheduler(**SCHEDULE)


def words():
    """Every word that a caption can hold."""
    prompts = [p for kind in ("single", "count", "relation") for p in scenes.every_prompt(kind)]
    text = " ".join(p.caption() for p in prompts) + " on a background " + " ".join(scenes.BACKGROUNDS)
    return sorted(set(text.split()))


def _byte_symbols():
    """CLIP's printable stand-in for each byte, in CLIP's order (openai/CLIP, simple_tokenizer.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + n) for n in range(len(others))]


def _merge(symbols, pair):
    merged = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


def write_tokenizer(folder):
    """Writes a tokenizer in CLIP's form whose merges make each word of a caption one token.

    CLIP's own vocabulary has 49,408 entries; at this width its table alone would take 12 MB. Other words become
    letters, as rare words become pieces in CLIP.
    """
    merges = []
    for word in words():
        symbols = [*word[:-1], word[-1] + "</w>"]
        for pair in merges:  # in order of rank, as the tokenizer applies them
            symbols = _merge(symbols, pair)
        while len(symbols) > 1:
            merges.append((symbols[0], symbols[1]))
            symbols = _merge(symbols, merges[-1])
    letters = _byte_symbols()
    entries = letters + [letter + "</w>" for letter in letters] + ["".join(pair) for pair in merges] + [START, END]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ids = {entry: index for index, entry in enumerate(entries)}
    (folder / "vocab.json").write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    tokenizer = CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), unk_token=END, bos_token=START, eos_token=END,
        pad_token=END, model_max_length=TOKENS,
    )
    for word in words():
        assert len(tokenizer.tokenize(word)) == 1, f"`{word}` is not one token"
    tokenizer.save_pretrained(folder)
    return tokenizer


def token_ids(tokenizer, captions, length=TOKENS):
    """(captions, length) int64, padded with the end token as SD 1.x pads."""
    return tokenizer(captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
