"""Buckets that are on the device only while a ministage needs them: each holder keeps what it owns of them.

Before use the owners send their runs to all holders; afterwards the memory is given back. Tensors that lie in
it, such as parameters, stay what they are: only their storage comes and goes.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_hexi.runtime.bucket_buffer import BucketBuffer, main_grad, start_sum, wait_all
from megatron_hexi.runtime.waiting import waiting


class PassingBuckets:
    """The buckets of one ministage that several ranks hold.

    Args:
        buffers: the buckets, in the order of the table.
        staying: parameters whose own memory stays: they lie in buckets that stay too.
    """

    def __init__(self, buffers: Sequence[BucketBuffer], staying: Set[Parameter]) -> None:
        self.buffers = buffers
        copied = dict.fromkeys(held.parameter for buffer in buffers for held, _, _ in buffer.copied)
        apart = [parameter for parameter in copied if parameter not in staying]
        self._values = _Storages([*(buffer.values for buffer in buffers), *(one.data for one in apart)])
        self._gradients = _Storages([*(buffer.gradients for buffer in buffers), *map(main_grad, apart)])
        self._arriving: list[dist.Work | None] = []
        self._summing = False
        self._gradients.release()

    @torch.no_grad()
    def fetch(self) -> None:
        """Start to bring the values of all owners here, unless they are here or on their way."""
        if self._values.are_here:
            return
        self._values.take()
        for buffer in self.buffers:
            assert buffer.group is not None
            buffer.values[buffer.own_run] = buffer.own_values
            self._arriving += [
                dist.broadcast(buffer.values[span], owner, group=buffer.group, async_op=True)
                for owner, span in buffer.runs()
            ]

    @torch.no_grad()
    def settle(self) -> None:
        """Have the values of all owners here."""
        self.fetch()
        if self._arriving:
            with waiting("gradients"):
                wait_all(self._arriving)
            self._arriving = []
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

    def start_sums(self) -> None:
        """Start to bring the gradients to their owners."""
        for buffer in self.buffers:
            start_sum(buffer)
        self._summing = True

    @torch.no_grad()
    def close_gradients(self) -> None:
        """Keep the sums of what this rank owns, and give the memory of gradients back."""
        if not self._summing:
            return
        self._summing = False
        with waiting("gradients"):
            for buffer in self.buffers:
                wait_all(buffer.works)
                buffer.works = []
                buffer.own_gradients.copy_(buffer.gradients[buffer.own_run])
        self._gradients.release()


class _Storages:
    """The memory of some tensors, which can be given back and taken again."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        self.are_here = True

    def take(self) -> None:
        if not self.are_here:
            for tensor, size in zip(self._tensors, self._sizes, strict=True):
                tensor.untyped_storage().resize_(size)
        self.are_here = True

    def release(self) -> None:
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        self.are_here = False

    def zero(self) -> None:
        for tensor in self._tensors:
            tensor.zero_()
