"""Stages `lora`, `embedding` and `controlnet`: small additions to the trained model, which itself stays as it is.

`lora` learns a style: only the rims of objects are painted. `embedding` learns a new word: <gem>, a large purple star
on black. `controlnet` learns to put objects where an edge picture shows them.
"""

import numpy as np
import torch
from diffusers import ControlNetModel
from safetensors.torch import save_file
from torch import nn

import model
import scenes
from run import Run, set_rate, to_tensor
from unet import diffusion_loss, load_parts, states

RANK = 8
GEM = scenes.Prompt("single", (("purple", "star"),), size="large", background="black")
VECTORS = 2  # of the embedding


class LoraLayer(nn.Module):
    """A frozen layer plus the product of two small ones, scaled by 1 (alpha equals the rank)."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        if isinstance(layer, nn.Conv2d):
            shape = dict(kernel_size=layer.kernel_size, stride=layer.stride, padding=layer.padding, bias=False)
            self.down = nn.Conv2d(layer.in_channels, RANK, **shape)
            self.up = nn.Conv2d(RANK, layer.out_channels, 1, bias=False)
        else:
            self.down = nn.Linear(layer.in_features, RANK, bias=False)
            self.up = nn.Linear(RANK, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def _add_lora(net):
    """Wraps the attention projections and the resnets' convolutions: {name of the layer: LoraLayer}."""
    wanted = ("to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2")
    layers = {}
    for name, layer in list(net.named_modules()):
        if name.endswith(wanted):
            parent, _, last = name.rpartition(".")
            layers[name] = LoraLayer(layer)
            setattr(net.get_submodule(parent), last, layers[name])
    return layers


def _latents(vae, pictures, device):
    with torch.no_grad():
        return vae.encode(to_tensor(pictures, device)).latent_dist.sample() * vae.config.scaling_factor


def _captions(prompts, rng):
    return ["" if rng.random() < 0.1 else prompt.caption() for prompt in prompts]


def _train(run, arguments, weights, loss_of):
    """Steps of `loss_of(rng)` over `weights`; the stage's parts must be restored before."""
    losses = []
    optimiser = run.parts["optimiser"]
    while run.step < arguments.steps:
        rng = run.random()
        set_rate(optimiser, run.step, arguments.steps, arguments.rate, warm=50)
        loss = loss_of(rng)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        losses.append(loss.item())
        run.tick(arguments.steps)
        if run.step % 100 == 0:
            run.log(f"loss {np.mean(losses):.4f}")
            losses.clear()


def _save(tensors, path):
    save_file({name: tensor.detach().half().cpu().contiguous() for name, tensor in tensors.items()}, path)


def lora(arguments):
    """Writes RUN/outline.safetensors, in kohya's form."""
    run = Run(arguments, "lora")
    tokenizer, encoder, net, vae = load_parts(run.folder, run.device)
    net.requires_grad_(False)
    layers = _add_lora(net)
    bank = nn.ModuleList(module for layer in layers.values() for module in (layer.down, layer.up)).to(run.device)
    optimiser = torch.optim.AdamW(bank.parameters(), weight_decay=0.01)
    run.restore(bank=bank, optimiser=optimiser)
    schedule = model.scheduler()

    def loss_of(rng):
        sampler = scenes.Sampler(rng)
        drawn = [sampler.scene() for _ in range(arguments.batch)]
        latents = _latents(vae, [scenes.draw(*scene, outlined=True) for scene in drawn], run.device)
        state = states(tokenizer, encoder, _captions([p for p, _ in drawn], rng), run.device).float()
        return diffusion_loss(lambda noisy, times: net(noisy, times, state).sample, latents, schedule)

    _train(run, arguments, list(bank.parameters()), loss_of)
    tensors = {}
    for name, layer in layers.items():
        key = "lora_unet_" + name.replace(".", "_")
        tensors |= {f"{key}.lora_down.weight": layer.down.weight, f"{key}.lora_up.weight": layer.up.weight}
        tensors[f"{key}.alpha"] = torch.tensor(float(RANK))
    _save(tensors, run.folder / "outline.safetensors")


