"""Allocate the tensors of a bucket on a rank, and make parameters views of them where possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from megatron_hexi.mesh import Bucket, Cell, Residence
from megatron_hexi.runtime.bucket_buffer import BucketBuffer, HeldBox, set_main_grad
from megatron_hexi.runtime.host_memory import HostMemory

#: A run of pieces, each with its box, its cell and its slice of the bucket.
_Run = list[tuple[HeldBox, Cell, slice]]


def lay_out(
    bucket: Bucket,
    residence: Residence,
    group: dist.ProcessGroup | None,
    boxes: Sequence[HeldBox],
    rank: int,
    gradient_dtype: torch.dtype | None,
    host: HostMemory,
) -> BucketBuffer:
    """Return the tensors of a bucket, with values copied from its parameters and gradients of zero.

    Args:
        bucket: table of the bucket's pieces and owners.
        residence: memory, device or host, in which this rank keeps the bucket over an iteration.
        group: process group of the holders; ``None`` if only this rank holds the bucket.
        gradient_dtype: type in which gradients are accumulated; ``None``: the type of the weights.
        host: host memory of this rank.
    """
    values = boxes[0].parameter.data.new_empty(bucket.size)
    gradients = values.new_zeros(bucket.size, dtype=gradient_dtype or values.dtype)
    buffer = BucketBuffer(bucket, residence, group, values, gradients, slice(*bucket.run(rank)))
    for piece, start, box in zip(bucket.pieces, bucket.starts, boxes, strict=True):
        span = slice(start, start + piece.size)
        assert box.parameter.dtype == values.dtype, f"{piece.key}: weights of one precision"
        values[span] = box.view(box.parameter.data, piece.cell).reshape(-1)
        buffer.copied.append((box, piece.cell, span))
    buffer.copied = [copied for run in _runs(buffer.copied) for copied in _left(buffer, run)]
    size = buffer.stored_run.stop - buffer.stored_run.start
    if residence.passes:
        buffer.stored_values = (
            host.empty((size,), values.dtype) if residence.weights_on_host else values.new_empty(size)
        )
    if residence.gradients_on_host:
        buffer.stored_gradients = host.empty((size,), gradients.dtype)
    elif residence.passes:
        buffer.stored_gradients = gradients.new_zeros(size)
    buffer.keep()
    if residence.passes:
        gradients.untyped_storage().resize_(0)
    return buffer


def _left(buffer: BucketBuffer, run: _Run) -> _Run:
    """Return the pieces of a run that must be copied; none if the run is a whole parameter.

    A whole parameter and its gradient become views of the bucket.
    """
    parameter = run[0][0].parameter
    span = slice(run[0][2].start, run[-1][2].stop)
    if span.stop - span.start != parameter.numel() or not parameter.is_contiguous():
        return run
    parameter.data = buffer.values[span].view(parameter.shape)
    set_main_grad(parameter, buffer.gradients[span].view(parameter.shape))
    buffer.viewed.append((parameter, span))
    return []


def _runs(copied: _Run) -> Iterable[_Run]:
    """Yield runs of pieces that are adjacent both in a parameter and in the bucket, as in a gated MLP."""
    run: _Run = []
    for box, cell, span in copied:
        part = box.view(box.parameter.data, cell)
        place = part.storage_offset() - box.parameter.data.storage_offset()
        follows = (
            bool(run)
            and run[0][0].parameter is box.parameter
            and part.is_contiguous()
            and place == span.start - run[0][2].start
        )
        if not follows:
            if run:
                yield run
            run = []
        run.append((box, cell, span))
    if run:
        yield run
