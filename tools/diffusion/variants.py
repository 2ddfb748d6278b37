"""Writes tests/generate/variants.safetensors: what diffusers draws with the denoisers of small.py that share the other networks with
a small pipeline of tests/tiny. All weights are A.

    pip install torch numpy scipy pillow safetensors transformers diffusers==0.36.0
    python tools/diffusion/variants.py tests/generate [CASE...]

With cases, the others stay as they are in the file. Tensors are as in pipeline.py.
"""

import pathlib
import sys
import warnings

import diffusers
import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

import small
import text
from pipeline import (
    BETAS, KARRAS, LINSPACE, NEGATIVE, PROMPT, SCALE, SD, clip_ids, embeds, run, sample_mask, sample_picture, scheduler_of, sigma_after, t5_ids,
)  # fmt: skip

CHECKER = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
EULER = ("EulerDiscreteScheduler", LINSPACE)
PICTURE, MASK = Image.fromarray(sample_picture()), Image.fromarray(sample_mask())


def networks(family, *left_out):
    """The networks besides the denoiser, with no tokenizers."""
    parts = {name: part for name, part in small.modules(family, "A").items() if name not in ("unet", "transformer", "controlnet", *left_out)}
    return parts, {name.replace("text_encoder", "tokenizer"): None for name in parts if name.startswith("text_encoder")}


def both(family, parts):
    """Prompt and negative prompt."""
    return embeds(family, parts, PROMPT) | {f"negative_{name}": value for name, value in embeds(family, parts, NEGATIVE).items()}


def sd(kind, denoiser, scheduler=EULER, **more):
    parts, tokenizers = networks("sd")
    unet, schedule = small.denoiser(denoiser), scheduler_of("sd", *scheduler)
    return parts, kind(**parts, **tokenizers, unet=unet, scheduler=schedule, **more)


def inpaint(strength):
    parts, pipe = sd(diffusers.StableDiffusionInpaintPipeline, "sd/unet_inpainting", **CHECKER)
    given = {"image": PICTURE, "mask_image": MASK, "strength": strength, "height": 64, "width": 64}
    return run(pipe, **both("sd", parts), **given, guidance_scale=SCALE)


def lcm():
    kind, settings, _ = SD["lcm"]
    parts, pipe = sd(diffusers.LatentConsistencyModelPipeline, "sd/unet_lcm", (kind, settings), **CHECKER)
    states, picture = run(pipe, **embeds("sd", parts, PROMPT), height=64, width=64, guidance_scale=8.5)
    # The scheduler keeps states at variance 1.
    scales = [(1 + sigma_after(pipe.scheduler, step) ** 2) ** 0.5 for step in range(len(states))]
    return states * np.float32(scales)[:, None, None, None], picture


def depth():
    parts, pipe = sd(diffusers.StableDiffusionDepth2ImgPipeline, "sd/unet_depth", depth_estimator=None, feature_extractor=None)
    # The largest of the three gradients as the depth.
    near = torch.tensor(sample_picture()[..., 2], dtype=torch.float32)[None]
    # Stable Diffusion 2 pads with 0.
    text = lambda tokens: parts["text_encoder"](clip_ids(tokens, 0)).last_hidden_state
    given = {"prompt_embeds": text(PROMPT), "negative_prompt_embeds": text(NEGATIVE)}
    return run(pipe, **given, image=PICTURE, depth_map=near, strength=0.6, guidance_scale=SCALE)


def sdxl_inpaint():
    parts, tokenizers = networks("sdxl")
    pipe = diffusers.StableDiffusionXLInpaintPipeline(
        **parts, **tokenizers, unet=small.denoiser("sdxl/unet_inpainting"), scheduler=scheduler_of("sdxl", *EULER), add_watermarker=False,
    )
    given = {"image": PICTURE, "mask_image": MASK, "strength": 0.6, "height": 64, "width": 64}
    return run(pipe, **both("sdxl", parts), **given, guidance_scale=SCALE)


