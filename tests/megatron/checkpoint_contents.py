"""What is in a checkpoint of Megatron's torch_dist format, whoever saved it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors, whole, by name."""
    reader = FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    tensors: dict[str, torch.Tensor] = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in stored.items()
        if isinstance(one, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def optimizer_of(checkpoint: Path) -> dict[str, Any]:
    """The optimizer's settings, step count and loss scale."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    found: dict[str, Any] = load_common_state_dict(str(checkpoint))["optimizer"]
    return found
