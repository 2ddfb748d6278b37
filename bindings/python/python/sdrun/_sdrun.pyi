"""The native part of the package. Use `sdrun`."""

from collections.abc import Callable
from os import PathLike
from typing import Any

import numpy

File = str | PathLike[str]

class Error(Exception):
    """An error of sdrun: one sentence."""

    #: Its kind, such as `InvalidArgument` or `NotFound`.
    code: str
    #: What to do about it.
    hint: str | None

class Session:
    provider: str
    device: str
    precision: str
    inputs: list[tuple[str, str, list[int | None]]]
    outputs: list[tuple[str, str, list[int | None]]]
    def __init__(
        self,
        model: str,
        weights: File | None,
        loras: list[tuple[File, float]],
        shapes: dict[str, list[int]],
        provider: str | None,
        device: str | None,
        precision: str | None,
        threads: int | None,
    ) -> None: ...
    def run(self, inputs: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]: ...
    def refit(self, weights: File | None, loras: list[tuple[File, float]]) -> int: ...

class Pipeline:
    family: str
    def __init__(self, model: dict[str, Any], place: dict[str, Any]) -> None: ...
    def generate(
        self, order: dict[str, Any], hear: Callable[..., object] | None, previews: bool
    ) -> list[tuple[int, int, bytes, int, list[tuple[str, str]]]]: ...

def set_home(folder: File) -> None: ...
def providers() -> list[tuple[str, str, str | None, list[tuple[str, str, str, str | None]]]]: ...
