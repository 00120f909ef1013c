"""Broadcast updated weights from owners to holders, optionally overlapped with the next forward pass.

All ranks start the broadcasts at the same point and in the order in which the forward pass needs the weights,
so that broadcasts cannot block each other. Readers of weights wait for each bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from megatron_hexi.runtime.bucket_buffer import BucketBuffer, send_values, wait_all
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
