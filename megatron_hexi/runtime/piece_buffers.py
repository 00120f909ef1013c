"""Reduce gradients to their owners and broadcast values to their holders, in flat buckets of weight pieces.

If the pieces of a parameter are adjacent in one bucket, the parameter's values and gradients are views of the
bucket. If other ranks hold other parts of the parameter, its pieces lie in several buckets: gradients are
copied into the buckets before the sum, and values out of the buckets after the optimizer's step.

Buckets are reduced in the order of the table, each as soon as the backward pass has computed its gradients.
After these, in the same order, follow the buckets with gradients in host memory on some holder. All ranks
keep this order, so two buckets can never wait for each other.

Updated weights are broadcast at the same point on all ranks and in the order in which the forward pass needs
them, optionally overlapped with it. Readers of weights wait for each bucket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_hexi.grouping import grouped
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
    lay_out,
    main_grad,
    send_values,
    set_main_grad,
    start_reduction,
    start_sum,
    wait_all,
)
from megatron_hexi.runtime.host_memory import HostMemory
from megatron_hexi.runtime.passing_buckets import PassingBuckets, Storages
from megatron_hexi.runtime.waiting import waiting


class ValueBroadcast:
    """The broadcasts of updated weights in buckets that each holder keeps whole, on device or host.

    Args:
        buffers: the buckets, in the order in which the backward pass completes them; equal on all ranks.
        renew: function that broadcasts the new values of a bucket into host memory.
    """

    def __init__(self, buffers: Sequence[BucketBuffer], renew: Callable[[BucketBuffer], None]) -> None:
        self._order, self._renew = buffers[::-1], renew
        #: Broadcasts in flight by bucket, in the order of their start.
        self._works: dict[int, list[dist.Work | None]] = {}

    @property
    def under_way(self) -> int:
        """Number of buckets whose broadcasts have not yet been waited for."""
        return len(self._works)

    @torch.no_grad()
    def start(self) -> None:
        """Start the broadcast of each bucket."""
        self.settle(self._order)
        for buffer in self._order:
            if not buffer.passes:
                self._works[id(buffer)] = [] if buffer.group is None else send_values(buffer)
            elif buffer.group is not None:
                with waiting("gradients"):
                    self._renew(buffer)

    @torch.no_grad()
    def settle(self, buffers: Iterable[BucketBuffer]) -> None:
        """Wait for the values of some buckets, and copy the values to the buckets' parameters."""
        for buffer in buffers:
            works = self._works.pop(id(buffer), None)
            if works is not None:
                with waiting("gradients"):
                    wait_all(works)
                buffer.spread()


#: Default device of parameters.
CPU = torch.device("cpu")


