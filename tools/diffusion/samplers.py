"""Writes core/diffusion/testdata/samplers.json: what k-diffusion's samplers compute on a small problem.

    pip install torch numpy scipy torchsde torchdiffeq tqdm && pip install --no-deps k-diffusion==0.1.1.post1
    python tools/diffusion/samplers.py core/diffusion/testdata/samplers.json

The data is -1 or 1 in each element, so the best estimate of it is tanh(x / sigma^2). Starting noise is seed 0, noise of the
samplers seed 1, both from torch's generator on the CPU. Only k-diffusion's file of samplers is loaded, for the package imports what
training needs.
"""

import importlib.metadata
import importlib.util
import json
import sys
import types

import torch

ELEMENTS = 32
SAMPLERS = {
    "euler": "sample_euler",
    "euler_ancestral": "sample_euler_ancestral",
    "heun": "sample_heun",
    "dpm_2": "sample_dpm_2",
    "dpm_2_ancestral": "sample_dpm_2_ancestral",
    "dpmpp_2s_ancestral": "sample_dpmpp_2s_ancestral",
    "dpmpp_sde": "sample_dpmpp_sde",
    "dpmpp_2m": "sample_dpmpp_2m",
    "dpmpp_2m_sde": "sample_dpmpp_2m_sde",
    "dpmpp_2m_sde_heun": "sample_dpmpp_2m_sde",
    "dpmpp_3m_sde": "sample_dpmpp_3m_sde",
    "lms": "sample_lms",
}
BROWNIAN = {"dpmpp_sde", "dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde"}


def load():
    """k_diffusion.sampling, without the rest of the package."""
    package = types.ModuleType("k_diffusion")
    utils = types.ModuleType("k_diffusion.utils")
    utils.append_dims = lambda x, dims: x[(...,) + (None,) * (dims - x.ndim)]
    package.utils = utils
    sys.modules |= {"k_diffusion": package, "k_diffusion.utils": utils}
    files = importlib.metadata.files("k-diffusion")
    path = next(file for file in files if file.name == "sampling.py").locate()
    spec = importlib.util.spec_from_file_location("k_diffusion.sampling", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def denoise(x, sigma, **_):
    """The best estimate of -1 or 1."""
    return torch.tanh(x / sigma[:, None] ** 2)


def main(path):
    sampling = load()
    sigmas = sampling.get_sigmas_karras(8, 0.0291671582, 14.6146412293).double()
    start = torch.randn(1, ELEMENTS, generator=torch.Generator().manual_seed(0)).double() * sigmas[0]
    result = {"sigmas": sigmas.tolist(), "start": start[0].tolist(), "samplers": {}}
    for name, function in SAMPLERS.items():
        generator = torch.Generator().manual_seed(1)
        states = []
        arguments = {"disable": True, "callback": lambda at, states=states: states.append(at["x"])}
        if name in BROWNIAN:
            # The tree's own type is f32, as in ComfyUI.
            tree = sampling.BrownianTreeNoiseSampler(start.float(), sigmas[-2].float(), sigmas[0].float(), seed=1)
            arguments["noise_sampler"] = lambda a, b, tree=tree: tree(a, b).double()
        elif name not in {"euler", "heun", "dpm_2", "dpmpp_2m", "lms"}:
            draw = lambda *_: torch.randn(1, ELEMENTS, generator=generator).double()
            arguments["noise_sampler"] = draw
        if name.endswith("sde_heun"):
            arguments["solver_type"] = "heun"
        elif name.endswith("2m_sde"):
            arguments["solver_type"] = "midpoint"
        states.append(getattr(sampling, function)(denoise, start, sigmas, **arguments))
        result["samplers"][name] = [[round(v, 7) for v in state[0].tolist()] for state in states[1:]]
    with open(path, "w") as file:
        json.dump(result, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
