"""Copy tensors that are saved for the backward pass if they are small views of large memory.

Megatron computes query, key and value as one tensor, and rotary embeddings compute a new query and a new key.
The value stays a view of the first tensor, and saving it for the backward pass would save the whole tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

#: Largest unused fraction of a tensor's memory for which no copy is made, so that a padding row causes none.
_USELESS = 0.25


def compact(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors; copy those whose memory the given tensors together use too little of.

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
