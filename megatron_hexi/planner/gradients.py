"""The least that any plan waits for gradients and weights: part of the lower bound."""

from __future__ import annotations

import numpy as np

from megatron_hexi.cost.compute import device_speeds, token_times
from megatron_hexi.cost.memory import GRADIENT_BYTES, stage_params
from megatron_hexi.planner.links import best_links
from megatron_hexi.planner.units import Fleet

#: Rows at which a forward pass's part of token work is taken.
_ROWS = 2.0**14
#: The same of attention: backward passes count 2.5 times as many FLOPs and run no faster.
_ATTENTION_FORWARD = 1 / 3.5


def least_wait_s(fleet: Fleet, layers_s: float, found_s: float, crosses: bool) -> float:
    """Seconds that gradients and weights add at least.

    They go round in rings over all units in use: at least so many as could do the iteration in `found_s`.
    They hide behind one backward and one forward pass at most.

    Args:
        fleet: the units.
        layers_s: what these two take at most, with what recomputation repeats between them.
        found_s: an iteration that is known to be possible.
        crosses: whether units of several sites are used.
    """
    job = fleet.job
    units = _fewest_units(fleet, found_s)
    links = [best_links(fleet, unit, crosses) for unit in range(len(fleet.units))]
    if crosses:
        bandwidth = max(one.outside / (job.tensor_parallel if one.shared else 1) for one in links)
    else:
        bandwidth = max(one.inside for one in links)
    if units < 2:
        return 0.0
    again = {"none": 0, "selective": 0, "full": 1}[job.recompute]
    hidden = layers_s * (1 - (again + (0 if job.distributed_optimizer else 1)) * _forward_share(fleet))
    waits = []
    for stage in range(job.pipeline_parallel):
        params = stage_params(job, stage)
        weights = (
            params * job.element_bytes
            if job.distributed_optimizer
            else params * GRADIENT_BYTES[job.precision]
        )
        size = params * GRADIENT_BYTES[job.precision] + weights
        ring = (units - 1) / units * size / bandwidth
        shown = ring / job.stage_layers if job.overlap_gradients else ring
        waits.append(max(shown, ring - hidden))
    return max(waits)


def _fewest_units(fleet: Fleet, found_s: float) -> int:
    """Units without which `found_s` would be out of reach."""
    job = fleet.job
    needed = job.global_batch_size * job.seq_length / found_s
    speeds = sorted((fleet.kinds[unit.kind].tokens_per_s for unit in fleet.units), reverse=True)
    return min(len(speeds), int(np.searchsorted(np.cumsum(speeds), needed * 0.999)) + 1)


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
