"""The compiled helpers of Megatron's data sets.

The wheel ships compiled helpers without a Makefile, a checkout a Makefile without compiled helpers (and make
needs pybind11 and a compiler). Megatron runs make in both cases and exits where that fails.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from megatron_hexi.patching import Patch

_HELPERS = "megatron.core.datasets.helpers_cpp"


def _with_helpers_elsewhere(original: list[str]) -> list[str]:
    """Return the folders of ``megatron.core.datasets``, with other installations that have helpers."""
    if importlib.util.find_spec(_HELPERS) is not None:
        return original
    folders = [Path(portion, "core", "datasets") for portion in importlib.import_module("megatron").__path__]
    return [*original, *(str(folder) for folder in folders if any(folder.glob("helpers_cpp*.so")))]


def _compile_if_missing(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec(_HELPERS) is None:
            original()

    return compile_helpers


HELPERS_PATH = Patch(
    target="megatron.core.datasets:__path__",
    why="a checkout whose dataset helpers were not compiled takes those of the installed wheel",
    build=_with_helpers_elsewhere,
)

COMPILE_HELPERS = Patch(
    target="megatron.core.datasets.utils:compile_helpers",
    why="the dataset helpers are compiled only where they are missing: the wheel has them, and no Makefile",
    build=_compile_if_missing,
    parameters=(),
)
