"""One pipeline stage: its layers, what stands at its ends, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.collectives import pipeline_seconds, tensor_parallel_seconds
from megatron_hexi.cost.compute import Times, logits_times, optimizer_seconds
from megatron_hexi.cost.job import Job
from megatron_hexi.cost.layer import Layer, Pass, Stage
from megatron_hexi.cost.memory import GRADIENT_BYTES, stage_params
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.rings import Rings


@dataclass(frozen=True, eq=False)
class StageCost:
    """What a stage does for one micro-batch.

    Args:
        layer: one of its layers.
        layers: how many it has.
        passes: what it runs of each layer: forward, backward, and what recomputation repeats.
        logits: output matrix and loss of each unit, s, [U]; 0 but on the last stage.
        logits_sum: the sum inside each unit that they need, s, [U].
        pipeline_s: sends to the next stage and of its gradients back.
        replicas: where each replica's time goes.
    """

    layer: Layer
    layers: int
    passes: tuple[Pass, ...]
    logits: Floats
    logits_sum: Floats
    pipeline_s: float
    replicas: tuple[Phases, ...]


def stage_cost(
    plan: PlanArrays,
    job: Job,
    number: int,
    stage: Stage,
    layer: Layer,
    links: LinkTable,
    following: Ints,
) -> StageCost:
    """Put a stage together.

    Args:
        plan: the plan.
        job: the job.
        number: of the stage.
        stage: where its units are.
        layer: one of its layers.
        links: the cluster's.
        following: first GPU of each unit of the next stage, [U].
    """
    last = number == job.pipeline_parallel - 1
    rows = job.micro_batch_size * plan.tokens.astype(float)
    logits, sums = np.zeros(len(rows)), np.zeros(len(rows))
    if last:
        times = _logits(job, stage, rows)
        logits = times.forward + times.backward
        sums = tensor_parallel_seconds(job, rows, stage.bandwidth, stage.latency)
    passes = [layer.forward, layer.backward]
    if job.recompute == "full":
        passes.append(layer.forward)
    elif layer.attention_again is not None:
        passes.append(layer.attention_again)
    send = 0.0 if last else 2 * pipeline_seconds(links, job, rows, stage.gpus, following)
    replicas = []
    for replica in range(int(plan.replica[-1]) + 1):
        units = np.flatnonzero(plan.unit_replica == replica)
        phases = Phases(pipeline=send)
        for one in passes:
            phases += _pass_phases(plan, one, units) * job.stage_layers
        slowest = units[np.argmax((logits + sums)[units])]
        phases += Phases(logits=float(logits[slowest]), tensor_parallel=float(sums[slowest]))
        replicas.append(phases)
    return StageCost(layer, job.stage_layers, tuple(passes), logits, sums, send, tuple(replicas))


def _pass_phases(plan: PlanArrays, one: Pass, units: Ints) -> Phases:
    """A layer's time along the group with the most to do; the rest of it is the exchange's.

    Not along the group that is last: groups that wait for another's last gradients end with it.
    """
    busiest = units[np.argmax(one.undisturbed[units])]
    members = plan.slots[plan.first_slot[plan.group[busiest]] : plan.first_slot[plan.group[busiest] + 1]]
    first = members[np.argmax((one.token + one.tensor_parallel)[members])]
    return Phases(
        token=float(one.token[first]),
        tensor_parallel=float(one.tensor_parallel[first]),
        all_to_all=float(one.all_to_all_in[busiest] + one.all_to_all_out[busiest]),
        attention=float(one.attention[busiest]),
        exchange=one.exposed_exchange(units),
    )


def exposed_synchronisation(
    plan: PlanArrays, job: Job, stages: Sequence[Stage], costs: Sequence[StageCost], rings: Rings
) -> list[float]:
    """What each replica waits for gradients and weights, s.

    With the distributed optimizer gradients are reduce-scattered and weights all-gathered over all
    replicas' ranks, without it gradients are all-reduced (twice their bytes). With `overlap_gradients`
    gradients travel behind the backward pass of the last micro-batch and weights behind the forward pass
    of the first, in the time that attention leaves the wire free; the last layer's part (the first's)
    always shows:  max(t / layers, t - layers x (pass - its wire time)).
    """
    waits = np.zeros((len(stages), len(costs[0].replicas)))
    for number, (stage, cost) in enumerate(zip(stages, costs, strict=True)):
        params, layers = stage_params(job, number), cost.layers
        gradients = float(params * GRADIENT_BYTES[job.precision])
        weights = float(params * job.element_bytes)
        ring = [
            rings.seconds(stage.gpus, size, job.tensor_parallel)
            for size in (gradients, weights if job.distributed_optimizer else gradients)
        ]
        covers = [
            cost.layer.backward,
            cost.layer.forward if job.distributed_optimizer else cost.layer.backward,
        ]
        if not job.distributed_optimizer:
            ring, covers = [sum(ring)], covers[:1]
        for seconds, cover in zip(ring, covers, strict=True):
            for replica in range(waits.shape[1]):
                free = 0.0
                if job.overlap_gradients:
                    longest = cover.finish[plan.unit_replica == replica].max()
                    free = layers * max(0.0, float(longest) - cover.wire)
                least = seconds / layers if job.overlap_gradients else seconds
                waits[number, replica] += max(least, seconds - free)
    return [float(wait) for wait in waits.max(axis=0)]


def optimizer_times(job: Job, stage: Stage, params: int, shards: int) -> Floats:
    """The optimizer's step of each unit, s, [U]; with the distributed optimizer `shards` units share it."""
    shard = params / shards if job.distributed_optimizer else float(params)
    times = np.zeros(len(stage.gpus))
    for speeds, members in stage.by_kind:
        times[members] = optimizer_seconds(speeds, job, params, shard)
    return times


def _logits(job: Job, stage: Stage, rows: Floats) -> Times:
    times = Times(np.zeros(len(rows)), np.zeros(len(rows)))
    for speeds, units in stage.by_kind:
        parts = logits_times(speeds, job, rows[units])
        for way in range(2):
            times[way][units] = parts[way]
    return times
