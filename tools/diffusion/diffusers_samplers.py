"""Writes core/diffusion/testdata/diffusers.json: what diffusers' schedulers compute on a small problem.

    pip install torch numpy scipy torchsde diffusers==0.36.0
    python tools/diffusion/diffusers_samplers.py core/diffusion/testdata/diffusers.json

The problem is that of samplers.py: data is -1 or 1 in each element. States of schedulers that keep them at variance 1 are multiplied
by sqrt(1 + sigma^2), so that all of them are x0 + sigma * noise; those of flow models stay as they are. Starting noise is seed 0,
noise of the schedulers seed 1, both from torch's generator on the CPU in f32, the type of the states.
"""

import inspect
import json
import sys

import diffusers
import torch

ELEMENTS = 16
STEPS = 8
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
FLOW = {"use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction"}
OFFSET = {"clip_sample": False, "steps_offset": 1}
ZERO = {"final_sigmas_type": "zero"}
# UniPC of the type bh1 cannot end at 0: it multiplies an infinite factor by 0.
LOWEST = {"final_sigmas_type": "sigma_min"}
# Names in the file: the scheduler, its settings, and arguments of its steps.
SCHEDULERS = {
    "euler": ("EulerDiscreteScheduler", {}, {}),
    "euler_ancestral": ("EulerAncestralDiscreteScheduler", {}, {}),
    "heun": ("HeunDiscreteScheduler", {}, {}),
    "kdpm_2": ("KDPM2DiscreteScheduler", {}, {}),
    "kdpm_2_ancestral": ("KDPM2AncestralDiscreteScheduler", {}, {}),
    "lms": ("LMSDiscreteScheduler", {}, {}),
    "ddim": ("DDIMScheduler", OFFSET | {"set_alpha_to_one": False}, {}),
    "ddim_eta": ("DDIMScheduler", OFFSET | {"set_alpha_to_one": False}, {"eta": 0.7}),
    "ddpm": ("DDPMScheduler", OFFSET, {}),
    "pndm": ("PNDMScheduler", {"steps_offset": 1, "skip_prk_steps": True}, {}),
    "lcm": ("LCMScheduler", {"clip_sample": False}, {}),
    "tcd": ("TCDScheduler", {"clip_sample": False}, {"eta": 0.3}),
    "dpm_1": ("DPMSolverMultistepScheduler", {"solver_order": 1} | ZERO, {}),
    "dpm_2": ("DPMSolverMultistepScheduler", {"solver_order": 2} | ZERO, {}),
    "dpm_2_karras": ("DPMSolverMultistepScheduler", {"solver_order": 2, "use_karras_sigmas": True} | ZERO, {}),
    "dpm_2_flow": ("DPMSolverMultistepScheduler", {"solver_order": 2} | ZERO | FLOW, {}),
    "dpm_3": ("DPMSolverMultistepScheduler", {"solver_order": 3} | ZERO, {}),
    "dpm_sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"} | ZERO, {}),
    "dpm_sde_heun": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "sde-dpmsolver++", "solver_type": "heun"} | ZERO,
        {},
    ),
    "dpm_singlestep": ("DPMSolverSinglestepScheduler", {"lower_order_final": True} | ZERO, {}),
    "unipc_bh1_1": ("UniPCMultistepScheduler", {"solver_type": "bh1", "solver_order": 1} | LOWEST, {}),
    "unipc_bh1_2": ("UniPCMultistepScheduler", {"solver_type": "bh1", "solver_order": 2} | LOWEST, {}),
    "unipc_bh1_3": ("UniPCMultistepScheduler", {"solver_type": "bh1", "solver_order": 3} | LOWEST, {}),
    "unipc_bh2_2": ("UniPCMultistepScheduler", {"solver_type": "bh2", "solver_order": 2} | ZERO, {}),
    "unipc_bh2_3": ("UniPCMultistepScheduler", {"solver_type": "bh2", "solver_order": 3} | ZERO, {}),
    "unipc_flow": ("UniPCMultistepScheduler", {"solver_type": "bh2", "solver_order": 3} | ZERO | FLOW, {}),
    "deis_2": ("DEISMultistepScheduler", {"solver_order": 2}, {}),
    "deis_3": ("DEISMultistepScheduler", {"solver_order": 3}, {}),
    "sa_solver": ("SASolverScheduler", {}, {}),
    "sa_solver_1": ("SASolverScheduler", {"predictor_order": 1, "corrector_order": 1}, {}),
    "sa_solver_4": ("SASolverScheduler", {"predictor_order": 4, "corrector_order": 4}, {}),
    "flow_euler": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}, {}),
    "flow_heun": ("FlowMatchHeunDiscreteScheduler", {"shift": 3.0}, {}),
    "flow_lcm": ("FlowMatchLCMScheduler", {"shift": 3.0}, {}),
    "scm": ("SCMScheduler", {}, {}),
    "edm_euler": ("EDMEulerScheduler", {}, {}),
    "edm_dpm_2": ("EDMDPMSolverMultistepScheduler", ZERO, {}),
}
# States with the variance of their level, and schedulers of two calls per step.
ADDITIVE = {"euler", "euler_ancestral", "heun", "kdpm_2", "kdpm_2_ancestral", "lms", "edm_euler", "edm_dpm_2"}
TWO_CALLS = {"heun", "kdpm_2", "kdpm_2_ancestral", "flow_heun"}


