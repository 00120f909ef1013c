"""The place of a stage's data over time, device or host memory: for the runtime and for the cost model.

A stage that runs in ministages uses three kinds of data only at times: weights and gradients while their
ministage runs, the optimizer's state in its step, and the rows that entered a ministage in its backward pass.
In between they stay on the device, or in host memory where the plan's `offload` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megatron_hexi.mesh.shares import Bucket
from megatron_hexi.plan.terms import Offload

#: Micro-batches whose rows are on the device where activations are offloaded: the one that runs, and the one
#: whose rows are being copied.
ROWS_ON_DEVICE = 2


@dataclass(frozen=True)
class MinistagePass:
    """All micro-batches through one ministage, one after the other.

    Args:
        ministage: number of the ministage.
        way: `forward`, which keeps the rows that enter; `backward`, which recomputes the ministage from
            these; or `turn` at the loss: each micro-batch forward and backward at once.
        weights: ministages whose weights are whole on the device, where they do not stay: its own, and those
            of the next pass, which are being fetched.
        gradients: ministages whose gradients are on the device: its own, and those of the pass before, which
            are being reduced.
    """

    ministage: int
    way: Literal["forward", "backward", "turn"]
    weights: tuple[int, ...]
    gradients: tuple[int, ...]

    @property
    def is_backward(self) -> bool:
        """Whether it computes gradients."""
        return self.way != "forward"


@lru_cache(maxsize=64)
def ministage_passes(
    ministages: int, gives_loss: bool, forward_only: bool = False
) -> tuple[MinistagePass, ...]:
    """Return the passes of a stage in an iteration, in order.

    Args:
        ministages: number of ministages of the stage.
        gives_loss: whether it is the last stage of its replica.
        forward_only: whether it is an evaluation.
    """
    numbers = range(ministages)
    ways: list[tuple[int, Literal["forward", "backward", "turn"]]] = [(n, "forward") for n in numbers]
    if not forward_only:
        *before, last = numbers
        if gives_loss:
            ways[last] = last, "turn"
        else:
            ways.append((last, "backward"))
        ways += [(number, "backward") for number in reversed(before)]
    passes: list[MinistagePass] = []
    for place, (number, way) in enumerate(ways):
        following = ways[place + 1 : place + 2]
        weights = dict.fromkeys((number, *(next_number for next_number, _ in following)))
        leaving = passes[-1].ministage if passes and passes[-1].is_backward else number
        gradients = () if way == "forward" else tuple(dict.fromkeys((number, leaving)))
        passes.append(MinistagePass(number, way, tuple(weights), gradients))
    return tuple(passes)


@dataclass(frozen=True)
class Residence:
    """The place of a bucket on one rank over an iteration.

    Args:
        ministage: the ministage in whose passes it is whole on the device; ``None``: in all passes.
        whole: whether the rank keeps all of it between these passes, or only its share, which the other
            holders complete before each pass.
        weights_on_host: whether the weights that it keeps are in host memory between these passes.
        gradients_on_host: likewise of gradients. A bucket that is always on the device has a copy in host
            memory of the gradients that the rank owns, for the optimizer's step.
        state_on_host: whether the fp32 weights and the optimizer's state of the rank's share are in host
            memory.
    """

    ministage: int | None
    whole: bool
    weights_on_host: bool
    gradients_on_host: bool
    state_on_host: bool

    @property
    def passes(self) -> bool:
        """Whether it is on the device only in the passes of a ministage."""
        return self.ministage is not None


def bucket_residence(bucket: Bucket, rank: int, offload: Collection[Offload]) -> Residence:
    """Return the place of a bucket on one of its holders.

    Holders that all use it in the same ministage run in step, so each keeps a share, and they gather it
    before each pass. Otherwise a rank keeps all of it, on the device or in host memory.

    Args:
        bucket: the bucket.
        rank: a holder of the bucket.
        offload: data of the rank's stage that the plan offloads.
    """
    ministage = bucket.ministage_of(rank)
    on_host, stepped_on_host = "parameters" in offload, "optimizer" in offload
    if ministage is None or not (bucket.in_step or on_host):
        return Residence(None, True, False, stepped_on_host, stepped_on_host)
    return Residence(ministage, not bucket.in_step, on_host, stepped_on_host, stepped_on_host)


def is_summed_last(bucket: Bucket, offload_of: Callable[[int], Collection[Offload]]) -> bool:
    """Whether a bucket's gradients are summed after those of buckets that stay on the device.

    A holder whose gradients are in host memory sums them after the backward pass. All other holders of the
    bucket do the same, also those that have them on the device: so all ranks that hold two buckets sum them
    in one order.

    Args:
        bucket: the bucket.
        offload_of: data of a rank's stage that the plan offloads.
    """
    residences = (bucket_residence(bucket, rank, offload_of(rank)) for rank in bucket.holders)
    return any(residence.passes and residence.whole for residence in residences)
