"""Weights and gradients in flat buckets of pieces: summed over holders, owned by shares, handed out again.

Where the pieces of a parameter follow each other in one bucket, its values and gradients are views of it.
Where other ranks hold other parts of it, it lies in several places: gradients are copied in before the sum,
values out after the step.

Buckets are reduced as soon as the backward pass has their gradients, in the order of the table; behind these,
in the same order, those of which a holder has the gradients in host memory. All ranks keep that order, so two
buckets can never wait for each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_hexi.mesh import (
    Bucket,
    Cell,
    MinistagePass,
    Slab,
    bucket_residence,
    cell_contains,
    is_summed_last,
)
from megatron_hexi.plan.terms import Offload
from megatron_hexi.runtime.bucket_buffer import (
    BucketBuffer,
    HeldBox,
    main_grad,
    send_values,
    set_main_grad,
    start_reduction,
    start_sum,
    wait_all,
)
from megatron_hexi.runtime.bucket_layout import lay_out
from megatron_hexi.runtime.hand_out import HandOut
from megatron_hexi.runtime.host_memory import HostMemory
from megatron_hexi.runtime.passing_buckets import PassingBuckets, Storages
from megatron_hexi.runtime.waiting import waiting

#: The device of parameters, unless it is said.
CPU = torch.device("cpu")


class PieceBuffers:
    """All buckets of one rank, with what Megatron asks of a buffer and of a group of buckets.

    Args:
        buckets: those of all ranks, in the order of the table.
        boxes: what this rank's parameters hold.
        scale_of: factor of a parameter's gradient before it is summed over holders.
        rank: this rank.
        group_of: makes a process group of some ranks; called in the same order by all ranks of the job.
        gradient_dtype: in which gradients are added up; ``None``: that of the weights.
        offload_of: what waits in host memory of the stage of a rank.
        device: of the parameters.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        boxes: Sequence[HeldBox],
        scale_of: Callable[[Parameter], float],
        rank: int,
        group_of: Callable[[tuple[int, ...]], dist.ProcessGroup | None],
        gradient_dtype: torch.dtype | None,
        offload_of: Callable[[int], Collection[Offload]] = lambda rank: (),
        device: torch.device = CPU,
    ) -> None:
        self.rank = rank
        self._offload = offload_of(rank)
        #: What waits there is counted by it.
        self.host = HostMemory(device)
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
        #: Those that are summed when the backward pass is done, and those that need not wait for it.
        self._last = [buffer for buffer in self.buckets if is_summed_last(buffer.bucket, offload_of)]
        last = {id(buffer) for buffer in self._last}
        self._first = [buffer for buffer in self._staying if id(buffer) not in last]
        # Those whose holders are in step come with their ministage.
        kept_whole = [buffer for buffer in self.buckets if buffer.kept.whole]
        self._hand_out = HandOut(kept_whole, self._renew)
        by_number: dict[int, list[BucketBuffer]] = {}
        for buffer in self.buckets:
            if buffer.kept.ministage is not None:
                by_number.setdefault(buffer.kept.ministage, []).append(buffer)
        # A parameter that lies in several buckets has memory of its own.
        apart = {held.parameter for buffer in self._staying for held, _, _ in buffer.copied}
        # In the same order on all ranks, as each group's collectives must be.
        self._passing = {
            number: PassingBuckets(by_number[number], apart, self.host) for number in sorted(by_number)
        }

    @property
    def steps_on_host(self) -> bool:
        """Whether what this rank owns is stepped in host memory."""
        return "optimizer" in self._offload

    def _lay_out(
        self,
        bucket: Bucket,
        group: dist.ProcessGroup | None,
        scale_of: Callable[[Parameter], float],
        gradient_dtype: torch.dtype | None,
    ) -> BucketBuffer:
        held = [self._holding(piece.key, piece.cell) for piece in bucket.pieces]
        kept = bucket_residence(bucket, self.rank, self._offload)
        buffer = lay_out(bucket, kept, group, held, self.rank, gradient_dtype, self.host)
        for piece, start, one in zip(bucket.pieces, bucket.starts, held, strict=True):
            if scale_of(one.parameter) != 1.0:
                buffer.scales.append((slice(start, start + piece.size), scale_of(one.parameter)))
            self._by_parameter.setdefault(one.parameter, []).append(buffer)
        return buffer

    def _holding(self, key: str, cell: Cell) -> HeldBox:
        return next(one for one in self._by_key[key] if cell_contains(one.box.cell, cell))

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
        return self._holding(slab.key, slab.cell).parameter

    # Values

    def collect_values(self) -> None:
        """Copy the values of parameters that lie in several buckets into these."""
        self.settle_values()
        for buffer in self.buckets:
            buffer.collect()

    def hand_out_values(self, waits: bool = True) -> None:
        """Give all holders the values of what this rank owns, and take theirs.

        What holders keep in shares comes later, with its ministage.

        Args:
            waits: until all are here; else `settle_values` waits for those of some parameters.
        """
        self._hand_out.start()
        self.host.drain()
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

    def _renew(self, buffer: BucketBuffer) -> None:
        """Have the new values of all owners in host memory, by way of the device."""
        assert buffer.rest_values is not None
        own = buffer.own_run
        with Storages([buffer.values], are_here=False).taken():
            self.host.copy_back(buffer.values[own], buffer.rest_values[own]).wait()
            wait_all(send_values(buffer))
            self.host.copy_out(buffer.rest_values, buffer.values)

    def take_values_from(self, source_of: Callable[[tuple[int, ...]], int]) -> None:
        """Give all holders of each bucket the values that one of them has."""
        self.settle_values()
        for buffer in self.buckets:
            if buffer.group is not None:
                dist.broadcast(buffer.values, source_of(buffer.bucket.holders), group=buffer.group)
        for buffer in self.buckets:
            buffer.spread()
            buffer.keep()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Have all weights where parameters look for them, for a checkpoint; a collective of all ranks."""
        self.settle_values()
        with contextlib.ExitStack() as stack:
            for passing in self._passing.values():
                stack.enter_context(passing.whole())
            yield

    def release(self) -> None:
        """Give back the memory of all values that pass."""
        for passing in self._passing.values():
            passing.release()

    @contextlib.contextmanager
    def sweep(self, sweep: MinistagePass) -> Iterator[None]:
        """Have the weights of a ministage here while it runs, and let those of the next one come meanwhile.

        Its gradients are on their way to their owners afterwards, those of the ministage before are there.
        """
        own = self._passing.get(sweep.ministage)
        for number, passing in self._passing.items():
            if number not in sweep.weights:
                passing.release()
        for number in sweep.weights:  # its own first
            if number in self._passing:
                self._passing[number].fetch()
        if own is not None:
            own.settle()
            if sweep.is_backward:
                own.open_gradients()
        yield
        if sweep.is_backward:
            for passing in self._passing.values():
                passing.close_gradients()
            if own is not None:
                own.start_leaving()
                own.release()

    # Gradients: what Megatron asks of a group of buckets

    def register_grad_ready(self, parameter: Parameter, *_: object) -> None:
        """Note that a gradient is complete, and start the sums that waited for it."""
        if not self.is_last_microbatch or parameter in self.unfinished:
            return
        for buffer in self._by_parameter[parameter]:
            buffer.waits_for.discard(parameter)
        while self._launched < len(self._first) and not self._first[self._launched].waits_for:
            self._launch()

    def start_grad_sync(self, *_: object) -> None:
        """Start all sums that are not under way, but for the last ones."""
        while self._launched < len(self._first):
            self._launch()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait for all sums; afterwards the gradients of what this rank owns are right."""
        self.start_grad_sync()
        for passing in self._passing.values():
            passing.close_gradients()
        with waiting("gradients"):
            for buffer in self._last:
                if buffer.passes:
                    self._sum_offloaded(buffer)
                else:
                    start_sum(buffer)
            for buffer in self._staying:
                wait_all(buffer.works)
                buffer.works = []
                if buffer.rest_gradients is not None:
                    self.host.copy_out(buffer.rest_gradients, buffer.gradients[buffer.own_run])
            self.host.drain()

    def _sum_offloaded(self, buffer: BucketBuffer) -> None:
        """Sum gradients that wait in host memory over all holders, by way of the device."""
        if buffer.group is None:
            return
        assert buffer.rest_gradients is not None
        own = buffer.own_run
        with Storages([buffer.gradients], are_here=False).taken():
            self.host.copy_back(buffer.gradients, buffer.rest_gradients).wait()
            start_reduction(buffer)
            wait_all(buffer.works)
            buffer.works = []
            self.host.copy_out(buffer.rest_gradients[own], buffer.gradients[own])

    def _launch(self) -> None:
        buffer = self._first[self._launched]
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
        on_host = float(factor) if self._offload else factor
        for buffer in self.buckets:
            gradients = buffer.own_gradients
            gradients *= on_host if buffer.kept.gradients_on_host else factor

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Nothing to do: the optimizer hands the values out, and who reads them waits."""

    def _post_param_sync(self) -> None: ...

    def free_overlap_buffers(self) -> None:
        """Nothing to do: there are none."""
