"""A flat bucket of pieces on one rank: weights, gradients, and the rank's share of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_hexi.mesh import Box, Bucket, Cell, Residence


@dataclass(frozen=True)
class HeldBox:
    """A box of a weight, in the parameter that holds it.

    Args:
        box: the part of the weight.
        parameter: the parameter that holds it.
        strides: strides of the box's axes, in elements of the parameter.
        offset: offset of its first element.
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
    """A bucket on this rank.

    Args:
        bucket: the bucket's table.
        residence: the bucket's place on this rank over an iteration.
        group: process group of the holders; ``None`` where this rank alone holds it.
        values: values of the weights, flat.
        gradients: gradients, flat; after the sum only the rank's own share is defined.
        own_run: elements that this rank owns.
        stored_values: the part of `values` that it stores while they are released; ``None``: they never are.
        stored_gradients: the part of `gradients` that it stores while they are released, or its share in host
            memory; ``None``: nothing.
        copied: pieces of parameters with memory of their own: the box, the cell, and the place in the bucket.
        viewed: parameters that are views of the values, with their place in the bucket.
        scales: factors of gradients before the sum, where they are not 1.
        waits_for: parameters whose gradients are not complete yet.
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
        """Yield each owner with its elements."""
        for rank in self.bucket.holders:
            start, stop = self.bucket.run(rank)
            if start < stop:
                yield rank, slice(start, stop)

    @property
    def passes(self) -> bool:
        """Whether it is on the device only in the passes of a ministage."""
        return self.residence.passes

    @property
    def stored_run(self) -> slice:
        """The elements that it stores while the bucket is released."""
        return slice(0, self.bucket.size) if self.passes and self.residence.whole else self.own_run

    @property
    def own_values(self) -> Tensor:
        """Values of the rank's share, at the place where they always are."""
        return self.values[self.own_run] if self.stored_values is None else self._owned(self.stored_values)

    @property
    def own_gradients(self) -> Tensor:
        """Gradients of the rank's share, at their place after the sum."""
        return (
            self.gradients[self.own_run]
            if self.stored_gradients is None
            else self._owned(self.stored_gradients)
        )

    def _owned(self, stored: Tensor) -> Tensor:
        start = self.stored_run.start
        return stored[self.own_run.start - start : self.own_run.stop - start]

    def spread(self) -> None:
        """Copy its values to parameters with memory of their own."""
        for box, cell, span in self.copied:
            part = box.view(box.parameter.data, cell)
            part.copy_(self.values[span].view(part.shape))

    def collect(self) -> None:
        """Copy the values of parameters with memory of their own here, and store the stored part."""
        for box, cell, span in self.copied:
            self.values[span] = box.view(box.parameter.data, cell).reshape(-1)
        self.keep()

    def keep(self) -> None:
        """Store the part of the values that outlasts their release."""
        if self.stored_values is not None:
            self.stored_values.copy_(self.values[self.stored_run])


def collect_gradients(buffer: BucketBuffer) -> None:
    """Copy gradients of parameters with memory of their own into the bucket, and scale them for the sum."""
    for box, cell, span in buffer.copied:
        buffer.gradients[span] = box.view(main_grad(box.parameter), cell).reshape(-1)
    for span, factor in buffer.scales:
        buffer.gradients[span] *= factor


def start_sum(buffer: BucketBuffer) -> None:
    """Collect the gradients of a bucket and start to reduce them to their owners."""
    collect_gradients(buffer)
    start_reduction(buffer)


def start_reduction(buffer: BucketBuffer) -> None:
    """Start to reduce gradients that are in the bucket to their owners."""
    if buffer.group is not None:
        buffer.works = [
            dist.reduce(buffer.gradients[span], owner, group=buffer.group, async_op=True)
            for owner, span in buffer.runs()
        ]


def send_values(buffer: BucketBuffer) -> list[dist.Work | None]:
    """Start to broadcast the values of each owner to all holders."""
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
    """Wait for operations on groups of this rank."""
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()
