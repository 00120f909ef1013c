"""What the stages of a plan need at least with what saves memory: most that does not fit is not timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.hosts import Hosts
from megatron_hexi.cost.memory import Holdings, Present, part_host_memory, part_memory, part_params
from megatron_hexi.cost.sections import Section
from megatron_hexi.plan import Plan
from megatron_hexi.plan.terms import Offload, Recompute
from megatron_hexi.planner.joint import Candidate


class Rung(NamedTuple):
    """What a stage does to need less memory."""

    recompute: Recompute
    offload: tuple[Offload, ...] = ()


def fitting_stages(
    base: Candidate, ministages: int | None, rungs: Sequence[Rung], hosts: Hosts
) -> list[set[tuple[int, int]]]:
    """For each rung the replica and number of stages that it may fit; none where rows overfill the hosts.

    Counted is all but the optimizer's state and messages' buffers, and of ministages' weights what the
    sweeps of two need.

    Args:
        base: the plan.
        ministages: of each stage; ``None``: it runs whole.
        rungs: what stages may do.
        hosts: in whose memory rows wait that have no room on any rung's device.
    """
    timing, found, waiting = base.timing, [set(places_of(base.plan)) for _ in rungs], []
    for section, cost, usable in zip(timing.sections, timing.stages, timing.usable, strict=True):
        held = Holdings.of(section.arrays, section.turns(timing.micro_batches), cost.layer.flights)
        full = [_least(section, held, ministages, rung) > usable for rung in rungs]
        stages = [(replica, section.number) for replica in section.replica.tolist()]
        for own, over in zip(found, full, strict=True):
            own.difference_update(stages[unit] for unit in np.flatnonzero(over))
        on_device = [
            over for over, rung in zip(full, rungs, strict=True) if "activations" not in rung.offload
        ]
        part = replace(section.part, ministages=ministages or 0, rows_on_host=np.all(on_device, axis=0))
        waiting.append(part_host_memory(section.job, part, held, _nothing())["activations"])
    loads = hosts.loads([section.ground.gpus for section in timing.sections], waiting)
    return [set() for _ in rungs] if any(load.fullness > 1 for load in loads) else found


def places_of(plan: Plan) -> list[tuple[int, int]]:
    """Replica and number of each stage."""
    return [(r, s) for r, replica in enumerate(plan.replicas) for s in range(len(replica.stages))]


def _least(section: Section, held: Holdings, ministages: int | None, rung: Rung) -> Floats:
    """Bytes on a GPU of each unit, [U]."""
    job, layers = replace(section.job, recompute=rung.recompute), section.part.layers
    again, on_host = layers * (rung.recompute != "none"), "activations" in rung.offload
    part = replace(section.part, again=again, ministages=ministages or 0, rows_on_host=on_host)
    weights = gradients = part_params(job, part)
    if ministages is not None:  # of two that follow one another; both gradients where a third does
        own = layers // ministages * job.model.layer_params(job.tensor_parallel)
        weights, gradients = 2 * own, own * min(ministages - 1, 2)
    present = replace(_nothing(), weights=weights + np.zeros(1), gradients=gradients + np.zeros(1))
    return sum(part_memory(job, part, held, section.window, 0.0, present).values(), np.zeros(1))


def _nothing() -> Present:
    return Present(*np.zeros((len(fields(Present)), 1)))
