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

ELEMENTS = 16
# Names in the file: k-diffusion's function and its arguments.
SAMPLERS = {
    "euler": ("euler", {}),
    "euler_churn": ("euler", {"s_churn": 2.0, "s_tmin": 0.5, "s_noise": 1.1}),
    "euler_ancestral": ("euler_ancestral", {}),
    "euler_ancestral_eta": ("euler_ancestral", {"eta": 0.6, "s_noise": 0.9}),
    "heun": ("heun", {}),
    "heun_churn": ("heun", {"s_churn": 8.0, "s_tmin": 0.5}),
    "dpm_2": ("dpm_2", {}),
    "dpm_2_churn": ("dpm_2", {"s_churn": 2.0, "s_tmin": 0.5}),
    "dpm_2_ancestral": ("dpm_2_ancestral", {}),
    "dpm_fast": ("dpm_fast", {}),
    "dpm_fast_eta": ("dpm_fast", {"eta": 0.5}),
    "dpm_adaptive": ("dpm_adaptive", {}),
    "dpm_adaptive_eta": ("dpm_adaptive", {"eta": 0.5}),
    "dpmpp_2s_ancestral": ("dpmpp_2s_ancestral", {}),
    "dpmpp_sde": ("dpmpp_sde", {}),
    "dpmpp_sde_eta": ("dpmpp_sde", {"eta": 0.5}),
    "dpmpp_2m": ("dpmpp_2m", {}),
    "dpmpp_2m_sde": ("dpmpp_2m_sde", {"solver_type": "midpoint"}),
    "dpmpp_2m_sde_eta": ("dpmpp_2m_sde", {"solver_type": "midpoint", "eta": 0.4}),
    "dpmpp_2m_sde_heun": ("dpmpp_2m_sde", {"solver_type": "heun"}),
    "dpmpp_3m": ("dpmpp_3m_sde", {"eta": 0.0}),
    "dpmpp_3m_sde": ("dpmpp_3m_sde", {}),
    "lms": ("lms", {}),
    "lms_order_2": ("lms", {"order": 2}),
}
BROWNIAN = {"dpmpp_sde", "dpmpp_2m_sde", "dpmpp_3m_sde"}
DRAWING = {"euler_ancestral", "dpm_2_ancestral", "dpm_fast", "dpm_adaptive", "dpmpp_2s_ancestral"}


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
    for name, (function, arguments) in SAMPLERS.items():
        generator = torch.Generator().manual_seed(1)
        states, accepted = [], [0]
        draw = lambda *_, generator=generator: torch.randn(1, ELEMENTS, generator=generator).double()
        churn = "s_churn" in arguments

        def draw_like(x, draw=draw, states=states, churn=churn):
            # The noise of churn is the first thing that happens in a step.
            if churn:
                states.append(x)
            return draw()

        def observe(at, function=function, states=states, accepted=accepted, churn=churn):
            # The state before each step, but that after it for dpm_adaptive, which repeats rejected steps.
            if churn:
                return
            if function != "dpm_adaptive" or at["n_accept"] > accepted[0]:
                states.append(at["x"])
                accepted[0] = at.get("n_accept")

        arguments = {"disable": True, "callback": observe, **arguments}
        if function in BROWNIAN:
            # The tree's own type is f32, as in ComfyUI.
            tree = sampling.BrownianTreeNoiseSampler(start.float(), sigmas[-2].float(), sigmas[0].float(), seed=1)
            arguments["noise_sampler"] = lambda a, b, tree=tree: tree(a, b).double()
        elif function in DRAWING:
            arguments["noise_sampler"] = draw
        torch.randn_like = draw_like
        levels = {
            "dpm_fast": (sigmas[-2].item(), sigmas[0].item(), len(sigmas) - 1),
            "dpm_adaptive": (sigmas[-2].item(), sigmas[0].item()),
        }.get(function, (sigmas,))
        last = getattr(sampling, "sample_" + function)(denoise, start, *levels, **arguments)
        if function != "dpm_adaptive":
            states = states[1:] + [last]
        result["samplers"][name] = [[round(v, 7) for v in state[0].tolist()] for state in states]
    with open(path, "w") as file:
        json.dump(result, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
