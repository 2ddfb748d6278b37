"""Writes tests/generate/FAMILY.safetensors: what diffusers' pipelines draw with the small models of tests/tiny.

    pip install torch numpy scipy pillow safetensors transformers diffusers==0.36.0
    python tools/diffusion/pipeline.py tests/generate

Weights are those of checkpoint B, for Flux A (small.py). The small text encoders know 2048 tokens, T5 1104, so ids are given instead of a prompt;
tests/generate.rs has a tokenizer that gives the same.

`CASE.latents` has the state after each step as x0 + sigma * noise (Stable Diffusion) or as it is (flow models), `[steps, c, 8, 8]`;
schedulers that keep states at variance 1 are scaled by sqrt(1 + sigma^2). `CASE.picture` has the bytes of the picture,
`[64, 64, 3]`. Noise is torch's with seed 5.
"""

import sys
import warnings

import diffusers
import numpy as np
import torch
from PIL import Image
from safetensors.numpy import save_file

import small

STEPS, SCALE, SEED = 5, 5.0, 5
PROMPT, NEGATIVE = [11, 12, 13, 14], [21]
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
LINSPACE, LEADING = {"timestep_spacing": "linspace"}, {"timestep_spacing": "leading", "steps_offset": 1}
TRAILING, KARRAS = {"timestep_spacing": "trailing"}, {"timestep_spacing": "linspace", "use_karras_sigmas": True}
ZERO = {"final_sigmas_type": "zero"}
DPM = {"algorithm_type": "dpmsolver++", "solver_order": 2, **ZERO}

# Schedulers, their settings, and whether their states have variance 1.
SD = {
    "euler": ("EulerDiscreteScheduler", LINSPACE, False),
    "euler_karras": ("EulerDiscreteScheduler", KARRAS, False),
    "euler_leading": ("EulerDiscreteScheduler", LEADING, False),
    "euler_ancestral": ("EulerAncestralDiscreteScheduler", LINSPACE, False),
    "heun": ("HeunDiscreteScheduler", TRAILING, False),
    "lms": ("LMSDiscreteScheduler", LINSPACE, False),
    "dpm2": ("KDPM2DiscreteScheduler", TRAILING, False),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", {**TRAILING, **DPM}, True),
    "dpmpp_2m_leading": ("DPMSolverMultistepScheduler", {**LEADING, **DPM}, True),
    "dpmpp_2m_linspace": ("DPMSolverMultistepScheduler", {**LINSPACE, **DPM}, True),
    "dpmpp_2m_karras": ("DPMSolverMultistepScheduler", {**KARRAS, **DPM}, True),
    "dpmpp_2m_sde": ("DPMSolverMultistepScheduler", {**TRAILING, **DPM, "algorithm_type": "sde-dpmsolver++"}, True),
    "dpmpp_3m": ("DPMSolverMultistepScheduler", {**TRAILING, **DPM, "solver_order": 3}, True),
    "unipc": ("UniPCMultistepScheduler", {**TRAILING, **ZERO, "solver_type": "bh2"}, True),
    "deis": ("DEISMultistepScheduler", TRAILING, True),
    "ddim": ("DDIMScheduler", {**LEADING, "clip_sample": False, "set_alpha_to_one": True}, True),
    "lcm": ("LCMScheduler", {"clip_sample": False, "set_alpha_to_one": True, "original_inference_steps": 50}, True),
    "tcd": ("TCDScheduler", {"clip_sample": False, "set_alpha_to_one": True, "original_inference_steps": 50}, True),
}
SDXL = {name: SD[name] for name in ("euler_leading", "dpmpp_2m_karras", "euler_ancestral")}
FLOW = {"euler": ("FlowMatchEulerDiscreteScheduler", {}, False)}
SD3 = {**FLOW, "heun": ("FlowMatchHeunDiscreteScheduler", {}, False)}


def sigma_after(scheduler, step):
    """The noise level after a step."""
    if hasattr(scheduler, "sigmas"):
        return float(scheduler.sigmas[min(step + 1, len(scheduler.sigmas) - 1)])
    if step + 1 < len(scheduler.timesteps):
        alpha = float(scheduler.alphas_cumprod[scheduler.timesteps[step + 1]])
    elif isinstance(scheduler, diffusers.TCDScheduler):  # ends at the first training step
        alpha = float(scheduler.alphas_cumprod[0])
    else:
        return 0.0
    return ((1 - alpha) / alpha) ** 0.5


def clip_ids(tokens, pad=small.END):
    return torch.tensor([[small.START] + tokens + [small.END] + [pad] * (75 - len(tokens))])


def t5_ids(tokens, length):
    return torch.tensor([tokens + [1] + [0] * (length - 1 - len(tokens))])


def embeds(family, parts, tokens):
    """The prompt as the pipeline takes it."""
    clip = lambda name, pad=small.END: parts[name](clip_ids(tokens, pad), output_hidden_states=True)
    if family == "sd":
        return {"prompt_embeds": clip("text_encoder").last_hidden_state}
    first = clip("text_encoder")
    if family == "flux":
        t5 = parts["text_encoder_2"](t5_ids(tokens, 512)).last_hidden_state
        return {"prompt_embeds": t5, "pooled_prompt_embeds": first.pooler_output}
    second = clip("text_encoder_2", 0)
    both = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
    if family == "sdxl":
        return {"prompt_embeds": both, "pooled_prompt_embeds": second.text_embeds}
    t5 = parts["text_encoder_3"](t5_ids(tokens, 256)).last_hidden_state
    both = torch.nn.functional.pad(both, (0, t5.shape[-1] - both.shape[-1]))
    pooled = torch.cat([first.text_embeds, second.text_embeds], -1)
    return {"prompt_embeds": torch.cat([both, t5], 1), "pooled_prompt_embeds": pooled}