def playground():
    """SDXL's network as an EDM, with the statistics of Playground 2.5's latents."""
    parts, tokenizers = networks("sdxl")
    statistics = {"latents_mean": [-1.6574, 1.886, -1.383, 2.5155], "latents_std": [8.4927, 5.9022, 6.5498, 5.2299]}
    vae = small.filled(small.vae(scaling_factor=0.5, **statistics), "tiny-sdxl-vae/A")
    pipe = diffusers.StableDiffusionXLPipeline(
        **{**parts, "vae": vae}, **tokenizers, unet=small.modules("sdxl", "A")["unet"], scheduler=diffusers.EDMEulerScheduler(),
        add_watermarker=False,
    )
    return run(pipe, **both("sdxl", parts), height=64, width=64, guidance_scale=SCALE)


def refiner_of(scheduler):
    parts, tokenizers = networks("sdxl", "text_encoder")
    pipe = diffusers.StableDiffusionXLImg2ImgPipeline(
        **parts, **tokenizers, text_encoder=None, tokenizer=None, unet=small.denoiser("sdxl/unet_refiner"),
        scheduler=scheduler_of("sdxl", *scheduler), requires_aesthetics_score=True, add_watermarker=False,
    )

    def text(tokens, name):
        found = parts["text_encoder_2"](clip_ids(tokens, 0), output_hidden_states=True)
        return {f"{name}prompt_embeds": found.hidden_states[-2], f"{name}pooled_prompt_embeds": found.text_embeds}

    return pipe, {**text(PROMPT, ""), **text(NEGATIVE, "negative_")}


def refiner():
    pipe, given = refiner_of(EULER)
    return run(pipe, **given, image=PICTURE, strength=0.6, guidance_scale=SCALE)


def handover():
    """The first three steps of five with the base model, the others with the refiner."""
    scheduler = ("EulerDiscreteScheduler", KARRAS)
    parts, tokenizers = networks("sdxl")
    unet = small.modules("sdxl", "A")["unet"]
    base = diffusers.StableDiffusionXLPipeline(
        **parts, **tokenizers, unet=unet, scheduler=scheduler_of("sdxl", *scheduler), add_watermarker=False
    )
    base.scheduler.set_timesteps(5)
    times = base.scheduler.timesteps.tolist()
    share = 1 - (times[2] + times[3]) / 2000
    given = {"height": 64, "width": 64, "guidance_scale": SCALE}
    first, latents = run(base, **both("sdxl", parts), **given, denoising_end=share, output_type="latent")
    pipe, text = refiner_of(scheduler)
    second, picture = run(pipe, **text, image=latents[None], denoising_start=share, guidance_scale=SCALE)
    assert len(first) == 3 and len(second) == 2
    return np.concatenate([first, second]), picture


def sd35():
    parts, tokenizers = networks("sd3")
    pipe = diffusers.StableDiffusion3Pipeline(
        **parts, **tokenizers, transformer=small.denoiser("sd3/transformer_35"),
        scheduler=scheduler_of("sd3", "FlowMatchEulerDiscreteScheduler", {}),
    )
    return run(pipe, **both("sd3", parts), height=64, width=64, guidance_scale=SCALE)


def flux(kind, denoiser, **given):
    parts, tokenizers = networks("flux")
    pipe = kind(
        **parts, **tokenizers, transformer=small.denoiser(denoiser),
        scheduler=scheduler_of("flux", "FlowMatchEulerDiscreteScheduler", {}),
    )
    return run(pipe, **embeds("flux", parts, PROMPT), **given, height=64, width=64, guidance_scale=30.0)


