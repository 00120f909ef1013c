"""Buckets whose full memory is on the device only during the passes of one ministage.

Between two passes a rank keeps its share of such a bucket, and gathers the other shares before the next pass;
or it keeps the whole bucket. What it keeps is on the device or in host memory (`mesh.residence`). Tensors in
a bucket, such as parameters, stay the same objects: only their storage is released and allocated again.
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
    """The buckets whose full memory is on the device only during the passes of one ministage.

    Args:
        staying: parameters whose memory is not released, since parts of them are in buckets that stay on the
            device.
    """

    def __init__(self, buffers: Sequence[BucketBuffer], staying: Set[Parameter], host: HostMemory) -> None:
        self.buffers = buffers
        self._host = host
        copied = dict.fromkeys(box.parameter for buffer in buffers for box, _, _ in buffer.copied)
        self._apart = [parameter for parameter in copied if parameter not in staying]
        self._values = Storages([*(buffer.values for buffer in buffers), *(p.data for p in self._apart)])
        self._gradients = Storages([*(buffer.gradients for buffer in buffers), *map(main_grad, self._apart)])
        self._arriving: list[dist.Work | None] = []
        self._arrivals: list[Arrival] = []
        self._leaving = False
        self._gradients.release()

    @torch.no_grad()
    def fetch(self) -> None:
        """Start to gather the buckets' values from all owners, unless they are gathered or in flight."""
        if self._values.are_here:
            return
        self._values.take()
        for buffer in self.buffers:
            assert buffer.stored_values is not None
            target = buffer.values[buffer.stored_run]
            if not buffer.residence.weights_on_host:
                target.copy_(buffer.stored_values)
                self._arriving += send_values(buffer)
                continue
            with self._host.coming_back():
                target.copy_(buffer.stored_values, non_blocking=True)
                if not buffer.residence.whole:
                    self._arriving += send_values(buffer)
                self._arrivals.append(self._host.arrival([buffer.values]))

    @torch.no_grad()
    def settle(self) -> None:
        """Wait until the buckets' values from all owners have arrived."""
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
        """Release the device memory of the buckets' values."""
        if self._values.are_here:
            self.settle()  # what is on its way needs the memory
            self._values.release()

    def open_gradients(self) -> None:
        """Allocate device memory for the buckets' gradients, and set them to zero."""
        self._gradients.take()
        self._gradients.zero()

    def start_leaving(self) -> None:
        """Start to reduce the gradients to their owners or, if holders are not in step, to store them."""
        for buffer in self.buffers:
            if buffer.residence.whole:
                collect_gradients(buffer)
                self._keep_gradients(buffer)
            else:
                start_sum(buffer)
        self._leaving = True

    @torch.no_grad()
    def close_gradients(self) -> None:
        """Store the reduced share of the gradients, or all gradients, and release their device memory."""
        if not self._leaving:
            return
        self._leaving = False
        with waiting("gradients"):
            for buffer in self.buffers:
                if not buffer.residence.whole:
                    wait_all(buffer.works)
                    buffer.works = []
                    self._keep_gradients(buffer)
        self._gradients.release()

    def _keep_gradients(self, buffer: BucketBuffer) -> None:
        assert buffer.stored_gradients is not None
        source = buffer.gradients[buffer.stored_run]
        if buffer.residence.gradients_on_host:
            self._host.copy_out(buffer.stored_gradients, source)
        else:
            buffer.stored_gradients.copy_(source)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Give parameters all their values in this context: on the device, or in host memory if offloaded.

        Offloaded parameters are tensors in host memory within the context, and the device needs memory for
        one bucket at a time.
        """
        if not any(buffer.residence.weights_on_host for buffer in self.buffers):
            self.settle()
            try:
                yield
            finally:
                self.release()
            return
        self.release()
        before = {parameter: parameter.data for parameter in self._apart}
        for parameter in self._apart:
            parameter.data = torch.empty_like(parameter.data, device="cpu")
        for buffer in self.buffers:
            values = self._on_host(buffer)
            for parameter, span in buffer.viewed:
                before[parameter] = parameter.data
                parameter.data = values[span].view(parameter.shape)
            for box, cell, span in buffer.copied:
                part = box.view(box.parameter.data, cell)
                part.copy_(values[span].view(part.shape))
        try:
            yield
        finally:
            for parameter, values in before.items():
                parameter.data = values

    def _on_host(self, buffer: BucketBuffer) -> Tensor:
        """Return a tensor in host memory with all values of a bucket."""
        assert buffer.stored_values is not None
        if buffer.residence.whole:
            return buffer.stored_values
        with Storages([buffer.values], are_here=False).taken():
            buffer.values[buffer.stored_run] = buffer.stored_values.to(buffer.values.device)
            wait_all(send_values(buffer))
            return buffer.values.to("cpu", copy=True)


class Storages:
    """The storages of some tensors, whose memory can be released and allocated again.

    Args:
        tensors: tensors, none of which shares its storage with another.
    """

    def __init__(self, tensors: Sequence[Tensor], are_here: bool = True) -> None:
        self._tensors = list(tensors)
        self.are_here = are_here
        self._sizes = [int(tensor.nbytes) for tensor in tensors]

    def take(self) -> None:
        """Allocate memory for the tensors, with undefined contents."""
        if not self.are_here:
            for tensor, size in zip(self._tensors, self._sizes, strict=True):
                tensor.untyped_storage().resize_(size)
        self.are_here = True

    def release(self) -> None:
        """Release the memory of the tensors."""
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        self.are_here = False

    def zero(self) -> None:
        """Fill the tensors with zeros."""
        for tensor in self._tensors:
            tensor.zero_()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Give the tensors memory inside this context."""
        self.take()
        yield
        self.release()
