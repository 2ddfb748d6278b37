"""Measures how many milliseconds PyTorch takes for an SD 1.5 model with random weights, eager and compiled. Prints JSON.

Usage: torch_speed.py MODEL fp32|fp16 DEVICE, MODEL as sdrun calls it. Needs torch and diffusers.
"""

import json
import statistics
import sys
import time

import sd15
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

WARM_UP = 3
RUNS = 10


def unet(options):
    model = UNet2DConditionModel.from_config(sd15.UNET)
    latent, text = torch.randn(1, 4, 64, 64).to(**options), torch.randn(1, 77, 768).to(**options)
    step = torch.tensor([500], device=options["device"])
    return model, lambda model: model(latent, step, text, return_dict=False)[0]


def vae_decoder(options):
    model = AutoencoderKL.from_config(sd15.VAE)
    latent = torch.randn(1, 4, 64, 64).to(**options)
    # A compiled module is its `forward`.
    model.forward = lambda z: model.decoder(model.post_quant_conv(z))
    return model, lambda model: model(latent)


MODELS = {"sd15/unet": unet, "sd15/vae-decoder": vae_decoder}


def milliseconds(run, model, device):
    """Median of a few runs, each timed until the device has finished."""

    def finished():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    taken = []
    for _ in range(WARM_UP + RUNS):
        started = finished()
        run(model)
        taken.append(finished() - started)
    return 1e3 * statistics.median(taken[WARM_UP:])


def main(name, precision, device):
    # As in sdrun, f32 computes in f32 and not in TF32.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    options = {"device": torch.device(device), "dtype": {"fp32": torch.float32, "fp16": torch.float16}[precision]}
    with torch.inference_mode():
        model, run = MODELS[name](options)
        model = model.eval().to(**options).to(memory_format=torch.channels_last)
        eager = milliseconds(run, model, options["device"])
        compiled = milliseconds(run, torch.compile(model, mode="max-autotune"), options["device"])
    print(json.dumps({"eager_ms": eager, "compiled_ms": compiled}))


if __name__ == "__main__":
    main(*sys.argv[1:])
