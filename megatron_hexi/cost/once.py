"""Costs that occur once an iteration: collectives of gradients and weights, and the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from megatron_hexi.cost.arrays import Bools, Floats
from megatron_hexi.cost.compute import optimizer_seconds
from megatron_hexi.cost.experts import ExpertsOnRanks
from megatron_hexi.cost.hosts import Hosts
from megatron_hexi.cost.memory import fp8_params, part_params
from megatron_hexi.cost.model_part import Present
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.reductions import Reductions
from megatron_hexi.cost.sections import Section
from megatron_hexi.cost.stage import StageCost, free_network
from megatron_hexi.mesh import Way
from megatron_hexi.models.job import Job

#: What each stage does once an iteration, as phases by replica and stage.
Once = Mapping[tuple[int, int], Phases]


def once_an_iteration(
    job: Job,
    sections: Sequence[Section],
    costs: Sequence[StageCost],
    reductions: Reductions,
    optimizer: Sequence[Floats],
) -> Once:
    """Return each stage's exposed collectives, of its slowest domain, and the step of its slowest unit.

    Args:
        optimizer: seconds of the optimizer's step of each unit of a section, [U].
    """
    found: dict[tuple[int, int], Phases] = {}
    for number, (section, cost, steps) in enumerate(zip(sections, costs, optimizer, strict=True)):
        layers = section.by_domain(section.parts.layers)
        for domain, replica in enumerate(section.replicas.tolist()):
            units = section.arrays.unit_replica == domain
            turns = ((float(turn.seconds[number][domain]), turn.hides_behind) for turn in reductions.turns)
            cover = partial(_cover, cost, units, domain)
            wait = exposed_seconds(turns, layers[domain], cover, job.virtual_stages, job.pipeline_parallel)
            stage = replica, section.number
            before = found.get(stage, Phases())
            found[stage] = Phases(
                gradients=max(before.gradients, float(wait)),
                optimizer=max(before.optimizer, float(steps[units].max())),
            )
    return found


def iteration_phases(replicas: Sequence[Phases], once: Once, spread: float) -> Phases:
    """Return the phases of an iteration: those of the slowest replica, and the slowest optimizer step.

    Args:
        replicas: phases of each replica's passes.
    """
    waits, step = replica_waits(once, len(replicas)), max((one.optimizer for one in once.values()), default=0)
    whole = (phases + Phases(gradients=wait) for phases, wait in zip(replicas, waits, strict=True))
    slowest = max(whole, key=lambda phases: phases.total)
    return (slowest + Phases(optimizer=step)).spread_by(spread)


def replica_waits(once: Once, replicas: int) -> list[float]:
    """Return the exposed seconds of collectives in the slowest stage of each replica."""
    waits = [0.0] * replicas
    for (replica, _), phases in once.items():
        waits[replica] = max(waits[replica], phases.gradients)
    return waits


def exposed_seconds(
    collectives: Iterable[tuple[Floats | float, Way | None]],
    layers: int,
    cover: Callable[[Way], Floats | float],
    chunks: int = 1,
    depth: int = 1,
) -> Floats | float:
    """Return the exposed seconds of a stage's collectives, for each the largest of three.

        t / L                                    the last layer's gradients, or the first one's weights
        t / V - L / V x cover                    the last chunk's, behind its last micro-batch
        t - (1 + (V - 1) p) x L / V x cover      all, behind p passes of each chunk after the first

    Gradients may travel behind backward passes and weights behind forward passes, in the time that attention
    leaves the network free. Megatron reduces each chunk when its last micro-batch has passed
    (schedules.py, `is_last_microbatch_for_model_chunk`).

    Args:
        collectives: seconds of each (t), and the pass behind which it travels.
        layers: number of layers of the stage (L).
        cover: gives the seconds of a layer's pass in which the network is free.
        chunks: number of chunks of a stage (V).
        depth: number of stages (p).
    """
    exposed: Floats | float = 0.0
    for seconds, way in collectives:
        if way is not None:
            behind = layers / chunks * cover(way)
            whole = seconds - (1 + (chunks - 1) * depth) * behind
            seconds = np.maximum(np.maximum(seconds / max(layers, 1), seconds / chunks - behind), whole)
        exposed = exposed + seconds
    return exposed


def optimizer_times(
    section: Section,
    experts: ExpertsOnRanks | None,
    owned: Floats | float,
    present: Present | None,
    hosts: Hosts,
) -> Floats:
    """Return the seconds of each unit's optimizer step, on its GPU and on the host, [U].

    Args:
        owned: number of weights whose optimizer state a GPU keeps, or [U].
        present: numbers of weights on the device and in host memory; ``None``: all are on the device.
    """
    job, stage = section.job, section.placement.stage
    times = np.zeros(len(stage.gpus))
    on_host: Floats | float = 0.0
    if present is not None and present.host_state.any():
        owned = present.state
        on_host = hosts.step_seconds(job, stage.gpus, present.host_state, present.host_masters)
    whole = 0 if experts is None else experts.whole
    held, own = part_params(job, section.part, whole, trained=True) + times, owned + times
    copied = fp8_params(job, section.part, whole) + times
    for speeds, units in stage.by_kind:
        times[units] = optimizer_seconds(speeds, job, held[units], own[units], copied[units])
    return times + on_host


def _cover(cost: StageCost, units: Bools, domain: int, way: Way) -> float:
    return cost.mean(partial(free_network, way, units), domain)