def denoise(x, sigma, flow):
    """The best estimate of -1 or 1."""
    return torch.tanh(x * (1 - sigma if flow else 1) / sigma**2)


def levels(name, scheduler, steps):
    """The noise levels: one for each call, and the last."""
    if name == "scm":
        return torch.sin(scheduler.timesteps) / (torch.sin(scheduler.timesteps) + torch.cos(scheduler.timesteps))
    if hasattr(scheduler, "sigmas"):
        return scheduler.sigmas
    table = ((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod) ** 0.5
    last = torch.zeros(1) if name in {"ddpm", "lcm"} else table[:1]
    return torch.cat([table[scheduler.timesteps], last])


def call(name, kind, settings, arguments):
    """Levels, start and states of a run."""
    flow = name.startswith("flow") or name.endswith("flow") or name == "scm"
    betas = {} if flow and "shift" in settings or name.startswith(("edm", "scm")) else BETAS
    scheduler = getattr(diffusers, kind)(**betas, **settings)
    steps = 2 if name == "scm" else STEPS
    scheduler.set_timesteps(steps)
    sigmas = levels(name, scheduler, steps).double()
    # Variance 1, or sigma^2 + 1, or the state of a flow model.
    scale = lambda sigma: (1 + sigma**2) ** 0.5 if name not in ADDITIVE and not flow else 1.0
    start = torch.randn(1, ELEMENTS, generator=torch.Generator().manual_seed(0)).double() * sigmas[0]
    generator = torch.Generator().manual_seed(1)
    if name == "scm":
        # The pipeline's state is that of a flow model times cos t + sin t and the deviation of the data.
        scale = lambda sigma: (sigma**2 + (1 - sigma) ** 2) ** 0.5 / scheduler.config.sigma_data
    x = (start / scale(sigmas[0])).float()
    states = []
    for index, t in enumerate(scheduler.timesteps[:steps] if name == "scm" else scheduler.timesteps):
        sigma = sigmas[index]
        if name.startswith("kdpm_2") and index % 2 == 1:
            sigma = scheduler.sigmas_interpol[index - name.endswith("ancestral")].double()
        state = x.double() * scale(sigma)
        clean = denoise(state, sigma, flow)
        output = (state - clean) / sigma
        if name == "scm":
            # Formulas of SanaSprintPipeline.
            length = (sigma**2 + (1 - sigma) ** 2) ** 0.5
            output = ((1 - 2 * sigma) * state + (1 - 2 * sigma + 2 * sigma**2) * output) / length
            output = output * scheduler.config.sigma_data
        if name.startswith("edm"):
            # The scheduler's own preconditioning, reversed.
            data = scheduler.config.sigma_data
            skip, out = data**2 / (sigma**2 + data**2), sigma * data / (sigma**2 + data**2) ** 0.5
            output = (clean - skip * state) / out
        more = dict(arguments)
        if "generator" in inspect.signature(scheduler.step).parameters:
            more["generator"] = generator
        scheduler.is_scale_input_called = True
        x = scheduler.step(output.float(), t, x, **more).prev_sample
        last = index + 1 == len(scheduler.timesteps)
        if name not in TWO_CALLS or index % 2 == 1 or last:
            states.append((x.double() * scale(sigmas[min(index + 1, len(sigmas) - 1)]))[0])
    if name == "pndm":
        # The second call repeats the first step.
        sigmas, states = torch.cat([sigmas[:2], sigmas[3:]]), states[1:]
    if name in TWO_CALLS:
        sigmas = torch.cat([sigmas[:1], sigmas[1::2]])[: STEPS + 1]
    rounded = lambda values: [round(value, 7) for value in values.tolist()]
    return {"sigmas": sigmas.tolist(), "start": rounded(start[0]), "states": [rounded(state) for state in states]}


def main(path):
    result = {}
    for name, (kind, settings, arguments) in SCHEDULERS.items():
        result[name] = call(name, kind, settings, arguments)
    with open(path, "w") as file:
        json.dump(result, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
