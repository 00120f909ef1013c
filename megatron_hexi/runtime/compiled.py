"""A pass of attention as a flat list of launches, compiled once and run for every layer.

The pass is compiled with a `Recorder`: tensors are replaced by `Value`s, which have a number and a shape but
no contents, and each operation is added to the list with its constants bound and its slices resolved. The
list is run in one loop, in which a tensor is dropped after the last launch that reads it. Only constants such
as row indices outlive a call, so a compiled pass may be in flight several times at once. A compiled pass is
valid for one plan.

While a profile is recorded, the phases of a pass are named ranges, by torch's own `record_function`: under
`emit_nvtx`, which Megatron's ``--profile`` enters for Nsight Systems, torch makes NVTX ranges of them, and
under torch's profiler (``--use-pytorch-profiler``) events of its trace. So one name serves both, no flag of
ours is needed, and torch knows whether a profile is being recorded: a pass asks once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from megatron_hexi.plan.model import Range
from megatron_hexi.plan.program import Operation, OwnBlock, Post, Wait
from megatron_hexi.runtime import fused
from megatron_hexi.runtime.kernels.base import ALIGNMENT_BYTES


def named[T](phases: Iterable[tuple[Operation, T]]) -> Iterable[tuple[Operation, T]]:
    """Yield the operations of a pass with their launches, each within a named range of a profile."""
    return _in_ranges(phases) if _profiler_enabled() else phases


def _in_ranges[T](phases: Iterable[tuple[Operation, T]]) -> Iterator[tuple[Operation, T]]:
    for operation, launches in phases:
        with record_function(f"hexi: {_spell(operation)}"):
            yield operation, launches


def _spell(operation: Operation) -> str:
    match operation:
        case OwnBlock(first, stop):
            return "own block" if (first, stop) == (0, 2) else f"own block, half {first}"
        case Post(batch) | Wait(batch):
            verb = "post" if isinstance(operation, Post) else "wait for"
            if batch.cargo in ("in", "out"):
                return f"{verb} all-to-all {batch.cargo}, half {batch.step}"
            return f"{verb} {batch.cargo} of step {batch.step}, part {batch.part}"
    return f"blocks of step {operation.step}, part {operation.part}"


#: Shape of a tensor.
Shape = tuple[int, ...]
#: A read of a tensor: its number in the pass, and the slices that are read (``None``: the whole tensor).
Read = tuple[int, tuple[slice, ...] | None]


class Value(NamedTuple):
    """A placeholder, during compilation, for a tensor of the pass or for a slice of a tensor.

    Args:
        ranges: range of each dimension that the slice contains.
    """

    number: int
    whole: Shape
    ranges: tuple[range, ...]

    @property
    def shape(self) -> Shape:
        """Shape of the slice."""
        return tuple(map(len, self.ranges))

    def cut(self, *ranges: Range | None) -> Value:
        """Return a slice by one range for each of the first dimensions; ``None`` keeps a dimension whole."""
        pairs = zip(self.ranges, ranges, strict=False)
        cuts = [whole if part is None else whole[part[0] : part[1]] for whole, part in pairs]
        return Value(self.number, self.whole, (*cuts, *self.ranges[len(ranges) :]))


@dataclass(frozen=True)
class BufferPlace:
    """The position of a tensor in a buffer, in elements."""

    shape: Shape
    strides: Shape
    offset: int = 0

    def is_aligned(self, elements: int) -> bool:
        """Whether every row of the tensor begins at a multiple of `elements` elements."""
        steps = [step for size, step in zip(self.shape[:-1], self.strides[:-1], strict=True) if size > 1]
        return not any(step % elements for step in (self.offset, *steps))


class Launch(NamedTuple):
    """A launch: one call of a function in a compiled pass.

    Args:
        run: function that takes the tensors read and returns the new tensor, or a sequence of new tensors.
        writes: number of the new tensor, or slice of the numbers of the new tensors.
        last: numbers of the tensors that no later launch reads.
    """

    run: Callable[..., Any]
    reads: list[Read]
    writes: int | slice | None
    last: list[int]

    @property
    def written(self) -> set[int]:
        """Numbers of the new tensors of the launch."""
        if isinstance(self.writes, slice):
            return {*range(self.writes.start, self.writes.stop)}
        return set() if self.writes is None else {self.writes}


@dataclass(frozen=True)
class CompiledPass:
    """A compiled forward or backward pass of attention, which is called with the pass's inputs."""

    phases: Sequence[tuple[Operation, list[Launch]]]
    tensors: int
    results: Sequence[Read]
    shapes: Sequence[Shape]

    def __call__(self, *inputs: Tensor | None) -> list[Any]:
        """Run the pass, and return the tensors for the values that `Recorder.compile` was given."""
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
    """A recorder that compiles a pass: it adds launches to a list in place of computing."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        #: Type of sums and log-sum-exps.
        self.wide = torch.promote_types(dtype, torch.float32)
        self.fused = fused.implementation(device, dtype)
        self._inputs = self._count = 0
        self._phases: list[tuple[Operation, list[Launch]]] = []

    def inputs(self, *shapes: Sequence[int]) -> list[Value]:
        """Return placeholders for the inputs of the pass; must be called before any launch is recorded."""
        self._inputs = len(shapes)
        return self._new(shapes)

    def begin(self, operation: Operation) -> None:
        """Set the operation of the program that the next launches carry out."""
        self._phases.append((operation, []))

    def do(self, run: Callable[..., Any], *reads: Value | None) -> None:
        """Record a launch that returns no tensor."""
        self._add(run, reads, None)

    def make(self, run: Callable[..., Any], shape: Sequence[int], *reads: Value | None) -> Value:
        """Record a launch that returns a tensor, or an object with shape `()`; return its placeholder."""
        (made,) = self._new([shape])
        self._add(run, reads, made.number)
        return made

    def make_each(
        self, run: Callable[..., Any], shapes: Sequence[Sequence[int]], *reads: Value | None
    ) -> list[Value]:
        """Record a launch that returns one tensor for each shape; return their placeholders."""
        begin = self._count
        made = self._new(shapes)
        self._add(run, reads, slice(begin, self._count))
        return made

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Value:
        """Record the allocation of a contiguous tensor; return its placeholder."""
        return self.make(partial(torch.empty, shape, dtype=dtype or self.dtype, device=self.device), shape)

    def views(self, buffer: Value, places: Sequence[BufferPlace], *, are_read: bool = False) -> list[Value]:
        """Record views of a buffer that `empty` allocated; return their placeholders.

        Args:
            are_read: whether kernels read the views. On CUDA, views whose rows are not aligned are then
                copied (see `dispatch.aligned`).
        """
        views = self.make_each(partial(_views, places), [place.shape for place in places], buffer)
        elements = ALIGNMENT_BYTES // self.dtype.itemsize
        for number, place in enumerate(places if are_read and self.device.type == "cuda" else ()):
            if not place.shape[-1] % elements and not place.is_aligned(elements):
                copy = partial(torch.clone, memory_format=torch.contiguous_format)
                views[number] = self.make(copy, place.shape, views[number])
        return views

    def compile(self, *results: Value | None) -> CompiledPass:
        """Return the compiled pass, which returns the tensors of the given values."""
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
    """Return the read of a value; ``None`` is read as the last of the pass's tensors, which is ``None``."""
    if value is None:
        return -1, None
    if value.shape == value.whole:
        return value.number, None
    return value.number, tuple([slice(part.start, part.stop) for part in value.ranges])


def _views(places: Sequence[BufferPlace], buffer: Tensor) -> list[Tensor]:
    return [buffer.as_strided(place.shape, place.strides, place.offset) for place in places]
