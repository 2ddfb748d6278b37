"""Diffusion models on the compiler that suits this machine: TensorRT-RTX, MIGraphX, OpenVINO, ONNX Runtime or ggml.

    import sdrun

    pipeline = sdrun.Pipeline("dreamshaper.safetensors")
    pipeline.generate("a red fox in the snow")[0].save("fox.png")
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Union

import numpy

if TYPE_CHECKING:
    from PIL.Image import Image

#: A file or a folder.
File = Union[str, "os.PathLike[str]"]

_HOME = Path(__file__).resolve().parent
# Providers that crash easily run in this program.
_worker = _HOME / ("sdrun-worker.exe" if os.name == "nt" else "sdrun-worker")
if _worker.is_file():
    os.environ.setdefault("SDRUN_WORKER", str(_worker))

from . import _sdrun  # noqa: E402
from ._sdrun import Error  # noqa: E402

_sdrun.set_home(_HOME)

__all__ = ["Control", "Device", "Error", "Hires", "Pipeline", "Provider", "Session", "Tensor", "providers"]


@dataclass(frozen=True)
class Device:
    """A device of a provider."""

    id: str
    name: str
    #: `cpu`, `gpu` or `npu`.
    kind: str
    #: Why nothing runs on it, if its hardware is not in this machine.
    absent: str | None


@dataclass(frozen=True)
class Provider:
    """A provider and its devices."""

    id: str
    summary: str
    #: Why it cannot be used; `None` if it can.
    why_not: str | None
    devices: list[Device]


def providers() -> list[Provider]:
    """The providers that were found, with their devices. Loads all of them."""
    return [
        Provider(name, summary, why_not, [Device(*device) for device in devices])
        for name, summary, why_not, devices in _sdrun.providers()
    ]


@dataclass(frozen=True)
class Tensor:
    """An input or an output. Arrays of bfloat16 and 8-bit floats are float32 in Python."""

    name: str
    dtype: str
    #: `None` is a size that is open.
    shape: list[int | None]


class Session:
    """A model on a provider, with weights.

    `model` is an ONNX file or the name of a built-in model, `weights` a checkpoint in place of its own, `loras` adapters with their
    strengths, `shapes` the shapes of inputs with open dimensions. Without `provider`, the best one here is chosen.
    """

    def __init__(
        self,
        model: File,
        *,
        weights: File | None = None,
        loras: Iterable[File | tuple[File, float]] = (),
        shapes: Mapping[str, Iterable[int]] | None = None,
        provider: str | None = None,
        device: str | None = None,
        precision: str = "fp32",
        threads: int | None = None,
    ):
        shapes = {name: list(shape) for name, shape in (shapes or {}).items()}
        self._native = _sdrun.Session(
            os.fspath(model), weights, _with_strengths(loras), shapes, provider, device, precision, threads
        )

    @property
    def provider(self) -> str:
        """Id of the provider."""
        return self._native.provider

    @property
    def device(self) -> str:
        """Id of the device."""
        return self._native.device

    @property
    def precision(self) -> str:
        """`fp32`, `fp16`, `bf16`, `q8_0` or `q4_k`."""
        return self._native.precision

    @property
    def inputs(self) -> list[Tensor]:
        """What `run` takes."""
        return [Tensor(*tensor) for tensor in self._native.inputs]

    @property
    def outputs(self) -> list[Tensor]:
        """What `run` returns."""
        return [Tensor(*tensor) for tensor in self._native.outputs]

    def run(self, inputs: Mapping[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
        """Runs once. Other Python threads go on, and Ctrl-C stops it."""
        return self._native.run({name: _contiguous(array) for name, array in inputs.items()})

    def refit(
        self,
        weights: File | None = None,
        loras: Iterable[File | tuple[File, float]] = (),
    ) -> int:
        """Replaces the weights: by another checkpoint if one is given, and by these adapters in place of the former ones.

        Returns how many tensors changed. After an error the former weights are in use.
        """
        return self._native.refit(weights, _with_strengths(loras))


@dataclass(frozen=True)
class Control:
    """A picture that a ControlNet follows."""

    #: The picture, of any size.
    image: Image
    #: What the network shall see of it: `none`, `canny`, `invert`, `tile`, …
    hint: str = "none"
    #: How strongly to follow it.
    strength: float = 1.0
    #: In which part of the steps to follow it, as shares from 0 to 1.
    start: float = 0.0
    end: float = 1.0


@dataclass(frozen=True)
class Hires:
    """A second pass over the enlarged picture."""

    #: Factor of the size: above 1, at most 8.
    scale: float = 2.0
    #: How much to change: above 0, at most 1.
    strength: float = 0.5
    #: Steps; as many as in the first pass by default.
    steps: int | None = None
    #: How to enlarge: `lanczos`, `latent`, or `upscaler`, the pipeline's.
    upscaler: str = "lanczos"


class Pipeline:
    """A model that draws. Its networks stay loaded between calls.

    `model` is a checkpoint of any layout, a diffusers folder, or a folder of ONNX models; without one, the small demo model draws
    coloured shapes. Files for single networks take precedence. `loras` are adapters with their strengths; `lora_dir` holds more that
    prompts name as `<lora:NAME:0.8>`, and `embedding_dir` embeddings that prompts name by their file's name. `control_nets` are the
    networks for the `controls` of a picture, in their order, `refiner` a model of the last steps, `upscaler` an ESRGAN.
    """

    def __init__(
        self,
        model: File | None = None,
        *,
        diffusion_model: File | None = None,
        clip_l: File | None = None,
        clip_g: File | None = None,
        t5xxl: File | None = None,
        t5_tokenizer: File | None = None,
        llm: File | None = None,
        vae: File | None = None,
        loras: Iterable[File | tuple[File, float]] = (),
        lora_dir: File | None = None,
        embedding_dir: File | None = None,
        control_nets: Sequence[File] = (),
        refiner: File | None = None,
        upscaler: File | None = None,
        provider: str | None = None,
        device: str | None = None,
        precision: str | None = None,
        threads: int | None = None,
    ):
        files = {
            "model": model,
            "diffusion_model": diffusion_model,
            "clip_l": clip_l,
            "clip_g": clip_g,
            "t5xxl": t5xxl,
            "t5_tokenizer": t5_tokenizer,
            "llm": llm,
            "vae": vae,
            "loras": _with_strengths(loras),
            "lora_folders": [] if lora_dir is None else [lora_dir],
            "embedding_folders": [] if embedding_dir is None else [embedding_dir],
            "control_nets": _files("control_nets", control_nets),
            "refiner": refiner,
            "upscaler": upscaler,
        }
        place = {"provider": provider, "device": device, "precision": precision, "threads": threads}
        self._native = _sdrun.Pipeline(files, place)

    @property
    def family(self) -> str:
        """The model's family."""
        return self._native.family

    def generate(
        self,
        prompt: str,
        *,
        negative_prompt: str = "",
        width: int | None = None,
        height: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        guidance_rescale: float = 0.0,
        distilled_guidance: float | None = None,
        sampler: str | None = None,
        schedule: str | None = None,
        seed: int | None = None,
        variation: tuple[int, float] | None = None,
        seed_like: str | None = None,
        count: int = 1,
        clip_skip: int | None = None,
        refiner_start: float | None = None,
        tile: int | None = None,
        image: Image | None = None,
        strength: float = 0.75,
        fit: str = "crop",
        mask: Image | None = None,
        mask_blur: float = 4.0,
        mask_content: str = "original",
        only_masked: int | None = None,
        references: Sequence[Image] = (),
        controls: Sequence[Image | Control] = (),
        hires: float | Hires | None = None,
        upscale_repeats: int | None = None,
        progress: Callable[[str, int, int], object] | bool = False,
        preview: Callable[[Image], object] | None = None,
    ) -> list[Image]:
        """Draws `count` pictures; those after the first have the next seeds. What is `None` is usual for the model's family.

        `image` is a picture to start from, `strength` how much to change it, `fit` how it is brought to another size (`crop`, `fill`,
        `stretch`). `mask` is white where it shall be drawn anew; every other pixel keeps its value. Under it, at the start, is the
        picture (`original`), blurred `surroundings`, `noise` or `nothing`; `only_masked` draws only that part and so many pixels around
        it. `references` are pictures to edit as the prompt says, for models that do so, `controls` pictures that ControlNets follow.
        `variation` is another seed and its share. `seed_like` repeats pictures of `diffusers`, `a1111` or `comfy`.

        `progress` is called with what is being done, the step and the number of steps (0 is unknown), or is `True` for a bar of the
        package `tqdm`. `preview` is called with what a picture looks like so far, as often as costs a hundredth of the time. Ctrl-C
        stops, and so does an exception in one of them. What is unusual about a request is a warning.

        Each picture's `info` has its seed and its settings, which `picture.save` does not write by itself: give the values to
        `PIL.PngImagePlugin.PngInfo.add_text` under their names.
        """
        from PIL import Image

        if isinstance(hires, (int, float)):
            hires = Hires(float(hires))
        controls = [control if isinstance(control, Control) else Control(control) for control in controls]
        order = {
            "prompt": prompt,
            "negative_prompt": negative_prompt,
            "width": width,
            "height": height,
            "steps": steps,
            "guidance": guidance,
            "guidance_rescale": guidance_rescale,
            "distilled_guidance": distilled_guidance,
            "sampler": sampler,
            "schedule": schedule,
            "seed": random.getrandbits(32) if seed is None else seed,
            "variation": variation,
            "seed_like": seed_like,
            "count": count,
            "clip_skip": clip_skip,
            "refiner_start": refiner_start,
            "tile": tile,
            "image": image and _pixels(image, "RGB"),
            "strength": strength,
            "fit": fit,
            "mask": mask and _pixels(mask, "L"),
            "mask_blur": mask_blur,
            "mask_content": mask_content,
            "only_masked": only_masked,
            "references": [_pixels(reference, "RGB") for reference in references],
            "controls": [(_pixels(it.image, "RGB"), it.hint, it.strength, it.start, it.end) for it in controls],
            "hires": hires and (hires.scale, hires.strength, hires.steps, hires.upscaler),
            "upscale_repeats": upscale_repeats,
        }
        bar = _Bar() if progress is True else None
        step = bar or (progress if callable(progress) else None)

        def hear(kind, *values):
            if kind == "warning":
                warnings.warn(values[0], stacklevel=4)
            elif kind == "step" and step:
                step(*values)
            elif kind == "preview":
                preview(Image.frombytes("RGB", values[:2], values[2]))

        try:
            drawn = self._native.generate(order, hear, preview is not None)
        finally:
            if bar:
                bar.close()
        pictures = []
        for width, height, pixels, its_seed, texts in drawn:
            picture = Image.frombytes("RGB", (width, height), pixels)
            picture.info.update(texts, seed=its_seed)
            pictures.append(picture)
        return pictures


class _Bar:
    """A bar of `tqdm`; nothing without that package."""

    def __init__(self):
        try:
            from tqdm.auto import tqdm
        except ImportError:
            self._bar = None
        else:
            self._bar = tqdm(unit="step")

    def __call__(self, what: str, step: int, steps: int):
        if self._bar is None:
            return
        if steps:
            self._bar.total = steps
            self._bar.n = step
        self._bar.set_description(what)

    def close(self):
        if self._bar is not None:
            self._bar.close()


def _pixels(image, mode):
    return (*image.size, image.convert(mode).tobytes())


def _files(name, files):
    if isinstance(files, (str, os.PathLike)):
        raise TypeError(f"{name} is a list of files")
    return list(files)


def _with_strengths(loras):
    loras = _files("loras", loras)
    return [(lora, 1.0) if isinstance(lora, (str, os.PathLike)) else (lora[0], float(lora[1])) for lora in loras]


def _contiguous(array):
    array = numpy.asarray(array, order="C")
    if array.dtype == numpy.float16:
        return array.astype(numpy.float32)
    # NumPy's bool and Rust's are different types of one byte.
    return array.view(numpy.uint8) if array.dtype == numpy.bool_ else array
