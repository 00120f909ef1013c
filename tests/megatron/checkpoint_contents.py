"""What is in a checkpoint of Megatron's torch_dist format, whoever saved it."""

from __future__ import annotations

from collections.abc import Iterator
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


def differences(one: Path, other: Path) -> list[str]:
    """Names of tensors, and of what lies beside them, in which two checkpoints are not equal bit for bit.

    Not compared: the jobs' arguments, and random states, which are kept by rank.
    """
    first, second = tensors_of(one), tensors_of(other)
    unequal = [name for name in first.keys() & second.keys() if not torch.equal(first[name], second[name])]
    unequal += first.keys() ^ second.keys()
    beside = [dict(_flat(common_of(checkpoint))) for checkpoint in (one, other)]
    unequal += [key for key in {**beside[0], **beside[1]} if beside[0].get(key) != beside[1].get(key)]
    return sorted(unequal)


def _flat(tree: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Places and values of all leaves of nested dictionaries and lists; tensors as numbers."""
    if isinstance(tree, (dict, list, tuple)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _flat(value, f"{at}.{key}" if at else str(key))
    else:
        yield at, tree.tolist() if isinstance(tree, torch.Tensor) else tree


def common_of(checkpoint: Path) -> dict[str, Any]:
    """Return the state that a checkpoint holds beside tensors and the job's arguments."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    found: dict[str, Any] = load_common_state_dict(str(checkpoint))
    return {key: value for key, value in found.items() if key != "args"}


def optimizer_of(checkpoint: Path) -> dict[str, Any]:
    """The optimizer's settings, step count and loss scale."""
    found: dict[str, Any] = common_of(checkpoint)["optimizer"]
    return found
