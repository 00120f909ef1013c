"""A pass of attention as a flat list of launches, compiled once and carried out for every layer.

A pass is compiled by going through it with a `Recorder`: tensors are `Value`s then, which have a place and a
shape and no contents, and each operation is added to the list with its constants bound and its slices
resolved. To carry the list out is one loop, in which a tensor is dropped after the last launch that reads it.
Nothing outlives a call but constants such as indices of rows, so a compiled pass may be under way any number
of times, and belongs to no plan but the one that it was compiled for.
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
from megatron_hexi.runtime.ranges import named

#: A shape, or the sizes of one.
Shape = tuple[int, ...]
#: The number of a tensor in the list of all of a pass, and the slices taken from it (``None``: all of it).
Read = tuple[int, tuple[slice, ...] | None]


class Value(NamedTuple):
    """A tensor of a pass at the time of compilation, or a slice of one.

    Args:
        number: of the tensor, in the list of all of the pass.
        whole: shape of the tensor.
        ranges: the part of each dimension that the slice has.
    """

    number: int
    whole: Shape
    ranges: tuple[range, ...]

    @property
    def shape(self) -> Shape:
        """Shape of the slice."""
        return tuple(map(len, self.ranges))

    def cut(self, *ranges: Range | None) -> Value:
        """Slice the first dimensions; ``None`` leaves one as it is."""
        pairs = zip(self.ranges, ranges, strict=False)
        cuts = [own if some is None else own[some[0] : some[1]] for own, some in pairs]
        return Value(self.number, self.whole, (*cuts, *self.ranges[len(ranges) :]))


@dataclass(frozen=True)
class Place:
    """The position of a tensor in a buffer, in elements.

    Args:
        shape: of the tensor.
        strides: of its dimensions.
        offset: of its first element.
    """

    shape: Shape
    strides: Shape
    offset: int = 0

    def is_aligned(self, elements: int) -> bool:
        """Whether every row begins at a multiple of so many elements."""
        steps = [step for size, step in zip(self.shape[:-1], self.strides[:-1], strict=True) if size > 1]
        return not any(step % elements for step in (self.offset, *steps))


class Launch(NamedTuple):
    """One operation of a pass.

    Args:
        run: takes the tensors that are read; gives those that are written, several as a sequence.
        reads: its tensors.
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
    """A pass of attention.

    Args:
        phases: launches, by the operation of the program that they carry out.
        tensors: how many tensors the pass makes.
        results: those that it returns.
        shapes: of the results.
    """

    phases: Sequence[tuple[Operation, list[Launch]]]
    tensors: int
    results: Sequence[Read]
    shapes: Sequence[Shape]

    def __call__(self, *inputs: Tensor | None) -> list[Any]:
        """Carry it out.

        Args:
            inputs: as many as it was compiled for, of the same shapes and types.

        Returns:
            What `Recorder.compile` was asked for.
        """
        held: list[Any] = [*inputs, *[None] * (self.tensors + 1)]
        for _, launches in named(self.phases):
            for run, reads, writes, last in launches:
                made = run(*[held[i] if cut is None else held[i][cut] for i, cut in reads])
                if writes is not None:
                    held[writes] = made
                for number in last:
                    held[number] = None
        return [held[i] if cut is None else held[i][cut] for i, cut in self.results]


class Recorder:
    """Compiles a pass.

    Args:
        dtype: of the tensors of the pass.
        device: likewise.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        #: In which sums and log-sum-exps are kept.
        self.wide = torch.promote_types(dtype, torch.float32)
        self.fused = fused.implementation(device, dtype)
        self._inputs = self._count = 0
        self._phases: list[tuple[Operation, list[Launch]]] = []

    def inputs(self, *shapes: Sequence[int]) -> list[Value]:
        """The pass's inputs; before anything else."""
        self._inputs = len(shapes)
        return self._new(shapes)

    def begin(self, operation: Operation) -> None:
        """Say which operation of the program the next launches carry out."""
        self._phases.append((operation, []))

    def do(self, run: Callable[..., Any], *reads: Value | None) -> None:
        """Add a launch that returns nothing."""
        self._add(run, reads, None)

    def make(self, run: Callable[..., Any], shape: Sequence[int], *reads: Value | None) -> Value:
        """Add a launch that returns a tensor (or anything that is kept like one, of the shape `()`)."""
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
        """Allocate a tensor, contiguous."""
        return self.make(partial(torch.empty, shape, dtype=dtype or self.dtype, device=self.device), shape)

    def views(self, buffer: Value, places: Sequence[Place], *, are_read: bool = False) -> list[Value]:
        """Tensors that lie in a buffer that `empty` has made.

        Args:
            buffer: where they lie.
            places: where in it.
            are_read: whether kernels are to read them. On CUDA one whose rows do not begin where they should
                is copied then (see `dispatch.aligned`).
        """
        views = self.make_each(partial(_views, places), [place.shape for place in places], buffer)
        elements = ALIGNMENT_BYTES // self.dtype.itemsize
        for number, place in enumerate(places if are_read and self.device.type == "cuda" else ()):
            if not place.shape[-1] % elements and not place.is_aligned(elements):
                copy = partial(torch.clone, memory_format=torch.contiguous_format)
                views[number] = self.make(copy, place.shape, views[number])
        return views

    def compile(self, *results: Value | None) -> CompiledPass:
        """The pass, which returns these values."""
        returned = [_read(result) for result in results]
        seen = {number for number, _ in returned}
        for _, launches in reversed(self._phases):
            for launch in reversed(launches):
                held = {number for number, _ in launch.reads if number >= 0} | launch.written
                launch.last.extend(held - seen)
                seen |= held
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
    return value.number, tuple([slice(some.start, some.stop) for some in value.ranges])


def _views(places: Sequence[Place], buffer: Tensor) -> list[Tensor]:
    return [buffer.as_strided(place.shape, place.strides, place.offset) for place in places]
