"""One bucket of pieces laid out on a rank: parameters become views of it where they can."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from megatron_hexi.mesh import Bucket, Cell, Residence
from megatron_hexi.runtime.bucket_buffer import BucketBuffer, HeldBox, set_main_grad
from megatron_hexi.runtime.host_memory import HostMemory

#: Pieces with where each lies in its parameter, and in the bucket.
_Run = list[tuple[HeldBox, Cell, slice]]


def lay_out(
    bucket: Bucket,
    kept: Residence,
    group: dist.ProcessGroup | None,
    held: Sequence[HeldBox],
    rank: int,
    gradient_dtype: torch.dtype | None,
    host: HostMemory,
) -> BucketBuffer:
    """A bucket with the values that its parameters have, and gradients that are zero.

    Args:
        bucket: its table.
        kept: how this rank keeps it.
        group: the holders; ``None`` where this rank alone holds it.
        held: of each piece, the box that it lies in.
        rank: this rank.
        gradient_dtype: in which gradients are added up; ``None``: that of the weights.
        host: this rank's host memory.
    """
    values = held[0].parameter.data.new_empty(bucket.size)
    gradients = values.new_zeros(bucket.size, dtype=gradient_dtype or values.dtype)
    buffer = BucketBuffer(bucket, kept, group, values, gradients, slice(*bucket.run(rank)))
    for piece, start, one in zip(bucket.pieces, bucket.starts, held, strict=True):
        span = slice(start, start + piece.size)
        assert one.parameter.dtype == values.dtype, f"{piece.key}: weights of one precision"
        values[span] = one.view(one.parameter.data, piece.cell).reshape(-1)
        buffer.copied.append((one, piece.cell, span))
    buffer.copied = [copied for run in _runs(buffer.copied) for copied in _left(buffer, run)]
    size = buffer.rest_run.stop - buffer.rest_run.start
    if kept.passes:
        buffer.rest_values = (
            host.empty((size,), values.dtype) if kept.weights_on_host else values.new_empty(size)
        )
    if kept.gradients_on_host:
        buffer.rest_gradients = host.empty((size,), gradients.dtype)
    elif kept.passes:
        buffer.rest_gradients = gradients.new_zeros(size)
    buffer.keep()
    if kept.passes:
        gradients.untyped_storage().resize_(0)
    return buffer


def _left(buffer: BucketBuffer, run: _Run) -> _Run:
    """Of pieces that follow each other in a parameter and in a bucket: none, if they are all of it.

    Then the parameter and its gradient become views of the bucket.
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
    """Pieces that follow each other in a parameter as in the bucket, such as both parts of a gated MLP."""
    run: _Run = []
    for held, cell, span in copied:
        part = held.view(held.parameter.data, cell)
        place = part.storage_offset() - held.parameter.data.storage_offset()
        follows = (
            bool(run)
            and run[0][0].parameter is held.parameter
            and part.is_contiguous()
            and place == span.start - run[0][2].start
        )
        if not follows:
            if run:
                yield run
            run = []
        run.append((held, cell, span))
    if run:
        yield run
