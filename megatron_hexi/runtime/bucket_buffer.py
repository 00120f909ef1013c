"""The flat tensors of one bucket on one rank: weights, gradients, and the rank's share of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_hexi.mesh import Box, Bucket, Cell, Residence
from megatron_hexi.runtime.host_memory import HostMemory


@dataclass(frozen=True)
class HeldBox:
    """A box of a weight with its place in the parameter that holds it.

    Args:
        strides: strides of the box's axes, in elements of the parameter.
        offset: offset of the box's first element in the parameter.
    """

    box: Box
    parameter: Parameter
    strides: tuple[int, ...]
    offset: int

    def view(self, tensor: Tensor, cell: Cell) -> Tensor:
        """Return a view of a part of the box, in a tensor with the parameter's layout."""
        starts = [cell_axis[0] - box_axis[0] for cell_axis, box_axis in zip(cell, self.box.cell, strict=True)]
        start = sum(first * stride for first, stride in zip(starts, self.strides, strict=True))
        sizes = [high - low for low, high in cell]
        return tensor.as_strided(sizes, self.strides, tensor.storage_offset() + self.offset + start)


@dataclass
class BucketBuffer:
    """The tensors of one bucket on this rank.

    Args:
        gradients: gradients, flat; after the sum over holders only the rank's own share is defined.
        stored_values: part of `values` that the rank keeps while the memory of `values` is released;
            ``None``: it is never released.
        stored_gradients: part of `gradients` that the rank keeps while the memory of `gradients` is released,
            or the rank's share in host memory; ``None``: neither is needed.
        copied: pieces of parameters that have their own memory: box, cell, and slice of the bucket.
        viewed: parameters that are views of `values`, with their slices of the bucket.
        scales: factors, other than 1, by which slices of the gradients are multiplied before the sum.
        group: process group of the holders; ``None`` if only this rank holds the bucket.
    """

    bucket: Bucket
    residence: Residence
    group: dist.ProcessGroup | None
    values: Tensor
    gradients: Tensor
    own_run: slice
    stored_values: Tensor | None = None
    stored_gradients: Tensor | None = None
    copied: list[tuple[HeldBox, Cell, slice]] = field(default_factory=list)
    viewed: list[tuple[Parameter, slice]] = field(default_factory=list)
    scales: list[tuple[slice, float]] = field(default_factory=list)
    waits_for: set[Parameter] = field(default_factory=set)
    works: list[dist.Work | None] = field(default_factory=list)

    def runs(self) -> Iterable[tuple[int, slice]]:
        """Yield each owning rank and its slice of the bucket."""
        for rank in self.bucket.holders:
            start, stop = self.bucket.run(rank)
            if start < stop:
                yield rank, slice(start, stop)

    @property
    def passes(self) -> bool:
        """Whether the whole bucket is on the device only during the passes of one ministage."""
        return self.residence.passes

    @property
    def stored_run(self) -> slice:
        """Slice of the elements that the rank keeps while the bucket's memory is released."""
        return slice(0, self.bucket.size) if self.passes and self.residence.whole else self.own_run

    @property
    def own_values(self) -> Tensor:
        """Values of the rank's share, in the memory that is never released."""
        return self.values[self.own_run] if self.stored_values is None else self._owned(self.stored_values)

    @property
    def own_gradients(self) -> Tensor:
        """Gradients of the rank's share, in the memory where they are after the sum."""
        return (
            self.gradients[self.own_run]
            if self.stored_gradients is None
            else self._owned(self.stored_gradients)
        )

    def _owned(self, stored: Tensor) -> Tensor:
        start = self.stored_run.start
        return stored[self.own_run.start - start : self.own_run.stop - start]

    def spread(self) -> None:
        """Copy values from the bucket to the parameters that have their own memory."""
        for box, cell, span in self.copied:
            part = box.view(box.parameter.data, cell)
            part.copy_(self.values[span].view(part.shape))

    def collect(self) -> None:
        """Copy parameters that are stored outside the bucket into it, and refresh the stored values."""
        for box, cell, span in self.copied:
            self.values[span] = box.view(box.parameter.data, cell).reshape(-1)
        self.keep()

    def keep(self) -> None:
        """Copy the part of the values that the rank keeps to `stored_values`."""
        if self.stored_values is not None:
            self.stored_values.copy_(self.values[self.stored_run])


def collect_gradients(buffer: BucketBuffer) -> None:
    """Copy gradients of parameters that have their own memory into the bucket; scale all for the sum."""
    for box, cell, span in buffer.copied:
        buffer.gradients[span] = box.view(main_grad(box.parameter), cell).reshape(-1)
    for span, factor in buffer.scales:
        buffer.gradients[span] *= factor


def start_sum(buffer: BucketBuffer) -> None:
    """Collect the gradients of a bucket, and start to reduce them to the owners of its elements."""
    collect_gradients(buffer)
    start_reduction(buffer)


def start_reduction(buffer: BucketBuffer) -> None:
    """Start to reduce the collected gradients of a bucket to the owners of its elements."""
    if buffer.group is not None:
        buffer.works = [
            dist.reduce(buffer.gradients[span], owner, group=buffer.group, async_op=True)
            for owner, span in buffer.runs()
        ]


def send_values(buffer: BucketBuffer) -> list[dist.Work | None]:
    """Start to broadcast each owner's values of a bucket to all holders; return the operations in flight."""
    assert buffer.group is not None
    return [
        dist.broadcast(buffer.values[span], owner, group=buffer.group, async_op=True)
        for owner, span in buffer.runs()
    ]


def main_grad(parameter: Parameter) -> Tensor:
    """Return the tensor in which Megatron accumulates a parameter's gradient."""
    main: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return main


def set_main_grad(parameter: Parameter, gradient: Tensor) -> None:
    """Set the tensor in which Megatron accumulates a parameter's gradient."""
    parameter.main_grad = gradient  # type: ignore[attr-defined]


def wait_all(works: Sequence[dist.Work | None]) -> None:
    """Wait for collectives in flight on process groups that contain this rank."""
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()


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
        gradient_dtype: type in which gradients are accumulated; ``None``: the type of the weights.
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
