"""Stage `text`: the text encoder."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import model
import scenes
from run import Run, set_rate


class Layout(nn.Module):
    """Reads from the text states what each of 8x8 cells of the picture shows. Training throws it away.

    It gives the text encoder a task of its own, as contrastive training gave CLIP, so that the UNet meets states that
    already say what stands where.
    """

    CELLS = 8
    NAMES = (*scenes.COLOURS, *scenes.SHAPES, *scenes.BACKGROUNDS)

    def __init__(self):
        super().__init__()
        self.cells = nn.Parameter(torch.randn(self.CELLS**2, model.WIDTH) * 0.5)
        self.attention = nn.MultiheadAttention(model.WIDTH, 4, batch_first=True)
        self.norm = nn.LayerNorm(model.WIDTH)
        self.out = nn.Sequential(
            nn.Linear(model.WIDTH, 2 * model.WIDTH), nn.SiLU(), nn.Linear(2 * model.WIDTH, len(self.NAMES))
        )

    def forward(self, states):
        query = self.cells.expand(len(states), -1, -1)
        return self.out(self.norm(query + self.attention(query, states, states, need_weights=False)[0]))

    @classmethod
    def target(cls, prompt, items):
        """(cells, names): how much of each cell each colour, shape and background covers."""
        target = np.zeros((cls.CELLS, cls.CELLS, len(cls.NAMES)), np.float32)
        for item in items:
            cover = scenes.coverage(item, 4 * cls.CELLS).reshape(cls.CELLS, 4, cls.CELLS, 4).mean((1, 3))
            for name in (item.colour, item.shape):
                target[..., cls.NAMES.index(name)] += cover
        target[..., cls.NAMES.index(prompt.background or "white")] = 1
        return target.reshape(-1, len(cls.NAMES)).clip(0, 1)


def text(arguments):
    """Trains the text encoder to say what stands where."""
    run = Run(arguments, "text")
    tokenizer = model.write_tokenizer(run.folder / "tokenizer")
    encoder, layout = model.text_encoder(len(tokenizer)).to(run.device), Layout().to(run.device)
    weights = [*encoder.parameters(), *layout.parameters()]
    optimiser = torch.optim.AdamW(weights, betas=(0.9, 0.99), weight_decay=0.01)
    run.restore(encoder=encoder, layout=layout, optimiser=optimiser)
    unseen = scenes.unseen_prompts(128, seed=1)
    fixed = np.random.default_rng(1)
    unseen_target = torch.from_numpy(np.stack([Layout.target(p, scenes.place(p, fixed)) for p in unseen]))
    unseen_ids = model.token_ids(tokenizer, [p.caption() for p in unseen]).to(run.device)
    losses = []
    while run.step < arguments.steps:
        rng = run.random()
        sampler = scenes.Sampler(rng)
        drawn = [sampler.scene() for _ in range(arguments.batch)]
        # The encoder is causal, so a short sequence trains the same states; a full one trains the padding as well.
        length = model.TOKENS if run.step % 8 == 0 else 24
        # Empty captions are for classifier-free guidance.
        captions = ["" if rng.random() < 0.1 else prompt.caption() for prompt, _ in drawn]
        ids = model.token_ids(tokenizer, captions, length).to(run.device)
        target = torch.from_numpy(np.stack([Layout.target(*scene) for scene in drawn])).to(run.device)
        set_rate(optimiser, run.step, arguments.steps, arguments.rate)
        loss = F.binary_cross_entropy_with_logits(layout(encoder(ids).last_hidden_state), target)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        losses.append(loss.item())
        run.tick(arguments.steps)
        if run.step % 100 == 0:
            with torch.no_grad():
                made = layout(encoder(unseen_ids).last_hidden_state)
                other = F.binary_cross_entropy_with_logits(made, unseen_target.to(run.device)).item()
            run.log(f"loss {np.mean(losses):.4f}, of unseen prompts {other:.4f}")
            losses.clear()


def load_text(run, device):
    """The trained text encoder, frozen, with its tokenizer."""
    tokenizer = model.write_tokenizer(run / "tokenizer")
    encoder = model.text_encoder(len(tokenizer))
    encoder.load_state_dict(torch.load(run / "text.pt", map_location="cpu")["encoder"])
    return tokenizer, encoder.to(device).eval().requires_grad_(False)
