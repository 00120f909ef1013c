"""Megatron's data sets: their compiled helpers, parts of a split that hold no document, and inner stages.

The wheel ships compiled helpers without a Makefile, a checkout a Makefile without compiled helpers (and make
needs pybind11 and a compiler). Megatron runs make in both cases and exits where that fails.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_hexi.errors import HexiError
from megatron_hexi.megatron.session import active_session
from megatron_hexi.patching import Patch, patched

_HELPERS = "megatron.core.datasets.helpers_cpp"


def _with_helpers_elsewhere(original: list[str]) -> list[str]:
    """Return the folders of ``megatron.core.datasets``, with other installations that have helpers."""
    if importlib.util.find_spec(_HELPERS) is not None:
        return original
    folders = [Path(portion, "core", "datasets") for portion in importlib.import_module("megatron").__path__]
    return [*original, *(str(folder) for folder in folders if any(folder.glob("helpers_cpp*.so")))]


@patched(
    "megatron.core.datasets.utils:compile_helpers",
    why="the dataset helpers are compiled only where they are missing: the wheel has them, and no Makefile",
)
def _compile_if_missing(
    original: Callable[[], None],
) -> None:
    if importlib.util.find_spec(_HELPERS) is None:
        original()


@patched(
    "megatron.core.datasets.gpt_dataset:GPTDataset._get_num_epochs",
    why="epochs over a part of a split without documents are counted for ever, for none has a token",
)
def _refuse_empty_parts(original: Callable[[Any, int], int], self: Any, num_tokens_per_epoch: int) -> int:
    if active_session() is not None and num_tokens_per_epoch == 0 and self.num_samples:
        part = {"train": "training", "valid": "validation"}.get(self.index_split.name, "test")
        documents = len(self.dataset.document_indices) - 1
        raise HexiError(
            f"--split: of the {documents} documents of {self.dataset.path_prefix} none is in the {part} "
            f"part, of which {self.num_samples} samples are wanted; give that part a larger share, or "
            "other files with --train-data-path and --valid-data-path"
            + ("" if part == "training" else ", or --eval-iters 0")
        )
    return original(self, num_tokens_per_epoch)


@patched(
    "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.__init__",
    why="every pipeline stage reads where documents end, whatever the script builds data sets on",
)
def _on_every_stage(
    original: Callable[..., None],
    self: Any,
    cls: Any,
    sizes: Any,
    is_built_on_rank: Callable[[], bool],
    config: Any,
) -> None:
    from megatron.core import mpu

    session = active_session()
    if session is not None and session.given.terms.has_documents:
        # The first tensor-parallel rank reads for the others.
        original(self, cls, sizes, lambda: mpu.get_tensor_model_parallel_rank() == 0, config)
    else:
        original(self, cls, sizes, is_built_on_rank, config)


DATASET_PATCHES = (
    Patch(
        target="megatron.core.datasets:__path__",
        why="a checkout whose dataset helpers were not compiled takes those of the installed wheel",
        build=_with_helpers_elsewhere,
    ),
    _compile_if_missing,
    _refuse_empty_parts,
    _on_every_stage,
)
