"""Draws unseen prompts with a trained run and reads colour, shape, count and relation back from the pictures.

Two lines come first that bound what the UNet can reach: the generator's own pictures, and those after the autoencoder.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import model
import scenes
from run import to_pictures, to_tensor
from unet import load_parts


@torch.no_grad()
def draw(parts, captions, guidance, steps, seed):
    """(captions, SIDE, SIDE, 3) uint8 pictures, by DDIM with classifier-free guidance."""
    tokenizer, encoder, net, vae = parts
    device = net.device
    context = encoder(model.token_ids(tokenizer, [*captions, ""]).to(device)).last_hidden_state
    context = torch.cat([context[-1:].expand(len(captions), -1, -1), context[:-1]])
    schedule = model.scheduler()
    schedule.set_timesteps(steps)
    side = scenes.SIDE // 8
    latents = torch.randn(len(captions), 4, side, side, generator=torch.Generator().manual_seed(seed)).to(device)
    for time in schedule.timesteps:
        plain, told = net(torch.cat([latents, latents]), time, context).sample.chunk(2)
        latents = schedule.step(plain + guidance * (told - plain), time, latents).prev_sample
    return to_pictures(vae.decode(latents / vae.config.scaling_factor).sample)


@torch.no_grad()
def rebuild(vae, pictures):
    """The pictures after encoding and decoding."""
    return to_pictures(vae.decode(vae.encode(to_tensor(pictures, vae.device)).latent_dist.mean).sample)


def marks(prompts, pictures):
    """The share of pictures that are right, by property."""
    found = {}
    for prompt, picture in zip(prompts, pictures):
        for name, right in scenes.score(prompt, picture).items():
            found.setdefault(name, []).append(right)
    return {name: float(np.mean(values)) for name, values in found.items()}


def sheet(pictures):
    """The pictures in rows of eight."""
    rows = [np.concatenate(list(pictures[i : i + 8]), axis=1) for i in range(0, len(pictures) // 8 * 8, 8)]
    return Image.fromarray(np.concatenate(rows))


def write_reference(folder, prompts, pictures):
    """What tests/demo.rs needs: the prompts, and the generator's own pictures of them."""
    folder.mkdir(parents=True, exist_ok=True)
    told = [
        {
            "caption": prompt.caption(),
            "objects": prompt.objects,
            "relation": prompt.detail if prompt.kind == "relation" else None,
            "background": prompt.background or "white",
        }
        for prompt in prompts
    ]
    (folder / "prompts.json").write_text("[\n" + ",\n".join(map(json.dumps, told)) + "\n]\n")
    sheet(pictures).save(folder / "drawn.png", optimize=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="run")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--guidance", type=float, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reference", type=Path, help="write prompts.json and drawn.png to this folder, and stop")
    parser.add_argument("--sheet", help="PNG file for the pictures of the last guidance")
    arguments = parser.parse_args()
    prompts = scenes.unseen_prompts(arguments.prompts)
    rng = np.random.default_rng(arguments.seed)
    real = [scenes.draw(prompt, scenes.place(prompt, rng)) for prompt in prompts]
    if arguments.reference:
        return write_reference(arguments.reference, prompts, real)
    parts = load_parts(arguments.run, arguments.device)
    captions = [prompt.caption() for prompt in prompts]

    def report(name, pictures):
        text = ", ".join(f"{what} {100 * share:.0f} %" for what, share in marks(prompts, pictures).items())
        print(f"{name}: {text}", flush=True)

    report("drawn", real)
    report("drawn, then through the autoencoder", rebuild(parts[-1], real))
    for guidance in arguments.guidance:
        pictures = draw(parts, captions, guidance, arguments.steps, arguments.seed)
        report(f"guidance {guidance:g}", pictures)
    if arguments.sheet:
        sheet(pictures).save(arguments.sheet)


if __name__ == "__main__":
    main()
