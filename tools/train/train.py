"""Trains the demo model on generated scenes, stage by stage. README.md has the commands.

Each stage keeps its state in `RUN/STAGE.pt` and goes on from there when it is started again.
"""

import argparse

from adapters import controlnet, embedding, lora
from text import text
from unet import export, unet
from vae import autoencoder, decoder, encode

# Steps, batch size and peak rate of learning of each stage.
DEFAULTS = {
    autoencoder: (3500, 8, 2e-3),
    text: (2000, 48, 2e-3),
    encode: (0, 0, 0),
    unet: (4500, 64, 1e-3),
    decoder: (3000, 8, 1e-3),
    lora: (1800, 32, 2e-3),
    embedding: (600, 16, 1e-2),
    controlnet: (1500, 32, 1e-3),
    export: (0, 0, 0),
}


def main():
    stages = {stage.__name__: stage for stage in DEFAULTS}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--run", default="run", help="folder of the run")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--scenes", type=int, default=60000, help="scenes that `encode` draws")
    parser.add_argument("--save-every", type=float, default=120, help="seconds between saves")
    arguments = parser.parse_args()
    stage = stages[arguments.stage]
    for name, value in zip(("steps", "batch", "rate"), DEFAULTS[stage]):
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    stage(arguments)


if __name__ == "__main__":
    main()
