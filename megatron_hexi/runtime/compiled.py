"""A pass of attention as a flat list of launches, compiled once and run for every layer.

A pass is compiled by going through it with a `Recorder`: tensors are `Value`s then, which have a place and a
shape and no contents, and each operation is added to the list with its constants bound and its slices
resolved. To carry the list out is one loop, in which a tensor is dropped after the last launch that reads it.
Only constants such as indices of rows outlive a call, so a compiled pass may be under way any number of
times. It holds for the plan that it was compiled for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_hexi.plan.model import Range
from megatron_hexi.plan.program import Operation
from megatron_hexi.runtime import fused
from megatron_hexi.runtime.kernels.dispatch import ALIGNMENT_BYTES
from megatron_hexi.runtime.profile_ranges import named

#: A shape, or the sizes of one.
Shape = tuple[int, ...]
#: The number of a tensor in the list of a pass, and the slices that are read of it (``None``: all of it).
Read = tuple[int, tuple[slice, ...] | None]


class Value(NamedTuple):
    """A tensor of a pass at the time of compilation, or a slice of a tensor.

    Args:
        number: number of the tensor in the list of the pass.
        whole: shape of the tensor.
        ranges: the slice's part of each dimension.
    """

    number: int
    whole: Shape
    ranges: tuple[range, ...]

    @property
    def shape(self) -> Shape:
        """Shape of the slice."""
        return tuple(map(len, self.ranges))

    def cut(self, *ranges: Range | None) -> Value:
        """Return a slice of the first dimensions; ``None`` leaves a dimension as it is."""
        pairs = zip(self.ranges, ranges, strict=False)
        cuts = [whole if part is None else whole[part[0] : part[1]] for whole, part in pairs]
        return Value(self.number, self.whole, (*cuts, *self.ranges[len(ranges) :]))


@dataclass(frozen=True)
class BufferPlace:
    """The position of a tensor in a buffer, in elements.

    Args:
        shape: shape of the tensor.
        strides: strides of its dimensions.
        offset: offset of its first element.
    """

    shape: Shape
    strides: Shape
    offset: int = 0

    def is_aligned(self, elements: int) -> bool:
        """Whether every row begins at a multiple of `elements`."""
        steps = [step for size, step in zip(self.shape[:-1], self.strides[:-1], strict=True) if size > 1]
        return not any(step % elements for step in (self.offset, *steps))


class Launch(NamedTuple):
    """An operation of a pass.

    Args:
        run: function from the tensors read to the tensors written, several as a sequence.
        reads: tensors that it reads.
        writes: number of the tensor that it makes, or a slice of numbers.
        last: numbers of the tensors that no later launch reads.
    """

    run: Callable[..., Any]
    reads: list[Read]
    writes: int | slice | None
    last: list[int]

    @property
    def written(self) -> set[int]:
        """Numbers of the tensors that it makes."""
        if isinstance(self.writes, slice):
            return {*range(self.writes.start, self.writes.stop)}
        return set() if self.writes is None else {self.writes}


@dataclass(frozen=True)
class CompiledPass:
    """A compiled pass of attention.

    Args:
        phases: launches, by the operation of the program that they carry out.
        tensors: number of tensors that the pass makes.
        results: tensors that it returns.
        shapes: shapes of the results.
    """

    phases: Sequence[tuple[Operation, list[Launch]]]
    tensors: int
    results: Sequence[Read]
    shapes: Sequence[Shape]

    def __call__(self, *inputs: Tensor | None) -> list[Any]:
        """Run the pass.

        Args:
            inputs: tensors of the number, shapes and types that it was compiled for.

        Returns:
            The results that `Recorder.compile` was given.
        """
        tensors: list[Any] = [*inputs, *[None] * (self.tensors + 1)]
        for _, launches in named(self.phases):
            for run, reads, writes, last in launches:
                made = run(*[tensors[i] if cut is None else tensors[i][cut] for i, cut in reads])
                if writes is not None:
                    tensors[writes] = made
                for number in last:
                    tensors[number] = None
        return [tensors[i] if cut is None else tensors[i][cut] for i, cut in self.results]


class Recorder:
    """Compiler of a pass: records launches in place of computing.

    Args:
        dtype: type of the tensors of the pass.
        device: likewise.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        #: Type of sums and log-sum-exps.
        self.wide = torch.promote_types(dtype, torch.float32)
        self.fused = fused.implementation(device, dtype)
        self._inputs = self._count = 0
        self._phases: list[tuple[Operation, list[Launch]]] = []

    def inputs(self, *shapes: Sequence[int]) -> list[Value]:
        """Return the inputs of the pass; called before anything else."""
        self._inputs = len(shapes)
        return self._new(shapes)

    def begin(self, operation: Operation) -> None:
        """Set the operation of the program that the next launches carry out."""
        self._phases.append((operation, []))

    def do(self, run: Callable[..., Any], *reads: Value | None) -> None:
        """Add a launch that returns nothing."""
        self._add(run, reads, None)

    def make(self, run: Callable[..., Any], shape: Sequence[int], *reads: Value | None) -> Value:
        """Add a launch that returns a tensor, or another object under the shape `()`."""
        (made,) = self._new([shape])
        self._add(run, reads, made.number)
        return made

    def make_each(
        self, run: Callable[..., Any], shapes: Sequence[Sequence[int]], *reads: Value | None
    ) -> list[Value]:
        """Add a launch that returns a tensor for each shape."""
        begin = self._count
        made = self._new(shapes)
        self._add(run, reads, slice(begin, self._count))
        return made

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Value:
        """Allocate a contiguous tensor."""
        return self.make(partial(torch.empty, shape, dtype=dtype or self.dtype, device=self.device), shape)

    def views(self, buffer: Value, places: Sequence[BufferPlace], *, are_read: bool = False) -> list[Value]:
        """Return tensors that are views of a buffer from `empty`.

        Args:
            buffer: the buffer.
            places: their places in it.
            are_read: whether kernels read them. On CUDA, tensors whose rows are not aligned are then copied
                (see `dispatch.aligned`).
        """
        views = self.make_each(partial(_views, places), [place.shape for place in places], buffer)
        elements = ALIGNMENT_BYTES // self.dtype.itemsize
        for number, place in enumerate(places if are_read and self.device.type == "cuda" else ()):
            if not place.shape[-1] % elements and not place.is_aligned(elements):
                copy = partial(torch.clone, memory_format=torch.contiguous_format)
                views[number] = self.make(copy, place.shape, views[number])
        return views

    def compile(self, *results: Value | None) -> CompiledPass:
        """Return the pass with these results."""
        returned = [_read(result) for result in results]
        needed = {number for number, _ in returned}
        for _, launches in reversed(self._phases):
            for launch in reversed(launches):
                used = {number for number, _ in launch.reads if number >= 0} | launch.written
                launch.last.extend(used - needed)
                needed |= used
        shapes = [() if result is None else result.shape for result in results]
        return CompiledPass(self._phases, self._count - self._inputs, returned, shapes)

    def _new(self, shapes: Sequence[Sequence[int]]) -> list[Value]:
        first, self._count = self._count, self._count + len(shapes)
        return [
            Value(first + i, tuple(shape), tuple([range(size) for size in shape]))
            for i, shape in enumerate(shapes)
        ]

    def _add(
        self, run: Callable[..., Any], reads: Sequence[Value | None], writes: int | slice | None
    ) -> None:
        self._phases[-1][1].append(Launch(run, [_read(value) for value in reads], writes, []))


def _read(value: Value | None) -> Read:
    """Return how a launch reads a value from the list of the pass's tensors, whose last is ``None``."""
    if value is None:
        return -1, None
    if value.shape == value.whole:
        return value.number, None
    return value.number, tuple([slice(part.start, part.stop) for part in value.ranges])


def _views(places: Sequence[BufferPlace], buffer: Tensor) -> list[Tensor]:
    return [buffer.as_strided(place.shape, place.strides, place.offset) for place in places]
