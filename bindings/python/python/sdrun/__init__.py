"""Diffusion models on the compiler that suits this machine: TensorRT-RTX, MIGraphX, OpenVINO, ONNX Runtime or ggml.

    import sdrun

    pipeline = sdrun.Pipeline("dreamshaper.safetensors")
    pipeline.generate("a red fox in the snow")[0].save("fox.png")
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy

_HOME = Path(__file__).resolve().parent
# Providers that crash easily run in this program.
_worker = _HOME / ("sdrun-worker.exe" if os.name == "nt" else "sdrun-worker")
if _worker.is_file():
    os.environ.setdefault("SDRUN_WORKER", str(_worker))

from . import _sdrun  # noqa: E402
from ._sdrun import Error  # noqa: E402

_sdrun.set_home(_HOME)

__all__ = ["Device", "Error", "Pipeline", "Provider", "Session", "Tensor", "providers"]


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
        model: str | os.PathLike[str],
        *,
        weights: str | os.PathLike[str] | None = None,
        loras: Iterable[str | os.PathLike[str] | tuple[str | os.PathLike[str], float]] = (),
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
        weights: str | os.PathLike[str] | None = None,
        loras: Iterable[str | os.PathLike[str] | tuple[str | os.PathLike[str], float]] = (),
    ) -> int:
        """Replaces the weights: by another checkpoint if one is given, and by these adapters in place of the former ones.

        Returns how many tensors changed. After an error the former weights are in use.
        """
        return self._native.refit(weights, _with_strengths(loras))


class Pipeline:
    """A model that draws. Its networks stay loaded between calls.

    `model` is a checkpoint of any layout, a diffusers folder, or a folder of ONNX models; without one, the small demo model draws
    coloured shapes. Files for single networks take precedence. `lora_dir` holds adapters that prompts name as `<lora:NAME:0.8>`,
    `embedding_dir` embeddings that prompts name by their file's name.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        diffusion_model: str | os.PathLike[str] | None = None,
        clip_l: str | os.PathLike[str] | None = None,
        clip_g: str | os.PathLike[str] | None = None,
        t5xxl: str | os.PathLike[str] | None = None,
        t5_tokenizer: str | os.PathLike[str] | None = None,
        llm: str | os.PathLike[str] | None = None,
        vae: str | os.PathLike[str] | None = None,
        loras: Iterable[str | os.PathLike[str] | tuple[str | os.PathLike[str], float]] = (),
        lora_dir: str | os.PathLike[str] | None = None,
        embedding_dir: str | os.PathLike[str] | None = None,
        provider: str | None = None,
        device: str | None = None,
        precision: str | None = None,
        threads: int | None = None,
    ):
        files = [model, diffusion_model, clip_l, clip_g, t5xxl, t5_tokenizer, llm, vae]
        folders = [[folder] if folder is not None else [] for folder in (lora_dir, embedding_dir)]
        self._native = _sdrun.Pipeline(files, _with_strengths(loras), *folders, provider, device, precision, threads)

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
        sampler: str | None = None,
        schedule: str | None = None,
        seed: int | None = None,
        count: int = 1,
        clip_skip: int | None = None,
        image: "PIL.Image.Image | None" = None,
        strength: float = 0.75,
        progress: Callable[[str, int, int], object] | bool = False,
    ) -> "list[PIL.Image.Image]":
        """Draws `count` pictures; those after the first have the next seeds.

        `image` is a picture to start from, `strength` how much to change it. `progress` is called with what is being done, the step
        and the number of steps (0 is unknown), or is `True` for a bar of the package `tqdm`. Ctrl-C stops, and so does an exception in
        `progress`. Each picture's `info` has its seed and its parameters; `picture.save("x.png", pnginfo=…)` can keep them.
        """
        from PIL import Image

        wanted = {
            "prompt": prompt,
            "negative_prompt": negative_prompt,
            "width": width,
            "height": height,
            "steps": steps,
            "guidance": guidance,
            "sampler": sampler,
            "schedule": schedule,
            "seed": random.getrandbits(32) if seed is None else seed,
            "count": count,
            "clip_skip": clip_skip,
            "image": None if image is None else (*image.size, image.convert("RGB").tobytes()),
            "strength": strength,
        }
        bar = _Bar() if progress is True else None
        try:
            drawn = self._native.generate(wanted, bar or (progress if callable(progress) else None))
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


def _with_strengths(loras):
    if isinstance(loras, (str, os.PathLike)):
        raise TypeError("loras is a list of files, or of pairs of a file and its strength")
    return [(lora, 1.0) if isinstance(lora, (str, os.PathLike)) else (lora[0], float(lora[1])) for lora in loras]


def _contiguous(array):
    array = numpy.asarray(array, order="C")
    if array.dtype == numpy.float16:
        return array.astype(numpy.float32)
    # NumPy's bool and Rust's are different types of one byte.
    return array.view(numpy.uint8) if array.dtype == numpy.bool_ else array
