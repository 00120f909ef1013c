"""The least that any plan waits for gradients and weights: part of the lower bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost.compute import device_speeds, token_times
from megatron_hexi.cost.memory import GRADIENT_BYTES, stage_params
from megatron_hexi.planner.links import best_links
from megatron_hexi.planner.rates import Rates
from megatron_hexi.planner.units import Fleet

#: Rows at which a forward pass's part of token work is taken.
_ROWS = 2.0**14
#: The same of attention: backward passes count 2.5 times as many FLOPs and run no faster.
_ATTENTION_FORWARD = 1 / 3.5


@dataclass(frozen=True)
class Ring:
    """Gradients and weights going round in rings over all units, at their best.

    Args:
        seconds: both together.
        shown: what cannot hide at all.
        share: of a micro-batch's time, the most that they can hide behind.
    """

    seconds: float
    shown: float
    share: float

    def wait_s(self, micro_batch_s: float) -> float:
        """Seconds that they add to an iteration with micro-batches that long, at least."""
        return max(self.shown, self.seconds - self.share * micro_batch_s)

    def micro_batch_s(self, iteration_s: float, count: int) -> float:
        """The longest that each of `count` micro-batches may take in an iteration."""
        longest = (iteration_s - self.shown) / count
        if count > self.share:
            longest = min(longest, (iteration_s - self.seconds) / (count - self.share))
        return max(longest, 0.0)


def least_ring(fleet: Fleet, found_s: float, crosses: bool) -> Ring:
    """The least that gradients and weights take, over at least so many units as could do with `found_s`.

    They hide behind one backward and one forward pass at most.

    Args:
        fleet: the units.
        found_s: an iteration that is known to be possible.
        crosses: whether units of several sites are used.
    """
    job = fleet.job
    units = _fewest_units(fleet, found_s)
    if units < 2:
        return Ring(0.0, 0.0, 0.0)
    links = [best_links(fleet, unit, crosses) for unit in range(len(fleet.units))]
    if crosses:
        bandwidth = max(one.outside / (job.tensor_parallel if one.shared else 1) for one in links)
    else:
        bandwidth = max(one.inside for one in links)
    again = {"none": 0, "selective": 0, "full": 1}[job.recompute]
    share = 1 - (again + (0 if job.distributed_optimizer else 1)) * _forward_share(fleet)
    gradient = GRADIENT_BYTES[job.precision]
    weight = job.element_bytes if job.distributed_optimizer else gradient
    params = max(stage_params(job, stage) for stage in range(job.pipeline_parallel))
    seconds = (units - 1) / units * params * (gradient + weight) / bandwidth
    shown = seconds / job.stage_layers if job.overlap_gradients else seconds
    return Ring(seconds, shown, share if job.overlap_gradients else 0.0)


def _fewest_units(fleet: Fleet, found_s: float) -> int:
    """Units without which `found_s` would be out of reach, each of the fastest for either kind of work."""
    job, rates = fleet.job, Rates(fleet)
    token, attention = (np.cumsum(np.sort(kind)[::-1]) for kind in (rates.token, rates.attention))
    tokens_per_s = job.pipeline_parallel / (1 / token + rates.local_heads / attention)
    needed = job.global_batch_size * job.seq_length / found_s
    return min(len(token), int(np.searchsorted(tokens_per_s, needed * 0.999)) + 1)


def _forward_share(fleet: Fleet) -> float:
    """The least part of a layer's passes that a forward pass is."""
    shares = []
    passes = 1 if fleet.job.recompute == "full" else 0
    for kind in fleet.kinds:
        for device in kind.devices:
            times = token_times(device_speeds(device, fleet.job), fleet.job, np.array([_ROWS]))
            forward, backward = float(times.forward[0]), float(times.backward[0])
            shares.append(forward / (forward * (1 + passes) + backward))
    return min(*shares, _ATTENTION_FORWARD / (1 + passes * _ATTENTION_FORWARD))
