"""Writes tests/generate/sd.safetensors: what diffusers' StableDiffusionPipeline draws with the small pipeline of tests/tiny.

    pip install torch numpy safetensors transformers diffusers==0.36.0
    python tools/diffusion/pipeline.py TINY/sd/diffusers_B_fp16 tests/generate/sd.safetensors

TINY is the folder that sdrun_tiny::folder() makes, target/tiny-pipelines-*. Weights are f16 in the files and f32 here. The small text
encoder knows 1000 tokens, so ids are given instead of a prompt; tests/generate.rs has a tokenizer that gives the same.

`SAMPLER.latents` has the state after each step as x0 + sigma * noise, `[steps, 4, 8, 8]`; schedulers that keep states at variance 1
are scaled by sqrt(1 + sigma^2). `SAMPLER.picture` is the picture in 0..1, `[64, 64, 3]`. Noise is torch's with seed 5.
"""

import sys

import diffusers
import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import CLIPTextModel

STEPS, SCALE, SEED = 5, 5.0, 5
START, END = 900, 901
PROMPT, NEGATIVE = [11, 12, 13, 14], [21]
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
SCHEDULERS = {
    "euler": ("EulerDiscreteScheduler", {"timestep_spacing": "linspace"}),
    "euler_ancestral": ("EulerAncestralDiscreteScheduler", {"timestep_spacing": "linspace"}),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", {"timestep_spacing": "trailing", "final_sigmas_type": "zero"}),
    "ddim": ("DDIMScheduler", {"timestep_spacing": "leading", "steps_offset": 1, "clip_sample": False, "set_alpha_to_one": True}),
}


def sigma_after(scheduler, step):
    """The noise level after a step."""
    if hasattr(scheduler, "sigmas"):
        return float(scheduler.sigmas[step + 1])
    if step + 1 == len(scheduler.timesteps):
        return 0.0
    alpha = float(scheduler.alphas_cumprod[scheduler.timesteps[step + 1]])
    return ((1 - alpha) / alpha) ** 0.5


def main(folder, out):
    read = {"torch_dtype": torch.float32, "variant": "fp16"}
    text_encoder = CLIPTextModel.from_pretrained(f"{folder}/text_encoder", **read).eval()
    unet = diffusers.UNet2DConditionModel.from_pretrained(f"{folder}/unet", **read).eval()
    vae = diffusers.AutoencoderKL.from_pretrained(f"{folder}/vae", **read).eval()

    def embeds(tokens):
        ids = torch.tensor([[START] + tokens + [END] * (76 - len(tokens))])
        return text_encoder(ids)[0]

    tensors = {}
    for name, (kind, settings) in SCHEDULERS.items():
        scheduler = getattr(diffusers, kind)(**BETAS, **settings)
        pipeline = diffusers.StableDiffusionPipeline(
            vae=vae, text_encoder=text_encoder, tokenizer=None, unet=unet, scheduler=scheduler, safety_checker=None,
            feature_extractor=None, requires_safety_checker=False,
        )
        pipeline.set_progress_bar_config(disable=True)
        states = []

        def keep(pipeline, step, timestep, values):
            sigma = sigma_after(pipeline.scheduler, step)
            variance_one = name in ("dpmpp_2m", "ddim")
            states.append(values["latents"][0].numpy() * ((1 + sigma**2) ** 0.5 if variance_one else 1))
            return values

        with torch.no_grad():
            picture = pipeline(
                prompt_embeds=embeds(PROMPT), negative_prompt_embeds=embeds(NEGATIVE), height=64, width=64,
                num_inference_steps=STEPS, guidance_scale=SCALE, generator=torch.Generator().manual_seed(SEED),
                output_type="np", callback_on_step_end=keep,
            ).images[0]
        tensors[f"{name}.latents"] = np.stack(states).astype(np.float32)
        tensors[f"{name}.picture"] = np.ascontiguousarray(picture, np.float32)
        print(name, [float(np.abs(s).max()) for s in states], picture.mean())
    save_file(tensors, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
