"""stable-diffusion.cpp: whole pictures from a checkpoint, on its CPU backend. Its package compiles it for this machine.

It gets the sampler, the noise levels and the random numbers of the picture that it is compared with, so that it draws the same one.
"""

import common

# Samplers that families of models use by default.
SAMPLERS = {"dpmpp_2m": "dpm++2m", "euler": "euler", "euler_ancestral": "euler_a", "lcm": "lcm"}


def open_model(request):
    if request.picture is None:
        raise common.Unsupported("stable-diffusion.cpp draws whole pictures and has no call that runs one network")
    picture = request.picture
    if picture["sampler"] not in SAMPLERS:
        raise common.Unsupported(f"stable-diffusion.cpp is not asked for the sampler {picture['sampler']}")
    import numpy
    from stable_diffusion_cpp import StableDiffusion

    clock = common.Clock()
    model = StableDiffusion(
        model_path=request.model,
        n_threads=request.threads,
        wtype="f16" if request.low else "f32",
        rng_type="cpu",
        sampler_rng_type="cpu",
        vae_decode_only=True,
    )

    def draw():
        images = model.generate_image(
            prompt=picture["prompt"],
            width=picture["width"],
            height=picture["height"],
            cfg_scale=picture["guidance"],
            guidance=3.5 if picture["distilled_guidance"] is None else picture["distilled_guidance"],
            sample_method=SAMPLERS[picture["sampler"]],
            sample_steps=len(picture["sigmas"]) - 1,
            sigmas=str(picture["sigmas"]),
            seed=picture["seed"],
        )
        return images[0]

    return common.Peer(
        system="stable-diffusion.cpp",
        version=common.version("stable-diffusion-cpp-python"),
        precision="fp16" if request.low else "fp32",
        settings=f"{'weights in fp16' if request.low else 'weights in fp32'}, CPU backend, {request.threads} threads",
        build_seconds=None,
        load_seconds=clock.lap(),
        run=draw,
        arrays=lambda image: {"picture": numpy.asarray(image.convert("RGB"), dtype=numpy.float32) / 255},
    )


common.main(open_model)
