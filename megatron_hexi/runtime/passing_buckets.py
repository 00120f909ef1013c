"""Buckets that are on the device only while a ministage needs them; what a rank keeps waits elsewhere.

Between two uses a rank keeps its own share, which the owners complete before the next use, or all of it;
on the device or in host memory (`mesh.residence`). Tensors that lie in a bucket, such as parameters, stay
what they are: only their storage comes and goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_hexi.runtime.bucket_buffer import (
    BucketBuffer,
    collect_gradients,
    main_grad,
    send_values,
    start_sum,
    wait_all,
)
from megatron_hexi.runtime.host_memory import Arrival, HostMemory
from megatron_hexi.runtime.waiting import waiting


class PassingBuckets:
    """The buckets of one ministage that come and go.

    Args:
        buffers: the buckets, in the order of the table.
        staying: parameters whose own memory stays: they lie in buckets that stay too.
        host: the rank's host memory.
    """

    def __init__(self, buffers: Sequence[BucketBuffer], staying: Set[Parameter], host: HostMemory) -> None:
        self.buffers = buffers
        self._host = host
        copied = dict.fromkeys(held.parameter for buffer in buffers for held, _, _ in buffer.copied)
        self._apart = [parameter for parameter in copied if parameter not in staying]
        self._values = Storages([*(buffer.values for buffer in buffers), *(one.data for one in self._apart)])
        self._gradients = Storages([*(buffer.gradients for buffer in buffers), *map(main_grad, self._apart)])
        self._arriving: list[dist.Work | None] = []
        self._arrivals: list[Arrival] = []
        self._leaving = False
        self._gradients.release()

    @torch.no_grad()
    def fetch(self) -> None:
        """Start to bring the values here, of all owners, unless they are here or on their way."""
        if self._values.are_here:
            return
        self._values.take()
        for buffer in self.buffers:
            assert buffer.rest_values is not None
            target = buffer.values[buffer.rest_run]
            if not buffer.kept.weights_on_host:
                target.copy_(buffer.rest_values)
                self._arriving += send_values(buffer)
                continue
            with self._host.coming_back():
                target.copy_(buffer.rest_values, non_blocking=True)
                if not buffer.kept.whole:
                    self._arriving += send_values(buffer)
                self._arrivals.append(self._host.arrival([buffer.values]))

    @torch.no_grad()
    def settle(self) -> None:
        """Have the values of all owners here."""
        self.fetch()
        if not (self._arriving or self._arrivals):
            return
        with waiting("gradients"):
            for arrival in self._arrivals:
                arrival.wait()
            wait_all(self._arriving)
        self._arriving, self._arrivals = [], []
        for buffer in self.buffers:
            buffer.spread()

    def release(self) -> None:
        """Give the memory of values back."""
        if self._values.are_here:
            self.settle()  # what is on its way needs the memory
            self._values.release()

    def open_gradients(self) -> None:
        """Begin to add up gradients: they are zero."""
        self._gradients.take()
        self._gradients.zero()

    def start_leaving(self) -> None:
        """Start to bring the gradients to their owners, or where others are not in step, out of the way."""
        for buffer in self.buffers:
            if buffer.kept.whole:
                collect_gradients(buffer)
                self._keep_gradients(buffer)
            else:
                start_sum(buffer)
        self._leaving = True

    @torch.no_grad()
    def close_gradients(self) -> None:
        """Keep the sums of what this rank owns, or its part of all, and give the memory of gradients back."""
        if not self._leaving:
            return
        self._leaving = False
        with waiting("gradients"):
            for buffer in self.buffers:
                if not buffer.kept.whole:
                    wait_all(buffer.works)
                    buffer.works = []
                    self._keep_gradients(buffer)
        self._gradients.release()

    def _keep_gradients(self, buffer: BucketBuffer) -> None:
        assert buffer.rest_gradients is not None
        source = buffer.gradients[buffer.rest_run]
        if buffer.kept.gradients_on_host:
            self._host.copy_out(buffer.rest_gradients, source)
        else:
            buffer.rest_gradients.copy_(source)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Have all values where parameters look for them: on the device, or what is offloaded on the host.

        There its parameters are tensors in host memory meanwhile, and the device needs one bucket at a time.
        """
        if not any(buffer.kept.weights_on_host for buffer in self.buffers):
            self.settle()
            try:
                yield
            finally:
                self.release()
            return
        self.release()
        before = {one: one.data for one in self._apart}
        for parameter in self._apart:
            parameter.data = torch.empty_like(parameter.data, device="cpu")
        for buffer in self.buffers:
            values = self._on_host(buffer)
            for parameter, span in buffer.viewed:
                before[parameter] = parameter.data
                parameter.data = values[span].view(parameter.shape)
            for held, cell, span in buffer.copied:
                part = held.view(held.parameter.data, cell)
                part.copy_(values[span].view(part.shape))
        try:
            yield
        finally:
            for parameter, values in before.items():
                parameter.data = values

    def _on_host(self, buffer: BucketBuffer) -> Tensor:
        """All values of a bucket in host memory."""
        assert buffer.rest_values is not None
        if buffer.kept.whole:
            return buffer.rest_values
        with Storages([buffer.values], are_here=False).taken():
            buffer.values[buffer.rest_run] = buffer.rest_values.to(buffer.values.device)
            wait_all(send_values(buffer))
            return buffer.values.to("cpu", copy=True)


class Storages:
    """The memory of some tensors, which can be given back and taken again.

    Args:
        tensors: each with a storage of its own.
        are_here: whether they have their memory.
        sizes: of the storages, bytes, where they do not.
    """

    def __init__(self, tensors: Sequence[Tensor], are_here: bool = True) -> None:
        self._tensors = list(tensors)
        self.are_here = are_here
        self._sizes = [int(tensor.nbytes) for tensor in tensors]

    def take(self) -> None:
        """Take the memory, undefined."""
        if not self.are_here:
            for tensor, size in zip(self._tensors, self._sizes, strict=True):
                tensor.untyped_storage().resize_(size)
        self.are_here = True

    def release(self) -> None:
        """Give the memory back."""
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        self.are_here = False

    def zero(self) -> None:
        """Fill it with zeros."""
        for tensor in self._tensors:
            tensor.zero_()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Have the memory for a while."""
        self.take()
        yield
        self.release()