def pipeline(family, parts, scheduler):
    parts = {name: part for name, part in parts.items() if name != "controlnet"}
    tokenizers = {name.replace("text_encoder", "tokenizer"): None for name in parts if name.startswith("text_encoder")}
    made = {"scheduler": scheduler, **parts, **tokenizers}
    if family == "sd":
        made |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        return diffusers.StableDiffusionPipeline(**made)
    if family == "sdxl":
        return diffusers.StableDiffusionXLPipeline(**made, add_watermarker=False)
    return {"sd3": diffusers.StableDiffusion3Pipeline, "flux": diffusers.FluxPipeline}[family](**made)


def scheduler_of(family, kind, settings):
    made = getattr(diffusers, kind)
    if family == "sd3":
        return made(shift=3.0, **settings)
    if family == "flux":
        return made(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, **settings)
    return made(**BETAS, **settings)


def draw(family, parts, kind, settings, variance_one):
    pipe = pipeline(family, parts, scheduler_of(family, kind, settings))
    pipe.set_progress_bar_config(disable=True)
    states = []

    def keep(pipe, step, timestep, values):
        latents = values["latents"]
        if family == "flux":
            latents = pipe._unpack_latents(latents, 64, 64, pipe.vae_scale_factor)
        sigma = sigma_after(pipe.scheduler, step)
        states.append(latents[0].numpy() * ((1 + sigma**2) ** 0.5 if variance_one else 1))
        return values

    given = embeds(family, parts, PROMPT)
    guidance = {"guidance_scale": 3.5 if family == "flux" else SCALE}
    if family != "flux":
        given |= {f"negative_{name}": value for name, value in embeds(family, parts, NEGATIVE).items()}
    picture = pipe(
        **given, **guidance, height=64, width=64, num_inference_steps=STEPS, generator=torch.Generator().manual_seed(SEED),
        output_type="np", callback_on_step_end=keep, **({"eta": 0.3} if kind == "TCDScheduler" else {}),
    ).images[0]
    if len(states) > STEPS:  # two calls per step, but one in the last
        states = states[1::2] + states[-1:]
    return np.stack(states).astype(np.float32), np.ascontiguousarray((picture * 255).round().astype(np.uint8))


def run(pipe, **given):
    """The states after each step, and the picture."""
    pipe.set_progress_bar_config(disable=True)
    states = []

    def keep(pipe, step, timestep, values):
        latents = values["latents"]
        if latents.ndim == 3:
            latents = pipe._unpack_latents(latents, 64, 64, pipe.vae_scale_factor)
        states.append(latents[0].numpy().copy())
        return values

    given = {"num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(SEED), "output_type": "np", **given}
    drawn = pipe(**given, callback_on_step_end=keep).images[0]
    if given["output_type"] == "np":
        drawn = np.ascontiguousarray((drawn * 255).round().astype(np.uint8))
    return np.stack(states).astype(np.float32), drawn


def sample_picture():
    """A picture of three gradients, `[64, 64, 3]`; tests/generate.rs paints the same."""
    y, x = np.mgrid[0:64, 0:64]
    return np.stack([4 * x, 4 * y, 2 * (x + y)], -1).astype(np.uint8)


def sample_mask():
    """White in the middle, `[64, 64]`."""
    mask = np.zeros((64, 64), np.uint8)
    mask[16:48, 24:56] = 255
    return mask


def edit(parts, name):
    """One of diffusers' pipelines for pictures as inputs, with Euler's method."""
    made = {name: part for name, part in parts.items() if name != "controlnet"} | {
        "scheduler": diffusers.EulerDiscreteScheduler(**BETAS, **LINSPACE), "tokenizer": None, "safety_checker": None,
        "feature_extractor": None, "requires_safety_checker": False,
    }
    picture, mask = Image.fromarray(sample_picture()), Image.fromarray(sample_mask())
    if name == "img2img":
        pipe, given = diffusers.StableDiffusionImg2ImgPipeline(**made), {"image": picture, "strength": 0.6}
    elif name.startswith("inpaint"):
        pipe = diffusers.StableDiffusionInpaintPipeline(**made)
        given = {"image": picture, "mask_image": mask, "strength": 1.0 if name == "inpaint" else 0.6, "height": 64, "width": 64}
    else:
        pipe = diffusers.StableDiffusionControlNetPipeline(**made, controlnet=parts["controlnet"])
        given = {
            "image": picture, "height": 64, "width": 64, "controlnet_conditioning_scale": 0.8, "control_guidance_end": 0.7,
        }
    negative = {f"negative_{name}": value for name, value in embeds("sd", parts, NEGATIVE).items()}
    return run(pipe, **embeds("sd", parts, PROMPT), **negative, **given, guidance_scale=SCALE)


def main(folder):
    warnings.filterwarnings("ignore")
    for family, cases in {"sd": SD, "sdxl": SDXL, "sd3": SD3, "flux": FLOW}.items():
        parts, tensors = small.modules(family, "A" if family == "flux" else "B"), {}
        for name, case in cases.items():
            tensors[f"{name}.latents"], tensors[f"{name}.picture"] = draw(family, parts, *case)
            print(family, name, [float(np.abs(state).max()) for state in tensors[f"{name}.latents"]])
        if family == "sd":
            for name in ("img2img", "inpaint", "inpaint_more", "controlnet"):
                tensors[f"{name}.latents"], tensors[f"{name}.picture"] = edit(parts, name)
                print(family, name, [float(np.abs(state).max()) for state in tensors[f"{name}.latents"]])
        save_file(tensors, f"{folder}/{family}.safetensors")


if __name__ == "__main__":
    with torch.no_grad():
        main(*sys.argv[1:])