def kontext():
    """The reference has a size that the model was trained with, so it is not resized."""
    y, x = np.mgrid[0:1024, 0:1024]
    reference = Image.fromarray(np.stack([x // 4, y // 4, (x + y) // 8], -1).astype(np.uint8))
    parts, tokenizers = networks("flux")
    pipe = diffusers.FluxKontextPipeline(
        **parts, **tokenizers, transformer=small.modules("flux", "A")["transformer"],
        scheduler=scheduler_of("flux", "FlowMatchEulerDiscreteScheduler", {}),
    )
    given = {"image": reference, "height": 64, "width": 64, "max_area": 64 * 64, "guidance_scale": 2.5}
    return run(pipe, **embeds("flux", parts, PROMPT), **given)


def t5(parts, tokens, length):
    ids = t5_ids(tokens, length)
    mask = (torch.arange(length) <= len(tokens)).long()[None]
    return parts["text_encoder_2"](ids, attention_mask=mask).last_hidden_state, mask


def chroma():
    parts, _ = networks("flux")
    pipe = diffusers.ChromaPipeline(
        text_encoder=parts["text_encoder_2"], tokenizer=None, vae=parts["vae"], transformer=small.denoiser("flux/transformer_chroma"),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0),
    )

    def text(tokens, name):
        states, mask = t5(parts, tokens, 512)
        # Up to the first padding token. diffusers 0.36 adds its mask of zeros and ones to the scores, where it hides nothing.
        shown = int(mask.sum()) + 1
        return {f"{name}prompt_embeds": states[:, :shown], f"{name}prompt_attention_mask": torch.ones(1, shown)}

    return run(pipe, **text(PROMPT, ""), **text(NEGATIVE, "negative_"), height=64, width=64, guidance_scale=SCALE)


def pixart():
    parts, _ = networks("flux")
    vae = small.modules("sdxl", "A")["vae"]
    betas = {**BETAS, "beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}
    pipe = diffusers.PixArtSigmaPipeline(
        text_encoder=parts["text_encoder_2"], tokenizer=None, vae=vae, transformer=small.denoiser("sdxl/transformer_pixart"),
        scheduler=diffusers.EulerDiscreteScheduler(**betas, **LINSPACE),
    )
    states = []

    def keep(step, timestep, latents):
        states.append(latents[0].numpy().copy())

    def text(tokens, name):
        found, mask = t5(parts, tokens, 300)
        return {f"{name}prompt_embeds": found, f"{name}prompt_attention_mask": mask}

    pipe.set_progress_bar_config(disable=True)
    drawn = pipe(
        **text(PROMPT, ""), **text(NEGATIVE, "negative_"), negative_prompt=None, height=64, width=64, guidance_scale=SCALE,
        num_inference_steps=5, generator=torch.Generator().manual_seed(5), output_type="np", callback=keep, use_resolution_binning=False,
    ).images[0]
    return np.stack(states).astype(np.float32), np.ascontiguousarray((drawn * 255).round().astype(np.uint8))


def sana():
    """The only case with words instead of ids: what comes before them counts too."""
    parts = small.modules("sana", "A")
    scheduler = diffusers.DPMSolverMultistepScheduler(
        beta_start=0.0001, beta_end=0.02, beta_schedule="linear", solver_order=2, algorithm_type="dpmsolver++",
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0,
    )
    tokenizer = text.gemma_tokenizer(pathlib.Path(__file__).parents[2] / "core/diffusion/testdata/text/gemma.json")
    pipe = diffusers.SanaPipeline(**parts, tokenizer=tokenizer, scheduler=scheduler)
    given = {"prompt": "a red round thing", "negative_prompt": "blue", "height": 64, "width": 96, "guidance_scale": SCALE}
    return run(pipe, **given, use_resolution_binning=False)


CASES = {
    "inpaint": lambda: inpaint(1.0),
    "inpaint_more": lambda: inpaint(0.6),
    "lcm": lcm,
    "depth": depth,
    "sdxl_inpaint": sdxl_inpaint,
    "playground": playground,
    "refiner": refiner,
    "handover": handover,
    "sd35": sd35,
    "fill": lambda: flux(diffusers.FluxFillPipeline, "flux/transformer_fill", image=PICTURE, mask_image=MASK),
    "control": lambda: flux(diffusers.FluxControlPipeline, "flux/transformer_control", control_image=PICTURE),
    "kontext": kontext,
    "chroma": chroma,
    "pixart": pixart,
    "sana": sana,
}


def encoded():
    """The sample picture as Sana's autoencoder encodes it, without its scale."""
    picture = torch.tensor(sample_picture()).permute(2, 0, 1)[None].float() / 127.5 - 1
    return np.ascontiguousarray(small.modules("sana", "A")["vae"].encode(picture).latent[0].numpy())


def main(folder, *names):
    warnings.filterwarnings("ignore")
    tensors = load_file(f"{folder}/variants.safetensors") if names else {}
    for name in names or CASES:
        tensors[f"{name}.latents"], tensors[f"{name}.picture"] = CASES[name]()
        print(name, [float(np.abs(state).max()) for state in tensors[f"{name}.latents"]])
    tensors["sana_encoded"] = encoded()
    save_file(tensors, f"{folder}/variants.safetensors")


if __name__ == "__main__":
    with torch.no_grad():
        main(*sys.argv[1:])
