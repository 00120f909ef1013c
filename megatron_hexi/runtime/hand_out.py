"""New values on their way from the ranks that own them to all that hold them, behind the forward pass or not.

All ranks start the broadcasts at one point and in one order, that in which the forward pass needs them; so
none can wait for another. Each bucket is waited for when something reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from megatron_hexi.runtime.bucket_buffer import BucketBuffer, send_values, wait_all
from megatron_hexi.runtime.waiting import waiting


class HandOut:
    """The values of buckets that each holder keeps whole, on the device or in host memory.

    Args:
        buffers: the buckets, in the order in which the backward pass completes them, the same on all ranks.
        renew: has the new values of one that waits in host memory.
    """

    def __init__(self, buffers: Sequence[BucketBuffer], renew: Callable[[BucketBuffer], None]) -> None:
        self._order, self._renew = buffers[::-1], renew
        #: By bucket that is not waited for yet, in the order of their start.
        self._works: dict[int, list[dist.Work | None]] = {}

    @property
    def under_way(self) -> int:
        """Buckets that have not been waited for."""
        return len(self._works)

    @torch.no_grad()
    def start(self) -> None:
        """Send what this rank owns of each bucket, and take what others own."""
        self.settle(self._order)
        for buffer in self._order:
            if not buffer.passes:
                self._works[id(buffer)] = [] if buffer.group is None else send_values(buffer)
            elif buffer.group is not None:
                with waiting("gradients"):
                    self._renew(buffer)

    @torch.no_grad()
    def settle(self, buffers: Iterable[BucketBuffer]) -> None:
        """Have the values of some buckets in all parameters that lie in them."""
        for buffer in buffers:
            works = self._works.pop(id(buffer), None)
            if works is not None:
                with waiting("gradients"):
                    wait_all(works)
                buffer.spread()
