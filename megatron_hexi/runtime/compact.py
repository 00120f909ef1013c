"""Copies of tensors that are saved for backward, without the rest of their memory.

Megatron makes query, key and value as one tensor, and rotary embeddings make a new query and a new key of
it. The value stays a view, and saving it for the backward pass saves all three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

#: Part of a tensor's memory that may be useless before a copy is worth it: a padding row is not.
_USELESS = 0.25


def compact(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, copied where together they use too little of the memory that they lie in.

    Args:
        tensors: tensors that do not overlap.
    """
    used: Counter[int] = Counter()
    for tensor in tensors:
        used[_memory(tensor)] += tensor.nbytes
    return [
        tensor.clone()
        if used[_memory(tensor)] < (1 - _USELESS) * tensor.untyped_storage().nbytes()
        else tensor
        for tensor in tensors
    ]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
