"""Where what a stage holds is, and when: one table, which the runtime carries out and the cost model adds up.

Of a stage that runs in ministages, three things are not in use all the time: the weights and gradients of
ministages that do not run, the optimizer's state between two steps, and the rows that entered a ministage
until its backward pass. Each waits on the device, or as the plan's `offload` says in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megatron_hexi.mesh.shares import Bucket
from megatron_hexi.plan.terms import Offload

#: Micro-batches whose rows are on the device where the others' wait in host memory: of the one that runs, and
#: of the one that is on its way.
ROWS_ON_DEVICE = 2


@dataclass(frozen=True)
class Sweep:
    """All micro-batches through one ministage, one after the other.

    Args:
        ministage: its number.
        way: `forward`, keeping the rows that enter; `backward`, running it again from these; or `turn`: each
            micro-batch forward and at once backward, at the loss.
        weights: ministages whose weights are whole on the device, where they come and go: its own, and
            those of the next sweep, which come meanwhile.
        gradients: ministages whose gradients are: its own, and those of the sweep before, which are leaving.
    """

    ministage: int
    way: Literal["forward", "backward", "turn"]
    weights: tuple[int, ...]
    gradients: tuple[int, ...]

    @property
    def is_backward(self) -> bool:
        """Whether it gives gradients."""
        return self.way != "forward"


@lru_cache(maxsize=64)
def sweeps(ministages: int, gives_loss: bool, forward_only: bool = False) -> tuple[Sweep, ...]:
    """What a stage does in an iteration, in order.

    Args:
        ministages: in how many parts it runs.
        gives_loss: whether it is the last stage of its replica.
        forward_only: whether it is an evaluation.
    """
    numbers = range(ministages)
    ways: list[tuple[int, Literal["forward", "backward", "turn"]]] = [(n, "forward") for n in numbers]
    if not forward_only:
        *others, last = numbers
        if gives_loss:
            ways[last] = last, "turn"
        else:
            ways.append((last, "backward"))
        ways += [(number, "backward") for number in reversed(others)]
    made: list[Sweep] = []
    for place, (number, way) in enumerate(ways):
        following = ways[place + 1 : place + 2]
        weights = dict.fromkeys((number, *(other for other, _ in following)))
        leaving = made[-1].ministage if made and made[-1].is_backward else number
        gradients = () if way == "forward" else tuple(dict.fromkeys((number, leaving)))
        made.append(Sweep(number, way, tuple(weights), gradients))
    return tuple(made)


@dataclass(frozen=True)
class Keeping:
    """How one rank keeps a bucket.

    Args:
        ministage: the sweeps in which it is whole on the device; ``None``: in all.
        whole: whether the rank keeps all of it between these, or its own share only, which the other holders
            complete before each sweep.
        weights_on_host: whether what it keeps of the weights waits in host memory.
        gradients_on_host: whether what it keeps of the gradients does. A bucket that is always on the device
            has a copy there of what the rank owns, for the optimizer's step.
        state_on_host: whether the fp32 weights and the optimizer's state of what the rank owns do.
    """

    ministage: int | None
    whole: bool
    weights_on_host: bool
    gradients_on_host: bool
    state_on_host: bool

    @property
    def passes(self) -> bool:
        """Whether it is on the device in some sweeps only."""
        return self.ministage is not None


def keeping(bucket: Bucket, rank: int, offload: Collection[Offload]) -> Keeping:
    """How a rank keeps a bucket that it holds.

    Holders that all use it in one and the same ministage run in step, so each keeps a share and they complete
    one another. Others do not: there a rank needs all of it, on the device or in host memory.

    Args:
        bucket: its table.
        rank: one of its holders.
        offload: what the plan offloads of its stage.
    """
    ministage = bucket.ministage_of(rank)
    on_host, stepped_on_host = "parameters" in offload, "optimizer" in offload
    if ministage is None or not (bucket.in_step or on_host):
        return Keeping(None, True, False, stepped_on_host, stepped_on_host)
    return Keeping(ministage, not bucket.in_step, on_host, stepped_on_host, stepped_on_host)


def is_summed_last(bucket: Bucket, offload_of: Callable[[int], Collection[Offload]]) -> bool:
    """Whether the gradients of a bucket are summed after those that stay on the device.

    A holder whose gradients wait in host memory sums them when the backward pass is done. All other holders
    wait for it, also those that have them on the device: so any two buckets are summed in the same order by
    all ranks that hold both.

    Args:
        bucket: its table.
        offload_of: what the plan offloads of the stage of a rank.
    """
    kept = (keeping(bucket, rank, offload_of(rank)) for rank in bucket.holders)
    return any(one.passes and one.whole for one in kept)
