"""What every stage of training shares: its state on disk, its rate of learning, its pictures."""

import os
import time
from pathlib import Path

import numpy as np
import torch


class Run:
    """One stage's state: restored when the stage starts, saved every few minutes as `RUN/STAGE.pt`."""

    def __init__(self, arguments, stage):
        self.folder = Path(arguments.run)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / f"{stage}.pt"
        self.device = torch.device(arguments.device)
        self.seed = arguments.seed
        self.every = arguments.save_every
        self.parts = {}
        self.state = {"step": 0, "seconds": 0.0}
        if self.path.exists():
            self.state = torch.load(self.path, map_location=self.device)
        self.saved = time.monotonic()
        torch.manual_seed(self.seed)

    @property
    def step(self):
        return self.state["step"]

    def restore(self, **parts):
        """Names the modules, averages and optimisers of the stage, and fills them from the saved state."""
        self.parts = parts
        for name, part in parts.items():
            if name in self.state:
                part.load_state_dict(self.state.pop(name))

    def random(self):
        """A generator for this step; it also seeds torch. A resumed run draws what an unbroken run would draw."""
        rng = np.random.default_rng((self.seed, self.step))
        torch.manual_seed(int(rng.integers(2**31)))
        return rng

    def tick(self, last):
        """Counts a step, and saves now and then and after step `last`."""
        self.state["step"] += 1
        if time.monotonic() - self.saved > self.every or self.step == last:
            self.save()

    def save(self):
        now = time.monotonic()
        self.state["seconds"] += now - self.saved
        self.saved = now
        state = {"step": self.step, "seconds": self.state["seconds"]}
        state |= {name: part.state_dict() for name, part in self.parts.items()}
        # A stop in the middle of writing leaves the last state whole.
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.path)

    def log(self, text):
        seconds = self.state["seconds"] + time.monotonic() - self.saved
        print(f"{self.path.stem} step {self.step}, {seconds:.0f} s: {text}", flush=True)


def set_rate(optimiser, step, last, peak, warm=200):
    """Linear warm-up, then a cosine from `peak` to a fiftieth of it at step `last`."""
    value = float(peak * min((step + 1) / warm, 0.51 + 0.49 * np.cos(np.pi * min(step / last, 1))))
    for group in optimiser.param_groups:
        group["lr"] = value


def to_tensor(pictures, device):
    """(N, 3, H, W) in -1..1, channels last, from uint8 pictures."""
    batch = torch.from_numpy(np.stack(pictures)).to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
    return batch.contiguous(memory_format=torch.channels_last)


def to_pictures(batch):
    """(N, H, W, 3) uint8 from a batch in -1..1."""
    return ((batch.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
