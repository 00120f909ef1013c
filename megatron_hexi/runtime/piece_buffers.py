"""Weights and gradients in flat buckets of pieces: summed over holders, owned by shares, handed out again.

Where the pieces of a parameter follow each other in one bucket, its values and gradients are views of it.
Where other ranks hold other parts of it, it lies in several places: gradients are copied in before the sum,
values out after the step.

Buckets are reduced as soon as the backward pass has their gradients, always in the order of the table. All
ranks keep that order, so two buckets can never wait for each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_hexi.mesh import Bucket, Cell, Slab, cell_contains
from megatron_hexi.runtime.bucket_buffer import (
    BucketBuffer,
    HeldBox,
    main_grad,
    set_main_grad,
    start_sum,
    wait_all,
)
from megatron_hexi.runtime.hand_out import HandOut
from megatron_hexi.runtime.passing_buckets import PassingBuckets
from megatron_hexi.runtime.waiting import waiting

#: Pieces with where each lies in its parameter, and in the bucket.
_Run = list[tuple[HeldBox, Cell, slice]]


class PieceBuffers:
    """All buckets of one rank, with what Megatron asks of a buffer and of a group of buckets.

    Args:
        buckets: those of all ranks, in the order of the table.
        boxes: what this rank's parameters hold.
        scale_of: factor of a parameter's gradient before it is summed over holders.
        rank: this rank.
        group_of: makes a process group of some ranks; called in the same order by all ranks of the job.
        gradient_dtype: in which gradients are added up; ``None``: that of the weights.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        boxes: Sequence[HeldBox],
        scale_of: Callable[[Parameter], float],
        rank: int,
        group_of: Callable[[tuple[int, ...]], dist.ProcessGroup | None],
        gradient_dtype: torch.dtype | None,
    ) -> None:
        self.rank = rank
        self.buckets: list[BucketBuffer] = []
        self._by_parameter: dict[Parameter, list[BucketBuffer]] = {}
        self._launched = 0
        #: Whether gradients of the micro-batch under way complete the batch. Set by Megatron.
        self.is_last_microbatch = True
        #: Parameters to whose gradients a part of the model adds whose backward pass comes later.
        self.unfinished: frozenset[Parameter] = frozenset()
        self._by_key: dict[str, list[HeldBox]] = {}
        for held in boxes:
            self._by_key.setdefault(held.box.key, []).append(held)
        groups = [group_of(bucket.holders) for bucket in buckets]  # by all ranks, whoever holds what
        for bucket, group in zip(buckets, groups, strict=True):
            if rank in bucket.holders:
                self.buckets.append(self._lay_out(bucket, group, scale_of, gradient_dtype))
        for parameter in self._by_parameter:
            if not hasattr(parameter, "main_grad"):
                dtype = gradient_dtype or parameter.dtype
                set_main_grad(parameter, torch.zeros_like(parameter, dtype=dtype, requires_grad=False))
        self._staying = [buffer for buffer in self.buckets if not buffer.passes]
        self._hand_out = HandOut(self._staying)
        by_number: dict[int, list[BucketBuffer]] = {}
        for buffer in self.buckets:
            if buffer.passes:
                assert buffer.bucket.ministage is not None
                by_number.setdefault(buffer.bucket.ministage[2], []).append(buffer)
        # A parameter that lies in several buckets has memory of its own.
        apart = {held.parameter for buffer in self._staying for held, _, _ in buffer.copied}
        # In the same order on all ranks, as each group's collectives must be.
        self._passing = {number: PassingBuckets(by_number[number], apart) for number in sorted(by_number)}

    def _lay_out(
        self,
        bucket: Bucket,
        group: dist.ProcessGroup | None,
        scale_of: Callable[[Parameter], float],
        gradient_dtype: torch.dtype | None,
    ) -> BucketBuffer:
        held = [
            next(one for one in self._by_key[piece.key] if cell_contains(one.box.cell, piece.cell))
            for piece in bucket.pieces
        ]
        like = held[0].parameter.data
        values = like.new_empty(bucket.size)
        gradients = values.new_zeros(bucket.size, dtype=gradient_dtype or values.dtype)
        run = slice(*bucket.run(self.rank))
        buffer = BucketBuffer(bucket, group, values, gradients, run, values[run], gradients[run])
        if buffer.passes:
            buffer.own_values, buffer.own_gradients = values[run].clone(), gradients[run].clone()
        for piece, start, one in zip(bucket.pieces, bucket.starts, held, strict=True):
            parameter, span = one.parameter, slice(start, start + piece.size)
            assert parameter.dtype == values.dtype, f"{piece.key}: weights of one precision"
            values[span] = one.view(parameter.data, piece.cell).reshape(-1)
            buffer.copied.append((one, piece.cell, span))
            if scale_of(parameter) != 1.0:
                buffer.scales.append((span, scale_of(parameter)))
            self._by_parameter.setdefault(parameter, []).append(buffer)
        buffer.copied = [copied for run in _runs(buffer.copied) for copied in self._left(buffer, run)]
        buffer.keep_own()
        return buffer

    @staticmethod
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
        return []

    def owned(self) -> list[tuple[BucketBuffer, Slab]]:
        """The slabs of this rank, each with its bucket."""
        return [
            (buffer, slab)
            for buffer in self.buckets
            for slab in buffer.bucket.slabs
            if slab.owner == self.rank
        ]

    def parameter_of(self, slab: Slab) -> Parameter:
        """The parameter of this rank that holds a slab."""
        return next(one.parameter for one in self._by_key[slab.key] if cell_contains(one.box.cell, slab.cell))

    # Values

    def collect_values(self) -> None:
        """Copy the values of parameters that lie in several buckets into these."""
        self.settle_values()
        for buffer in self.buckets:
            buffer.collect()

    def hand_out_values(self, waits: bool = True) -> None:
        """Give all holders the values of what this rank owns, and take theirs; what passes comes later.

        Args:
            waits: until all are here; else `settle_values` waits for those of some parameters.
        """
        self._hand_out.start()
        if waits:
            self.settle_values()

    def settle_values(self, parameters: Iterable[Parameter] | None = None) -> None:
        """Have the new values of parameters here; ``None``: of all."""
        if not self._hand_out.under_way:
            return
        if parameters is None:
            self._hand_out.settle(self._staying)
            return
        for parameter in parameters:
            self._hand_out.settle(self._by_parameter.get(parameter, ()))

    def take_values_from(self, source_of: Callable[[tuple[int, ...]], int]) -> None:
        """Give all holders of each bucket the values that one of them has."""
        self.settle_values()
        for buffer in self.buckets:
            if buffer.group is not None:
                dist.broadcast(buffer.values, source_of(buffer.bucket.holders), group=buffer.group)
        for buffer in self.buckets:
            buffer.spread()
            buffer.keep_own()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Have all weights here, for a checkpoint; a collective of all ranks."""
        self.settle_values()
        for passing in self._passing.values():
            passing.fetch()
        for passing in self._passing.values():
            passing.settle()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Give back the memory of all values that pass."""
        for passing in self._passing.values():
            passing.release()

    @contextlib.contextmanager
    def ministage(self, number: int, following: int | None, backward: bool) -> Iterator[None]:
        """Have the weights of a ministage here while it runs, and let those of the next one come meanwhile.

        Its gradients are on their way to their owners afterwards, those of the ministage before are there.

        Args:
            number: of the ministage.
            following: of the one that runs next; ``None``: the iteration ends.
            backward: whether it has gradients.
        """
        own = self._passing.get(number)
        for passing in (own, None if following is None else self._passing.get(following)):
            if passing is not None:
                passing.fetch()
        if own is not None:
            own.settle()
            if backward:
                own.open_gradients()
        yield
        if backward:
            for passing in self._passing.values():
                passing.close_gradients()
        if own is not None:
            if backward:
                own.start_sums()
            if following != number:
                own.release()

    # Gradients: what Megatron asks of a group of buckets

    def register_grad_ready(self, parameter: Parameter, *_: object) -> None:
        """Note that a gradient is complete, and start the sums that waited for it."""
        if not self.is_last_microbatch or parameter in self.unfinished:
            return
        for buffer in self._by_parameter[parameter]:
            buffer.waits_for.discard(parameter)
        while self._launched < len(self._staying) and not self._staying[self._launched].waits_for:
            self._launch()

    def start_grad_sync(self, *_: object) -> None:
        """Start all sums that are not under way."""
        while self._launched < len(self._staying):
            self._launch()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait for all sums; afterwards the gradients of what this rank owns are right."""
        self.start_grad_sync()
        with waiting("gradients"):
            for buffer in self._staying:
                wait_all(buffer.works)
                buffer.works = []
        for passing in self._passing.values():
            passing.close_gradients()

    def _launch(self) -> None:
        buffer = self._staying[self._launched]
        self._launched += 1
        start_sum(buffer)

    # What Megatron asks of a buffer, and of a group of buckets besides

    def reset(self) -> None:
        """Begin a batch: gradients are zero, and none is complete."""
        self._launched = 0
        self.is_last_microbatch = True
        for buffer in self._staying:
            buffer.gradients.zero_()
        for parameter, buffers in self._by_parameter.items():
            if not all(buffer.passes for buffer in buffers):
                main_grad(parameter).zero_()
            for buffer in buffers:
                buffer.waits_for.add(parameter)

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the gradients of what this rank owns."""
        for buffer in self.buckets:
            buffer.own_gradients *= factor

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Nothing to do: the optimizer hands the values out, and who reads them waits."""

    def _post_param_sync(self) -> None: ...

    def free_overlap_buffers(self) -> None:
        """Nothing to do: there are none."""


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