class PieceBuffers:
    """All buckets of one rank, with the methods that Megatron calls on a buffer and on a group of buckets.

    Args:
        scale_of: function that returns the factor for a parameter's gradient before the sum over holders.
        group_of: function that creates a process group; all ranks of the job call it in the same order.
        offload_of: function that returns, for a rank, the data of its stage that waits in host memory.
        gradient_dtype: type in which gradients are accumulated; ``None``: the type of the weights.
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
        #: Host memory of the rank, which counts the bytes of offloaded data.
        self.host = HostMemory(device)
        self.buckets: list[BucketBuffer] = []
        self._by_parameter: dict[Parameter, list[BucketBuffer]] = {}
        self._launched = 0
        #: Whether the current micro-batch is the last of the batch; set by Megatron.
        self.is_last_microbatch = True
        #: Parameters whose gradients a later backward pass of another part of the model completes.
        self.unfinished: frozenset[Parameter] = frozenset()
        self._by_key = grouped((box.box.key, box) for box in boxes)
        groups = [
            group_of(bucket.holders) for bucket in buckets
        ]  # by all ranks, also without a part of the bucket
        for bucket, group in zip(buckets, groups, strict=True):
            if rank in bucket.holders:
                self.buckets.append(self._lay_out(bucket, group, scale_of, gradient_dtype))
        for parameter in self._by_parameter:
            if not hasattr(parameter, "main_grad"):
                dtype = gradient_dtype or parameter.dtype
                set_main_grad(parameter, torch.zeros_like(parameter, dtype=dtype, requires_grad=False))
        self._staying = [buffer for buffer in self.buckets if not buffer.passes]
        #: Buckets whose gradients are summed after the backward pass; the other buckets need not wait for its
        #: end.
        self._last = [buffer for buffer in self.buckets if is_summed_last(buffer.bucket, offload_of)]
        late = {id(buffer) for buffer in self._last}
        self._first = [buffer for buffer in self._staying if id(buffer) not in late]
        # Buckets whose holders are in step are gathered with their ministage.
        kept_whole = [buffer for buffer in self.buckets if buffer.residence.whole]
        self._broadcast = ValueBroadcast(kept_whole, self._renew)
        by_number = grouped(
            (buffer.residence.ministage, buffer)
            for buffer in self.buckets
            if buffer.residence.ministage is not None
        )
        # A parameter that lies in several buckets has memory of its own.
        apart = {box.parameter for buffer in self._staying for box, _, _ in buffer.copied}
        # In the same order on all ranks, as each group's collectives must be.
        self._passing = {
            number: PassingBuckets(by_number[number], apart, self.host) for number in sorted(by_number)
        }

    @property
    def steps_on_host(self) -> bool:
        """Whether the optimizer's step of this rank's share is computed on the host."""
        return "optimizer" in self._offload

    def _lay_out(
        self,
        bucket: Bucket,
        group: dist.ProcessGroup | None,
        scale_of: Callable[[Parameter], float],
        gradient_dtype: torch.dtype | None,
    ) -> BucketBuffer:
        boxes = [self._box_of(piece.key, piece.cell) for piece in bucket.pieces]
        residence = bucket_residence(bucket, self.rank, self._offload)
        buffer = lay_out(bucket, residence, group, boxes, self.rank, gradient_dtype, self.host)
        for piece, start, box in zip(bucket.pieces, bucket.starts, boxes, strict=True):
            if scale_of(box.parameter) != 1.0:
                buffer.scales.append((slice(start, start + piece.size), scale_of(box.parameter)))
            self._by_parameter.setdefault(box.parameter, []).append(buffer)
        return buffer

    def _box_of(self, key: str, cell: Cell) -> HeldBox:
        return next(held for held in self._by_key[key] if cell_contains(held.box.cell, cell))

    def owned(self) -> list[tuple[BucketBuffer, Slab]]:
        """Return the slabs that this rank owns, each with its bucket."""
        return [
            (buffer, slab)
            for buffer in self.buckets
            for slab in buffer.bucket.slabs
            if slab.owner == self.rank
        ]

    def parameter_of(self, slab: Slab) -> Parameter:
        """Return the parameter of this rank that holds a slab."""
        return self._box_of(slab.key, slab.cell).parameter

    # Values

    def collect_values(self) -> None:
        """Copy the values of parameters that lie in several buckets into these buckets."""
        self.settle_values()
        for buffer in self.buckets:
            buffer.collect()

    def broadcast_values(self, waits: bool = True) -> None:
        """Broadcast each owner's values to all holders.

        Buckets of which holders keep only their shares are gathered later, for the pass of their ministage.

        Args:
            waits: whether to wait for all values; otherwise call `settle_values` before reading parameters.
        """
        self._broadcast.start()
        self.host.drain()
        if waits:
            self.settle_values()

    def settle_values(self, parameters: Iterable[Parameter] | None = None) -> None:
        """Wait for the broadcast values of some parameters; ``None``: of all parameters."""
        if not self._broadcast.under_way:
            return
        if parameters is None:
            self._broadcast.settle(self._staying)
            return
        for parameter in parameters:
            self._broadcast.settle(self._by_parameter.get(parameter, ()))

    def _renew(self, buffer: BucketBuffer) -> None:
        """Broadcast all owners' new values of a bucket through the device into host memory."""
        assert buffer.stored_values is not None
        own_run = buffer.own_run
        with Storages([buffer.values], are_here=False).taken():
            self.host.copy_back(buffer.values[own_run], buffer.stored_values[own_run]).wait()
            wait_all(send_values(buffer))
            self.host.copy_out(buffer.stored_values, buffer.values)

    def take_values_from(self, source_of: Callable[[tuple[int, ...]], int]) -> None:
        """Broadcast all values of each bucket from one holder, which `source_of` chooses, to the others."""
        self.settle_values()
        for buffer in self.buckets:
            if buffer.group is not None:
                dist.broadcast(buffer.values, source_of(buffer.bucket.holders), group=buffer.group)
        for buffer in self.buckets:
            buffer.spread()
            buffer.keep()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Give parameters all weights inside this context, for a checkpoint; a collective of all ranks."""
        self.settle_values()
        with contextlib.ExitStack() as stack:
            for passing in self._passing.values():
                stack.enter_context(passing.whole())
            yield

    def release(self) -> None:
        """Release the device memory of all weights that are gathered for a ministage's passes."""
        for passing in self._passing.values():
            passing.release()

    @contextlib.contextmanager
    def ministage_pass(self, current: MinistagePass) -> Iterator[None]:
        """Keep a ministage's weights on the device inside this context, during its pass.

        The weights of the next pass are fetched meanwhile. At the end the gradients of the pass begin to be
        reduced, and the reduction of the gradients of the pass before is complete.
        """
        buckets = self._passing.get(current.ministage)
        for number, passing in self._passing.items():
            if number not in current.weights:
                passing.release()
        for number in current.weights:  # its own first
            if number in self._passing:
                self._passing[number].fetch()
        if buckets is not None:
            buckets.settle()
            if current.is_backward:
                buckets.open_gradients()
        yield
        if current.is_backward:
            for passing in self._passing.values():
                passing.close_gradients()
            if buckets is not None:
                buckets.start_leaving()
                buckets.release()

    # Gradients: methods that Megatron calls on a group of buckets

    def register_grad_ready(self, parameter: Parameter, *_: object) -> None:
        """Note that a parameter's gradient is complete, and start the sums of buckets that waited for it."""
        if not self.is_last_microbatch or parameter in self.unfinished:
            return
        for buffer in self._by_parameter[parameter]:
            buffer.waits_for.discard(parameter)
        while self._launched < len(self._first) and not self._first[self._launched].waits_for:
            self._launch()

    def start_grad_sync(self, *_: object) -> None:
        """Start the sums of all buckets that are not in flight, except sums after the backward pass."""
        while self._launched < len(self._first):
            self._launch()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait for the sums of all buckets; the gradients of the rank's share are then complete."""
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
                if buffer.stored_gradients is not None:
                    self.host.copy_out(buffer.stored_gradients, buffer.gradients[buffer.own_run])
            self.host.drain()

    def _sum_offloaded(self, buffer: BucketBuffer) -> None:
        """Sum a bucket's gradients that are in host memory over all holders, through the device."""
        if buffer.group is None:
            return
        assert buffer.stored_gradients is not None
        own_run = buffer.own_run
        with Storages([buffer.gradients], are_here=False).taken():
            self.host.copy_back(buffer.gradients, buffer.stored_gradients).wait()
            start_reduction(buffer)
            wait_all(buffer.works)
            buffer.works = []
            self.host.copy_out(buffer.stored_gradients[own_run], buffer.gradients[own_run])

    def _launch(self) -> None:
        buffer = self._first[self._launched]
        self._launched += 1
        start_sum(buffer)

    # Further methods that Megatron calls

    def reset(self) -> None:
        """Set all gradients to zero and mark them incomplete, at the beginning of a batch."""
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
        """Multiply the gradients of the rank's share by a factor."""
        on_host = float(factor) if self._offload else factor
        for buffer in self.buckets:
            gradients = buffer.own_gradients
            gradients *= on_host if buffer.residence.gradients_on_host else factor

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Do nothing: the optimizer broadcasts values, and readers wait for them."""

    def _post_param_sync(self) -> None: ...

    def free_overlap_buffers(self) -> None:
        """Do nothing, for want of overlap buffers."""
