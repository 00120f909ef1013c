"""One flat bucket of pieces on one rank: its weights, its gradients, and what this rank owns of them."""

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
        box: which part of which weight.
        parameter: what holds it.
        strides: of the box's axes in the parameter's elements.
        offset: of its first element.
    """

    box: Box
    parameter: Parameter
    strides: tuple[int, ...]
    offset: int

    def view(self, tensor: Tensor, cell: Cell) -> Tensor:
        """A part of the box, in a tensor laid out as the parameter."""
        starts = [cell_axis[0] - box_axis[0] for cell_axis, box_axis in zip(cell, self.box.cell, strict=True)]
        start = sum(first * stride for first, stride in zip(starts, self.strides, strict=True))
        sizes = [high - low for low, high in cell]
        return tensor.as_strided(sizes, self.strides, tensor.storage_offset() + self.offset + start)


@dataclass
class BucketBuffer:
    """One bucket on this rank.

    Args:
        bucket: its table.
        kept: how this rank keeps it.
        group: the holders; ``None`` where this rank alone holds it.
        values: of the weights, flat.
        gradients: flat; after the sum, what this rank owns is right, the rest is undefined.
        own_run: the elements that this rank owns.
        rest_values: what it keeps of `values` while they are away; ``None``: they never are.
        rest_gradients: what it keeps of `gradients` while they are away, or of what it owns in host memory;
            ``None``: nothing.
        copied: pieces whose parameter lies elsewhere too, with where they lie there and here.
        viewed: parameters that are views of the values, with where they lie.
        scales: factors of elements before the sum, where they are not 1.
        waits_for: parameters whose gradients are not there yet.
    """

    bucket: Bucket
    kept: Residence
    group: dist.ProcessGroup | None
    values: Tensor
    gradients: Tensor
    own_run: slice
    rest_values: Tensor | None = None
    rest_gradients: Tensor | None = None
    copied: list[tuple[HeldBox, Cell, slice]] = field(default_factory=list)
    viewed: list[tuple[Parameter, slice]] = field(default_factory=list)
    scales: list[tuple[slice, float]] = field(default_factory=list)
    waits_for: set[Parameter] = field(default_factory=set)
    works: list[dist.Work | None] = field(default_factory=list)

    def runs(self) -> Iterable[tuple[int, slice]]:
        """Each holder that owns anything, with its elements."""
        for rank in self.bucket.holders:
            start, stop = self.bucket.run(rank)
            if start < stop:
                yield rank, slice(start, stop)

    @property
    def passes(self) -> bool:
        """Whether it is on the device only while its ministage needs it."""
        return self.kept.passes

    @property
    def rest_run(self) -> slice:
        """The elements that it keeps while the bucket is away."""
        return slice(0, self.bucket.size) if self.passes and self.kept.whole else self.own_run

    @property
    def own_values(self) -> Tensor:
        """Values of what this rank owns, where they always are."""
        return self.values[self.own_run] if self.rest_values is None else self._owned(self.rest_values)

    @property
    def own_gradients(self) -> Tensor:
        """Gradients of what this rank owns, where they are after the sum."""
        return (
            self.gradients[self.own_run] if self.rest_gradients is None else self._owned(self.rest_gradients)
        )

    def _owned(self, rest: Tensor) -> Tensor:
        start = self.rest_run.start
        return rest[self.own_run.start - start : self.own_run.stop - start]

    def spread(self) -> None:
        """Copy its values to parameters that lie elsewhere too."""
        for held, cell, span in self.copied:
            part = held.view(held.parameter.data, cell)
            part.copy_(self.values[span].view(part.shape))

    def collect(self) -> None:
        """Copy the values of these parameters here, and keep what waits elsewhere."""
        for held, cell, span in self.copied:
            self.values[span] = held.view(held.parameter.data, cell).reshape(-1)
        self.keep()

    def keep(self) -> None:
        """Take from the values what is kept while they are away."""
        if self.rest_values is not None:
            self.rest_values.copy_(self.values[self.rest_run])


def collect_gradients(buffer: BucketBuffer) -> None:
    """Have this rank's part of the gradients in the bucket, as it is added to the others'."""
    for held, cell, span in buffer.copied:
        buffer.gradients[span] = held.view(main_grad(held.parameter), cell).reshape(-1)
    for span, factor in buffer.scales:
        buffer.gradients[span] *= factor


def start_sum(buffer: BucketBuffer) -> None:
    """Start to bring the sum of all holders' gradients to their owners."""
    collect_gradients(buffer)
    start_reduction(buffer)


def start_reduction(buffer: BucketBuffer) -> None:
    """The same for gradients that are in the bucket."""
    if buffer.group is not None:
        buffer.works = [
            dist.reduce(buffer.gradients[span], owner, group=buffer.group, async_op=True)
            for owner, span in buffer.runs()
        ]


def send_values(buffer: BucketBuffer) -> list[dist.Work | None]:
    """Start to give all holders the values of what each owns."""
    assert buffer.group is not None
    return [
        dist.broadcast(buffer.values[span], owner, group=buffer.group, async_op=True)
        for owner, span in buffer.runs()
    ]


def main_grad(parameter: Parameter) -> Tensor:
    """Where Megatron adds up a parameter's gradient."""
    main: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return main


def set_main_grad(parameter: Parameter, gradient: Tensor) -> None:
    """Let Megatron add it up there."""
    parameter.main_grad = gradient  # type: ignore[attr-defined]


def wait_all(works: Sequence[dist.Work | None]) -> None:
    """Wait for what was started in groups of this rank."""
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()
