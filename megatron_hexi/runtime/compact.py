"""Tensors that are to be kept, without what else lies in their memory.

Megatron makes query, key and value as one tensor, and rotary embeddings make a new query and a new key of
it. The value stays a view, and kept for the backward pass it keeps all three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

#: What part of a tensor's memory may be of no use before it is worth a copy: a padding row is not.
_USELESS = 0.25


def compact(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, copied where they and the others use too little of the memory that they lie in.

    Args:
        tensors: none of them overlaps another.
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
