"""Stages `unet` and `export`."""

import copy
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import StableDiffusionPipeline
from torch import nn
from transformers import CLIPTokenizerFast

import model
import scenes
from run import Run, set_rate, to_tensor
from text import load_text
from vae import load_vae, preview_factors

# A wrong word of each kind, to see which words the model has learnt to obey.
SWAPS = {
    "relation": {"left of": "right of", "right of": "left of", "above": "below", "below": "above"},
    "colour": dict(zip(scenes.COLOURS, [*list(scenes.COLOURS)[1:], "red"])),
    "shape": dict(zip(scenes.SHAPES, [*scenes.SHAPES[1:], "circle"])),
}


@torch.no_grad()
def states(tokenizer, encoder, captions, device):
    """(captions, 77, width) text states, in blocks so that memory stays small."""
    blocks = [captions[i : i + 256] for i in range(0, len(captions), 256)]
    made = [encoder(model.token_ids(tokenizer, block).to(device)).last_hidden_state.half() for block in blocks]
    return torch.cat(made)


def diffusion_loss(predict, latents, schedule):
    """The error of v-prediction on `latents` at random times, noisy times more often: layout is decided there.

    `predict(noisy, times)` is the network with its conditions.
    """
    noise = torch.randn(latents.shape).to(latents.device)
    times = (1000 * torch.rand(len(latents)) ** 0.55).long().clamp(max=999).to(latents.device)
    noisy = schedule.add_noise(latents, noise, times).contiguous(memory_format=torch.channels_last)
    return F.mse_loss(predict(noisy, times), schedule.get_velocity(latents, noise, times))


class Probe:
    """How much the loss on unseen scenes grows when one word of the caption is wrong."""

    def __init__(self, vae, words, device, schedule):
        prompts = [p for p in scenes.unseen_prompts(128, seed=2) if p.kind == "relation"]
        rng = np.random.default_rng(2)
        pictures = [scenes.draw(p, scenes.place(p, rng)) for p in prompts]
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            latents = vae.encode(to_tensor(pictures, device)).latent_dist.mean * vae.config.scaling_factor
        noise = torch.randn(latents.shape, generator=generator).to(device)
        self.times = torch.full((len(prompts),), 850, device=device)
        self.noisy = schedule.add_noise(latents, noise, self.times)
        self.target = schedule.get_velocity(latents, noise, self.times)
        self.states = {"right": states(*words, [p.caption() for p in prompts], device)}
        for name, swap in SWAPS.items():
            self.states[name] = states(*words, [self._swapped(p, name, swap).caption() for p in prompts], device)

    @staticmethod
    def _swapped(prompt, name, swap):
        if name == "relation":
            return scenes.Prompt(prompt.kind, prompt.objects, swap[prompt.detail], background=prompt.background)
        (colour, shape), second = prompt.objects
        first = (swap[colour], shape) if name == "colour" else (colour, swap[shape])
        return scenes.Prompt(prompt.kind, (first, second), prompt.detail, background=prompt.background)

    @torch.no_grad()
    def __call__(self, unet):
        losses = {}
        for name, state in self.states.items():
            losses[name] = F.mse_loss(unet(self.noisy, self.times, state.float()).sample, self.target).item()
        right = losses.pop("right")
        return f"probe {right:.3f}, wrong " + ", ".join(f"{name} {loss - right:+.3f}" for name, loss in losses.items())


def unet(arguments):
    """Trains the UNet on the encoded scenes: SD's noise schedule, v-prediction, more of the noisy times."""
    run = Run(arguments, "unet")
    net = model.unet().to(run.device, memory_format=torch.channels_last)
    average = copy.deepcopy(net).requires_grad_(False)
    optimiser = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    run.restore(unet=net, average=average, optimiser=optimiser)
    words = load_text(run.folder, run.device)
    vae = load_vae(run.folder).to(run.device)
    schedule = model.scheduler()
    probe = Probe(vae, words, run.device, schedule)
    data = np.load(run.folder / "latents.npz")
    table = states(*words, ["", *data["captions"].tolist()], run.device)
    chosen = torch.from_numpy(data["chosen"]) + 1
    means, deviations = torch.from_numpy(data["means"]), torch.from_numpy(data["deviations"])
    losses = []
    while run.step < arguments.steps:
        rng = run.random()
        index = torch.from_numpy(rng.integers(len(chosen), size=arguments.batch))
        dropped = torch.rand(arguments.batch) < 0.1
        state = table[torch.where(dropped, 0, chosen[index]).to(run.device)].float()
        mean, deviation = means[index].float(), deviations[index].float()
        latents = (mean + deviation * torch.randn_like(mean)).to(run.device)
        set_rate(optimiser, run.step, arguments.steps, arguments.rate)
        loss = diffusion_loss(lambda noisy, times: net(noisy, times, state).sample, latents, schedule)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        with torch.no_grad():
            keep = min(0.9995, (run.step + 1) / (run.step + 10))
            torch._foreach_lerp_(list(average.parameters()), list(net.parameters()), 1 - keep)
        losses.append(loss.item())
        run.tick(arguments.steps)
        if run.step % 200 == 0:
            run.log(f"loss {np.mean(losses):.4f}, {probe(average)}")
            losses.clear()


def load_parts(folder, device="cpu"):
    """(tokenizer, text encoder, UNet with averaged weights, autoencoder) of a run."""
    folder = Path(folder)
    net = model.unet()
    net.load_state_dict(torch.load(folder / "unet.pt", map_location="cpu")["average"])
    return *load_text(folder, device), net.to(device).eval(), load_vae(folder).to(device).eval()


def export(arguments):
    """Writes the model as a Diffusers folder in fp16: RUN/demo."""
    tokenizer, encoder, net, vae = load_parts(arguments.run)
    pipeline = StableDiffusionPipeline(
        vae=vae, text_encoder=encoder, tokenizer=tokenizer, unet=net, scheduler=model.scheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )
    folder = Path(arguments.run) / "demo"
    pipeline.to(torch.float16).save_pretrained(folder)
    print("factors of previews (core/diffusion/src/preview.rs), the bias last:\n", preview_factors(vae.float()).numpy().round(4))
    # The same tokenizer in one file, tokenizer.json.
    CLIPTokenizerFast.from_pretrained(folder / "tokenizer").save_pretrained(folder / "tokenizer")
