"""Writes small adapters and the weights that other programs merge them into, for core/weights/tests/adapter/peft.rs.

    python -m venv venv && venv/bin/pip install torch==2.15.0 peft==0.21.2 safetensors
    venv/bin/python tools/adapters/oracle.py core/weights/tests/data/peft

Each PEFT case is a folder as saved by PEFT (`adapter_config.json` and `adapter_model.safetensors`) with the merged weights in
f64 (`merged.safetensors`, `STRENGTH:NAME`). `base.safetensors` has the weights before merging. `comfyui.safetensors` is a DoRA
adapter with kohya's names. `comfyui_merged.safetensors` is the result in f64 of the formula of ComfyUI 0.3.77
(`weight_decompose` in `comfy/weight_adapter/base.py`), reimplemented below.
"""

import json
import pathlib
import sys

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lycoris_utils import LycorisLayer
from safetensors.torch import load_file, save_file

STRENGTHS = [1.0, 0.7]


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q = torch.nn.Linear(5, 6)
        self.to_k = torch.nn.Linear(5, 6)
        self.to_kk = torch.nn.Linear(5, 6)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Attention(), Attention()])
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.LayerNorm(6)


TARGETS = ["to_q", "to_k", "to_kk", "conv"]
LORA = {
    "plain": dict(r=2, lora_alpha=3),
    "rslora": dict(r=4, lora_alpha=3, use_rslora=True),
    "dora": dict(r=2, lora_alpha=3, use_dora=True),
    # A key is a suffix of whole name parts, or a regular expression. The first match counts.
    "patterns": dict(
        r=2,
        lora_alpha=4,
        rank_pattern={"0.to_q": 3, "to_k": 1},
        alpha_pattern={"blocks\\.[1-9]\\.to_q": 7, "to_q": 5, "k": 9, "to_k": 6},
    ),
    "bias": dict(r=2, lora_alpha=3, bias="lora_only"),
    "modules_to_save": dict(r=2, lora_alpha=3, modules_to_save=["norm"]),
    "lora_bias": dict(r=2, lora_alpha=3, lora_bias=True),
}


def randomise(module, seed):
    """Values in f64 that f32 represents exactly."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        values = torch.rand(parameter.shape, generator=generator) * 2 - 1
        parameter.data = values.double()


def case(folder, name, config):
    folder = folder / name
    folder.mkdir(exist_ok=True)
    merged = {}
    for strength in STRENGTHS:
        net = Net()
        randomise(net, 1)
        model = peft.get_peft_model(net, config)
        generator = torch.Generator().manual_seed(2)
        for key, parameter in model.named_parameters():
            if any(part in key for part in ["lora_", "hada_", "lokr_", "modules_to_save"]):
                values = torch.rand(parameter.shape, generator=generator) * 2 - 1
                parameter.data = values.double()
        if strength == STRENGTHS[0]:
            model.save_pretrained(folder)
            path = folder / "adapter_model.safetensors"
            save_file({key: value.float().contiguous() for key, value in load_file(path).items()}, path)
            (folder / "README.md").unlink(missing_ok=True)
        for module in model.modules():
            if isinstance(module, (LoraLayer, LycorisLayer)):
                module.scale_layer(strength)
        for key, value in model.merge_and_unload().state_dict().items():
            merged[f"{strength}:{key}"] = value.double().contiguous()
    save_file(merged, folder / "merged.safetensors")


def weight_decompose(weight, change, scale, strength):
    after = weight + change
    if scale.shape[0] == weight.shape[0]:
        norm = weight.flatten(1).norm(dim=1).reshape(-1, *[1] * (weight.dim() - 1))
    else:
        norm = after.transpose(0, 1).flatten(1).norm(dim=1).reshape(1, -1, *[1] * (weight.dim() - 2))
    after = after * (scale / (norm + torch.finfo(torch.float32).eps))
    return weight + strength * (after - weight)


def comfyui(folder):
    generator = torch.Generator().manual_seed(3)
    random = lambda *shape: torch.rand(shape, generator=generator) * 2 - 1
    net = Net()
    randomise(net, 1)
    file, merged = {}, {}
    for name, magnitudes in [
        ("blocks.0.to_q", (6, 1)),
        ("blocks.0.to_k", (1, 5)),
        ("blocks.1.to_q", None),
        ("conv", (4, 1, 1, 1)),
    ]:
        weight = net.get_parameter(f"{name}.weight").data
        up, down = random(weight.shape[0], 2), random(2, *weight.shape[1:])
        key = "lora_unet_" + name.replace(".", "_")
        if weight.dim() == 4:
            up = up.reshape(*up.shape, 1, 1)
        file |= {f"{key}.lora_up.weight": up, f"{key}.lora_down.weight": down, f"{key}.alpha": torch.tensor(1.0)}
        change = (up.double().flatten(1) @ down.double().flatten(1)).reshape(weight.shape) / 2
        scale = None if magnitudes is None else random(*magnitudes).abs() + 0.5
        if scale is not None:
            file[f"{key}.dora_scale"] = scale
        for strength in [*STRENGTHS, -0.5, 0.001]:
            after = weight + strength * change
            if scale is not None:
                after = weight_decompose(weight, change, scale.double(), strength)
            merged[f"{strength}:{name}.weight"] = after.contiguous()
    save_file(file, folder / "comfyui.safetensors")
    save_file(merged, folder / "comfyui_merged.safetensors")


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    net = Net()
    randomise(net, 1)
    save_file({key: value.float().contiguous() for key, value in net.state_dict().items()}, folder / "base.safetensors")
    for name, options in LORA.items():
        case(folder, name, peft.LoraConfig(target_modules=TARGETS, **options))
    linear = TARGETS[:3]
    case(folder, "loha", peft.LoHaConfig(r=2, alpha=3, target_modules=linear))
    case(folder, "lokr", peft.LoKrConfig(r=8, alpha=3, target_modules=linear))
    for config in folder.glob("*/adapter_config.json"):
        values = json.loads(config.read_text())
        config.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    comfyui(folder)


main()