def embedding(arguments):
    """Writes RUN/gem.safetensors: `emb_params`, (vectors, width)."""
    run = Run(arguments, "embedding")
    tokenizer, encoder, net, vae = load_parts(run.folder, run.device)
    net.requires_grad_(False)
    table = encoder.get_input_embeddings()
    start = table.weight[tokenizer.convert_tokens_to_ids(["circle</w>", "red</w>"])].mean(0)
    words = nn.ParameterList([start.repeat(VECTORS, 1) + 0.01 * torch.randn(VECTORS, model.WIDTH).to(run.device)])
    optimiser = torch.optim.AdamW(words.parameters(), weight_decay=0)
    run.restore(words=words, optimiser=optimiser)
    schedule = model.scheduler()
    # "a" and then the new word; the end token stands in its place until the hook puts the vectors in.
    ids = model.token_ids(tokenizer, ["a" + " a" * VECTORS]).to(run.device)

    def put(_, __, output):
        return torch.cat([output[:, :2], words[0][None], output[:, 2 + VECTORS :]], 1)

    table.register_forward_hook(put)

    def loss_of(rng):
        pictures = [scenes.draw(GEM, scenes.place(GEM, rng)) for _ in range(arguments.batch)]
        latents = _latents(vae, pictures, run.device)
        state = encoder(ids).last_hidden_state.expand(arguments.batch, -1, -1)
        return diffusion_loss(lambda noisy, times: net(noisy, times, state).sample, latents, schedule)

    _train(run, arguments, list(words.parameters()), loss_of)
    _save({"emb_params": words[0]}, run.folder / "gem.safetensors")


def edges(picture):
    """Canny's edges of a picture, one pixel wide: (H, W) bool (J. Canny, 1986; both thresholds are the same here)."""
    gray = picture.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)
    padded = np.pad(gray, 1, mode="edge")
    across = padded[:, 2:] - padded[:, :-2]
    across = across[:-2] + 2 * across[1:-1] + across[2:]
    along = padded[2:] - padded[:-2]
    along = along[:, :-2] + 2 * along[:, 1:-1] + along[:, 2:]
    strength = abs(across) + abs(along)
    around = np.pad(strength, 1)
    height, width = gray.shape

    def shifted(dy, dx):
        return around[1 + dy : 1 + dy + height, 1 + dx : 1 + dx + width]

    # The sector of the gradient's direction chooses the two neighbours that an edge pixel must not be weaker than.
    sector = np.round(np.arctan2(along, across) / (np.pi / 4)).astype(int) % 4
    steps = np.array([(0, 1), (1, 1), (1, 0), (1, -1)])
    first = np.choose(sector, [shifted(dy, dx) for dy, dx in steps])
    second = np.choose(sector, [shifted(-dy, -dx) for dy, dx in steps])
    return (strength > 100) & (strength > first) & (strength >= second)


def controlnet(arguments):
    """Writes RUN/canny, a Diffusers folder in fp16."""
    run = Run(arguments, "controlnet")
    tokenizer, encoder, net, vae = load_parts(run.folder, run.device)
    net.requires_grad_(False)
    control = ControlNetModel.from_unet(net, conditioning_embedding_out_channels=model.CONTROL_CHANNELS)
    control = control.to(run.device, memory_format=torch.channels_last).train().requires_grad_(True)
    optimiser = torch.optim.AdamW(control.parameters(), betas=(0.9, 0.99), weight_decay=0.01)
    run.restore(control=control, optimiser=optimiser)
    schedule = model.scheduler()

    def loss_of(rng):
        sampler = scenes.Sampler(rng)
        prompts = [sampler.prompt() for _ in range(arguments.batch)]
        pictures = [scenes.draw(prompt, scenes.place_freely(prompt, rng)) for prompt in prompts]
        latents = _latents(vae, pictures, run.device)
        lines = torch.from_numpy(np.stack([edges(picture) for picture in pictures])).float().to(run.device)
        lines = lines[:, None].expand(-1, 3, -1, -1)
        state = states(tokenizer, encoder, _captions(prompts, rng), run.device).float()

        def predict(noisy, times):
            down, mid = control(noisy, times, state, lines, return_dict=False)
            return net(
                noisy, times, state, down_block_additional_residuals=down, mid_block_additional_residual=mid
            ).sample

        return diffusion_loss(predict, latents, schedule)

    _train(run, arguments, list(control.parameters()), loss_of)
    control.half().save_pretrained(run.folder / "canny")
