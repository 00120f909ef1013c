"""The rows of tensors that the blocks of a kernel call use, computed once for each call and device.

Rows of adjacent blocks are a view of the tensor. Other rows are selected by one index for the whole call; at
the edge of a window in reverse order, which makes the block causal. Indices and ends of sequences are copied
from the host without waiting for the device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from megatron_hexi.plan.blocks import Call, Shape
from megatron_hexi.plan.model import Range
from megatron_hexi.runtime.kernels.base import Sequences

#: Number of cached calls and of cached rows, whose tables stay on the device: 12 bytes per row; every batch
#: of documents needs new tables.
_KEPT = 2**9


@dataclass(frozen=True)
class Rows:
    """A selection of rows of tensors [B, heads, rows, ...].

    Args:
        span: range from the first selected row to the last.
        index: numbers of the selected rows, in order and each once; ``None``: all rows of `span`.
    """

    span: Range
    index: Tensor | None = None

    @cached_property
    def places(self) -> Tensor | None:
        """The place of each row of `span` in `index`, -1 for rows not in it; ``None`` without an index."""
        if self.index is None:
            return None
        places = self.index.new_full((self.span[1] - self.span[0],), -1, dtype=torch.int32)
        numbers = torch.arange(len(self.index), dtype=torch.int32, device=self.index.device)
        places[self.index - self.span[0]] = numbers
        return places

    def covers(self, count: int) -> bool:
        """Whether the selected rows are 0 … `count` - 1, in order."""
        return self.index is None and self.span == (0, count)

    def taken(self, tensor: Tensor) -> Tensor:
        """Return the selected rows of a tensor: a view, or a copy if there is an index."""
        return tensor[:, :, slice(*self.span)] if self.index is None else tensor.index_select(2, self.index)

    def put(self, total: Tensor, part: Tensor) -> None:
        """Write `part` to the selected rows of `total`."""
        if self.index is None:
            total[:, :, slice(*self.span)] = part
        else:
            total.index_copy_(2, self.index, part.to(total.dtype))

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add `part` to the selected rows of `total`, in the type of `total`."""
        if self.index is None:
            total[:, :, slice(*self.span)].add_(part)
        else:  # each row once, so the result does not depend on an order
            total.index_copy_(2, self.index, total.index_select(2, self.index).add_(part))


@dataclass(frozen=True)
class CallRows:
    """The rows of queries and keys of a kernel call, and the sizes of its blocks.

    Args:
        sequences: sizes of the blocks; ``None``: the call has a single block.
    """

    queries: Rows
    keys: Rows
    causal: bool
    sequences: Sequences | None


@lru_cache(maxsize=_KEPT)  # of the latest schedules
def call_rows(call: Call, device: torch.device) -> CallRows:
    """Return the rows of a kernel call and the sizes of its blocks; cached."""
    backwards = call.shape is Shape.WINDOW_EDGE
    queries, keys = (rows_of(ranges, device, backwards) for ranges in (call.queries, call.keys))
    sequences = None
    if len(call.blocks) > 1:
        lengths = [tuple(stop - start for start, stop in ranges) for ranges in (call.queries, call.keys)]
        ends = [
            on_device(
                torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device="cpu"), device
            )
            for sizes in lengths
        ]
        sequences = Sequences(lengths[0], lengths[1], ends[0], ends[1])
    return CallRows(queries, keys, call.shape is not Shape.FULL, sequences)


@lru_cache(maxsize=_KEPT)  # equal rows are one object
def rows_of(ranges: tuple[Range, ...], device: torch.device, backwards: bool = False) -> Rows:
    """Return the selection of all rows in ascending ranges; with `backwards`, each range is reversed."""
    span = ranges[0][0], ranges[-1][1]
    if not backwards and sum(stop - start for start, stop in ranges) == span[1] - span[0]:
        return Rows(span)
    pieces = [torch.arange(start, stop, device="cpu") for start, stop in ranges]
    index = torch.cat([piece.flip(0) for piece in pieces] if backwards else pieces)
    return Rows(span, on_device(index, device))


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Start the copy of a host tensor to a device, and return the copy without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
