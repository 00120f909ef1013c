"""What holding a token is worth beside attending to it, so that no unit gains by doing more of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost import Job, attention_seconds, token_seconds
from megatron_hexi.cost.collectives import tensor_parallel_seconds
from megatron_hexi.cost.compute import device_speeds, token_times
from megatron_hexi.planner.fleet.links import best_links
from megatron_hexi.planner.fleet.units import Fleet

#: Where between the least and the greatest price the bound is worked out.
_BETWEEN = (0.0, 0.5, 1.0)
#: Attention on small groups is slower than at its best by about this factor.
_SLOWER = 1.1


@dataclass(frozen=True)
class Prices:
    """Prices of a token, of which one part is for holding it and the rest for its attention.

    Args:
        parts: each of them will do.
        extra: of kinds of units that gain a little all the same, by how much of what they are worth at most.
        most: of each kind, up to which part holding more tokens in place of attending to some does not pay.
    """

    parts: tuple[float, ...]
    extra: Mapping[int, float]
    most: Mapping[int, float]


def token_prices(fleet: Fleet) -> Prices:
    """The prices for units on several sites.

    A unit needs a seconds to hold a token, c to attend to one, and q to move one of its tokens' queries, keys
    and values to another site or back. A piece with a part f of its group's heads that holds T tokens and
    attends to B moves the larger of T (1 - f) and B - f T. So T falls by (c + q) / (a - f q) for each more
    of B, and grows by c / (a + (1 - f) q) for each less. With p the part of the price for holding, neither
    pays if

        a / (c + q) <= p / (1 - p) <= a / c,

    whatever f is. One p has to do for all units. Where there is none, p is the least of all a / c, and a
    unit gains (p' - p) (B - T) at most, with p' the least that would do for it.
    """
    job, least, most = fleet.job, dict[int, float](), dict[int, float]()
    reach: dict[int, float] = {}
    for number, unit in enumerate(fleet.units):
        if unit.kind in reach:
            continue
        for stage, device in enumerate(fleet.kinds[unit.kind].devices):
            speeds = device_speeds(device, job)
            links = best_links(fleet, number, True, stage)
            hold = token_seconds(speeds, job) / job.tensor_parallel
            attend = attention_seconds(speeds, job, causal=True) / job.tensor_parallel
            # What shows at least, and what moves at most.
            move, whole = (size / links.outside for size in _moved_bytes(job))
            sums = _sums_s(job, links.inside)
            # A shard of the usual size runs its matrices slower than a large one.
            sizes = job.micro_batch_size * np.array([max(1.0, job.seq_length / len(fleet.units)), 2.0**20])
            usual, best = token_times(speeds, job, sizes).forward / sizes
            slow = hold * float(usual / best) + sums
            bounds = slow / (attend + move), (hold + sums) / (_SLOWER * attend)
            least[unit.kind] = max(least.get(unit.kind, 0.0), bounds[0])
            most[unit.kind] = min(most.get(unit.kind, bounds[1]), bounds[1])
            reach[unit.kind] = max(reach.get(unit.kind, 0.0), 1 + (slow + whole) / attend)
    low, high = _part(max(least.values())), _part(min(most.values()))
    parts = {kind: _part(ratio) for kind, ratio in most.items()}
    if low <= high:
        return Prices(tuple(low + place * (high - low) for place in _BETWEEN), {}, parts)
    lows = {kind: _part(ratio) for kind, ratio in least.items()}
    extra = {kind: (part - high) * reach[kind] for kind, part in lows.items() if part > high}
    return Prices((high,), extra, parts)


def _moved_bytes(job: Job) -> tuple[float, float]:
    """Queries, keys, values and outputs of one token, all layers and passes: what shows at least, and all."""
    workload = job.workload()
    passes = 3 if job.recompute != "none" else 2
    column = passes * job.model.head_dim * job.element_bytes * job.model.layers
    heads, keys = workload.local_heads, 2 * workload.local_kv_heads
    return float(column * (heads + keys)), float(column * (2 * heads + keys))


def _sums_s(job: Job, bandwidth: float) -> float:
    """Sums inside a unit, of one token through the whole model."""
    if job.tensor_parallel == 1:
        return 0.0
    once = tensor_parallel_seconds(job, np.array([1.0]), np.array([bandwidth]), np.zeros(1))
    passes = 3 if job.recompute == "full" else 2
    return 2 * passes * job.model.layers * float(once[0])


def _part(ratio: float) -> float:
    return ratio / (1 + ratio)
