"""Writes small upscalers of ESRGAN and what PyTorch computes with them, for tests/generate/upscale.rs.

    pip install torch numpy onnx safetensors
    python tools/diffusion/upscale.py tests/generate

`esrgan_xSCALE.onnx` is a network with one block of few channels (tools/export/rrdbnet.py) and random weights. esrgan.safetensors
has a picture, `picture`, `[37, 45, 3]`, and its enlargements `xSCALE`, `[37 SCALE, 45 SCALE, 3]`, all in bytes. Where a network folds squares of
pixels into channels, the picture gets an even size by repeating its right and lower edge, and the result is cut.
"""

import pathlib
import sys

import numpy as np
import torch
from safetensors.numpy import save_file

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "export"))
import rrdbnet

HEIGHT, WIDTH = 37, 45


def network(scale):
    """An upscaler whose results use the whole range of values, and a little more."""
    torch.manual_seed(scale)
    module = rrdbnet.RRDBNet(scale, blocks=1, features=8, growth=4).eval()
    for layer in module.modules():
        if isinstance(layer, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(layer.weight, a=0.2)
            torch.nn.init.normal_(layer.bias, std=0.1)
    last = module.conv_last
    result = module(tensor(picture(), module.fold))
    centre, spread = result.mean((0, 2, 3)), result.std((0, 2, 3))
    factor = 0.3 / spread
    last.weight *= factor[:, None, None, None]
    last.bias.copy_((last.bias - centre) * factor + 0.5)
    return module


def picture():
    """Waves of many lengths, `[HEIGHT, WIDTH, 3]` bytes."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    planes = [np.sin(x * x / 40 + y / 5), np.sin(x * y / 70), np.sin(y * y / 30 - x / 4)]
    return ((np.stack(planes, -1) * 0.5 + 0.5) * 255).round().astype(np.uint8)


def tensor(picture, fold):
    """Values from 0 to 1, `[1, 3, height, width]`, with a height and width that are multiples of `fold`."""
    filled = np.pad(picture, [(0, -side % fold) for side in picture.shape[:2]] + [(0, 0)], mode="edge")
    return torch.from_numpy(filled).permute(2, 0, 1)[None].float() / 255


def larger(module, picture, scale):
    # In float64, so that it does not depend on the order of sums.
    values = module.double()(tensor(picture, module.fold).double())[0].clamp(0, 1) * 255
    cut = values.permute(1, 2, 0)[: HEIGHT * scale, : WIDTH * scale]
    return np.ascontiguousarray(cut.round().to(torch.uint8).numpy())


def export(module, scale, file):
    dims = {2: "height", 3: "width"}
    torch.onnx.export(
        module, (tensor(picture(), module.fold),), file, input_names=["image"], output_names=["upscaled"], opset_version=17,
        dynamic_axes={"image": dims, "upscaled": {axis: f"{name}_x{scale}" for axis, name in dims.items()}}, dynamo=False,
    )  # fmt: skip


def main(folder):
    tensors = {"picture": picture()}
    for scale in (4, 2):
        module = network(scale)
        export(module, scale, f"{folder}/esrgan_x{scale}.onnx")
        tensors[f"x{scale}"] = larger(module, picture(), scale)
        found = tensors[f"x{scale}"]
        print(scale, found.shape, found.mean(), found.std(), (found == 0).mean(), (found == 255).mean())
    save_file(tensors, f"{folder}/esrgan.safetensors")


if __name__ == "__main__":
    with torch.no_grad():
        main(*sys.argv[1:])
