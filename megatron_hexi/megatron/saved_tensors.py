"""The tensors that a torch_dist checkpoint holds, without their data.

Megatron's `load_tensors_metadata` fails with torch 2.15 (up to megatron-core 0.19.2): it hands all fields of
`TensorProperties` to `torch.empty`, which does not take the new one, strides.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_hexi.patching import patched


def saved_tensors(
    folder: str | Path, metadata: Metadata | None = None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and the type of each tensor of a torch_dist checkpoint, by key.

    Args:
        metadata: the checkpoint's metadata; ``None``: they are read from the folder.

    Raises:
        OSError: there is no torch_dist checkpoint.
    """
    # Imported late: Megatron is imported after the CPU platform is installed.
    from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader

    if metadata is None:
        metadata = _get_filesystem_reader(folder).read_metadata()
    return {
        key: (tuple(entry.size), entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


@patched(
    "megatron.core.dist_checkpointing.strategies.torch:TorchDistLoadShardedStrategy.load_tensors_metadata",
    why="reads what a checkpoint holds with torch 2.15, too",
)
def _without_strides(
    original: Callable[..., Any], self: Any, checkpoint_dir: Path, metadata: Metadata | None = None
) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor

    return {
        key: ShardedTensor.from_rank_offsets(
            key, torch.empty(shape, dtype=dtype, device="meta")
        ).without_data()
        for key, (shape, dtype) in saved_tensors(checkpoint_dir, metadata).items()
    }


SAVED_TENSORS = _without_strides
