"""Stages `autoencoder`, `encode` and `decoder`."""

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import nn

import model
import scenes
from run import Run, set_rate, to_tensor


def _psnr(errors):
    return f"PSNR {10 * np.log10(4 / np.mean(errors)):.2f} dB"


def _batch(rng, size, device):
    """Scenes for the autoencoder: one in six is in the LoRA's style, one in six is not in order."""
    sampler = scenes.Sampler(rng)
    pictures = []
    for _ in range(size):
        prompt, items = sampler.scene()
        draw = rng.random()
        if draw < 1 / 6:
            items = scenes.place_freely(prompt, rng)
        pictures.append(scenes.draw(prompt, items, outlined=draw > 5 / 6))
    return to_tensor(pictures, device)


def autoencoder(arguments):
    """Trains the autoencoder: squared error, and a KL term so small that the latents stay precise."""
    run = Run(arguments, "vae")
    vae = model.autoencoder().to(run.device, memory_format=torch.channels_last)
    optimiser = torch.optim.AdamW(vae.parameters(), betas=(0.9, 0.99), weight_decay=1e-4)
    run.restore(vae=vae, optimiser=optimiser)
    errors = []
    while run.step < arguments.steps:
        real = _batch(run.random(), arguments.batch, run.device)
        set_rate(optimiser, run.step, arguments.steps, arguments.rate)
        posterior = vae.encode(real).latent_dist
        made = vae.decode(posterior.sample()).sample
        error = F.mse_loss(made, real)
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        # At first, three channels have to be the picture made small: the decoder starts with colours and places.
        small = F.mse_loss(posterior.mean[:, :3], F.avg_pool2d(real, 8)) * max(0, 1 - run.step / 1500)
        optimiser.zero_grad()
        (error + 0.1 * F.l1_loss(made, real) + small + 2e-5 * kl).backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimiser.step()
        errors.append(error.item())
        run.tick(arguments.steps)
        if run.step % 50 == 0:
            run.log(f"{_psnr(errors)}, KL {kl.item():.2f}")
            errors.clear()


def whiten(vae, mean, deviation):
    """Folds a shift and a scale for each channel into `vae`, so that its scaled latents have mean 0 and variance 1.

    The convolutions of 1x1 before and after the latents absorb them exactly.
    """
    scale = deviation * vae.config.scaling_factor
    count = len(mean)
    with torch.no_grad():
        before, after = vae.quant_conv, vae.post_quant_conv
        after.bias += after.weight[:, :, 0, 0] @ mean
        after.weight *= scale[None, :, None, None]
        before.bias[:count] = (before.bias[:count] - mean) / scale
        before.weight[:count] /= scale[:, None, None, None]
        before.bias[count:] -= 2 * scale.log()


def encode(arguments):
    """Whitens the trained autoencoder, writes it to RUN/vae, and encodes `--scenes` scenes into RUN/latents.npz."""
    run = Run(arguments, "vae")
    vae = model.autoencoder().to(run.device, memory_format=torch.channels_last)
    run.restore(vae=vae)
    sampler = scenes.Sampler((arguments.seed, 1))
    captions, chosen, means, deviations = {}, [], [], []

    def latents(count):
        drawn = [sampler.scene() for _ in range(count)]
        posterior = vae.encode(to_tensor([scenes.draw(*scene) for scene in drawn], run.device)).latent_dist
        return [prompt.caption() for prompt, _ in drawn], posterior

    with torch.no_grad():
        sample = torch.cat([latents(128)[1].sample() for _ in range(8)])
        whiten(vae, sample.mean((0, 2, 3)), sample.std((0, 2, 3)))
        vae.save_pretrained(run.folder / "vae")
        factor = vae.config.scaling_factor
        for _ in range(arguments.scenes // 100):
            texts, posterior = latents(100)
            chosen += [captions.setdefault(text, len(captions)) for text in texts]
            means.append((posterior.mean * factor).cpu().numpy().astype(np.float16))
            deviations.append((posterior.std * factor).cpu().numpy().astype(np.float16))
    np.savez(
        run.folder / "latents.npz", captions=np.array(list(captions)), chosen=np.array(chosen),
        means=np.concatenate(means), deviations=np.concatenate(deviations),
    )
    print(f"encoded {len(chosen)} scenes with {len(captions)} captions", flush=True)


def preview_factors(vae, count=512):
    """Linear regression from scaled latents to the colours, from -1 to 1, of the squares they stand for: (5, 3), the bias last."""
    sampler = scenes.Sampler(0)
    pictures = to_tensor([scenes.draw(*sampler.scene()) for _ in range(count)], vae.device)
    with torch.no_grad():
        latents = vae.encode(pictures).latent_dist.mean * vae.config.scaling_factor
    rows = latents.permute(0, 2, 3, 1).reshape(-1, 4)
    colours = F.avg_pool2d(pictures, 8).permute(0, 2, 3, 1).reshape(-1, 3)
    return torch.linalg.lstsq(torch.cat([rows, torch.ones(len(rows), 1)], 1), colours).solution


def decoder(arguments):
    """Trains the decoder further, against the whitened encoder as it is; the latents keep their meaning."""
    run = Run(arguments, "decoder")
    vae = AutoencoderKL.from_pretrained(run.folder / "vae").to(run.device, memory_format=torch.channels_last)
    weights = [*vae.decoder.parameters(), *vae.post_quant_conv.parameters()]
    optimiser = torch.optim.AdamW(weights, betas=(0.9, 0.99), weight_decay=1e-4)
    run.restore(vae=vae, optimiser=optimiser)
    errors = []
    while run.step < arguments.steps:
        real = _batch(run.random(), arguments.batch, run.device)
        set_rate(optimiser, run.step, arguments.steps, arguments.rate)
        with torch.no_grad():
            latents = vae.encode(real).latent_dist.sample()
            # The UNet's latents are a little off; the decoder has to bear that.
            latents += torch.randn_like(latents) * 0.03 / vae.config.scaling_factor
        made = vae.decode(latents).sample
        error = F.mse_loss(made, real)
        optimiser.zero_grad()
        (error + 0.1 * F.l1_loss(made, real)).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        errors.append(error.item())
        run.tick(arguments.steps)
        if run.step % 50 == 0:
            run.log(_psnr(errors))
            errors.clear()


def load_vae(run):
    """The whitened autoencoder of a run, with the decoder as far as it is trained."""
    vae = AutoencoderKL.from_pretrained(run / "vae")
    further = run / "decoder.pt"
    if further.exists():
        vae.load_state_dict(torch.load(further, map_location="cpu")["vae"])
    return vae
