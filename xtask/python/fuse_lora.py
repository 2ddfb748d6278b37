"""Measures how many seconds diffusers takes to load a LoRA into an SD 1.5 UNet in f16 and to fuse it. Prints JSON.

Usage: fuse_lora.py FOLDER, where FOLDER has the lora_r16.safetensors of the example `refit_speed`. Needs torch, diffusers, peft.
"""

import json
import sys
import time

import sd15
import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders import StableDiffusionLoraLoaderMixin as Loader

ROUNDS = 3


def main(folder):
    seconds = []
    with torch.no_grad():
        unet = UNet2DConditionModel.from_config(sd15.UNET).to(torch.float16)
        for _ in range(ROUNDS):
            started = time.perf_counter()
            state, alphas = Loader.lora_state_dict(f"{folder}/lora_r16.safetensors", unet_config=unet.config)
            Loader.load_lora_into_unet(state, alphas, unet)
            unet.fuse_lora(lora_scale=0.8)
            seconds.append(time.perf_counter() - started)
            unet.unfuse_lora()
            unet.unload_lora()
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main(sys.argv[1])
