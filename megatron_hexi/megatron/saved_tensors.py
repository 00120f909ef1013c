"""The tensors that a torch_dist checkpoint holds, without their data."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def saved_tensors(folder: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and the type of each tensor of a torch_dist checkpoint, by key.

    Megatron's `load_tensors_metadata` returns these, too, but up to megatron-core 0.19.2 it fails with torch
    2.15, whose `TensorProperties` have strides, which `torch.empty` does not take.

    Args:
        folder: one iteration of the checkpoint.

    Raises:
        OSError: there is no torch_dist checkpoint.
    """
    # Imported late: Megatron is imported after the CPU platform is installed.
    from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader

    return {
        key: (tuple(entry.size), entry.properties.dtype)
        for key, entry in _get_filesystem_reader(folder).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
