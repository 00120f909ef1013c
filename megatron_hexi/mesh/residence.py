"""When a stage's weights, gradients and optimizer state are on the device, and when in host memory.

The runtime and the cost model both use this module. A stage that runs in ministages uses three kinds of data
only at times: weights and gradients while their ministage runs, the optimizer's state in the optimizer's
step, and the input rows of a ministage in the ministage's backward pass. At other times the data stay on the
device, or in host memory if the plan's `offload` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from megatron_hexi.mesh.shares import Bucket
from megatron_hexi.plan.terms import Offload

#: Number of micro-batches whose input rows are on the device while activations are offloaded: the micro-batch
#: that runs, and the micro-batch whose rows are being copied.
ROWS_ON_DEVICE = 2


@dataclass(frozen=True)
class Residence:
    """The memory, device or host, in which one rank keeps a bucket of weights over an iteration.

    Args:
        ministage: number of the ministage during whose passes the whole bucket is on the device; ``None``:
            the whole bucket is on the device during all passes.
        whole: whether the rank keeps the whole bucket between these passes. Otherwise it keeps its share of
            the bucket, and gathers the other shares before each pass.
        weights_on_host: whether the rank keeps the bucket's weights in host memory between these passes.
        gradients_on_host: whether gradients are kept in host memory between these passes. For a bucket that
            is always on the device: whether the gradients that the rank owns are copied to host memory for
            the optimizer's step.
        state_on_host: whether fp32 weights and optimizer state of the rank's share are in host memory.
    """

    ministage: int | None
    whole: bool
    weights_on_host: bool
    gradients_on_host: bool
    state_on_host: bool

    @property
    def passes(self) -> bool:
        """Whether the whole bucket is on the device only during the passes of one ministage."""
        return self.ministage is not None


def bucket_residence(bucket: Bucket, rank: int, offload: Collection[Offload]) -> Residence:
    """Return the memory in which one holder keeps a bucket over an iteration.

    If all holders use the bucket in the same ministage, they run in step: each keeps its share, and all
    gather the bucket before each pass. Otherwise each holder keeps the whole bucket, on the device or in host
    memory.

    Args:
        offload: data of the rank's stage that the plan offloads.
    """
    ministage = bucket.ministage_of(rank)
    on_host, stepped_on_host = "parameters" in offload, "optimizer" in offload
    if ministage is None or not (bucket.in_step or on_host):
        return Residence(None, True, False, stepped_on_host, stepped_on_host)
    return Residence(ministage, not bucket.in_step, on_host, stepped_on_host, stepped_on_host)


def is_summed_last(bucket: Bucket, offload_of: Callable[[int], Collection[Offload]]) -> bool:
    """Whether a bucket's gradients are summed after the gradients of buckets that stay on the device.

    A holder with the gradients in host memory sums them after the backward pass. All other holders of the
    bucket do the same, even with the gradients on the device, so that ranks with several common buckets sum
    these in the same order.

    Args:
        offload_of: a function that returns, for a rank, the data of its stage that the plan offloads.
    """
    residences = (bucket_residence(bucket, rank, offload_of(rank)) for rank in bucket.holders)
    return any(residence.passes and residence.whole for residence in residences)
