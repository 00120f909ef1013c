"""The same stages run whole and in ministages of one layer.

One after the other ministages also run with all in host memory that can be, and with whole micro-batches in
place of samples; or ministages are interleaved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.measured.layouts import Layout
from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.models import Job
from megatron_hexi.models.job import job_terms
from megatron_hexi.plan import Domain, Group, Member, Plan, Replica, Stage, validate_plan
from megatron_hexi.plan.terms import Offload, Order

if TYPE_CHECKING:
    from benchmarks.measured.scenarios import Scenario

#: All that a stage can offload.
_ALL: tuple[Offload, ...] = ("parameters", "optimizer", "activations")


class _Way(NamedTuple):
    """A way to run stages: whole, or in ministages.

    Args:
        in_ministages: whether each layer is a ministage; else stages run whole.
        offload: data of the stages that waits in host memory.
        is_assigned: whether a stage's units take whole micro-batches in place of samples.
        order: order of the ministages.
    """

    in_ministages: bool = True
    offload: tuple[Offload, ...] | None = None
    is_assigned: bool = False
    order: Order | None = None


#: By what is written behind the name of the stages.
_WAYS = {
    "": _Way(in_ministages=False),
    ", ministages": _Way(),
    ", offloaded": _Way(offload=_ALL),
    ", dealt": _Way(is_assigned=True),
}
_ORDERS = {"": _Way(in_ministages=False), ", interleaved": _Way(order="interleaved")}


def ministage_layouts(scenario: Scenario, cluster: Cluster) -> list[Layout]:
    """Return one stage and two, in each of the ways.

    Args:
        scenario: the job.
        cluster: as it was probed.
    """
    return [
        _layout(scenario.job, cluster, name, way, depth, 2)
        for name, depth in (("one stage", 1), ("two stages", 2))
        for way in _WAYS.items()
    ]


def interleaved_layouts(scenario: Scenario, cluster: Cluster) -> list[Layout]:
    """Return two stages of two units and four of one, run whole and with their ministages interleaved.

    Args:
        scenario: the job.
        cluster: as it was probed.
    """
    return [
        _layout(scenario.job, cluster, name, way, depth, units)
        for name, depth, units in (("two stages", 2, 2), ("four stages", 4, 1))
        for way in _ORDERS.items()
    ]


def _layout(
    job: Job, cluster: Cluster, name: str, named_way: tuple[str, _Way], depth: int, units: int
) -> Layout:
    """Return stages of equally many layers and units."""
    suffix, way = named_way
    layers = job.model.layers // depth
    ministages = layers if way.in_ministages else None
    stages = tuple(
        replace(
            Stage(_domains(job, number, units, way), layers=(number * layers, (number + 1) * layers)),
            ministages=ministages,
            offload=way.offload,
        )
        for number in range(depth)
    )
    plan = Plan(job.workload(), (Replica(stages, _micro_batches(job), way.order),))
    plan = replace(plan, job=job_terms({"micro_batch_size": job.micro_batch_size}, plan))
    validate_plan(plan)
    gpus = tuple(range(depth * units))
    text = f"{depth * units} units" + (f" in {ministages} ministages" if ministages else "")
    cost = CostModel(job, cluster).estimate(plan, gpus)
    return Layout(name + suffix, plan, job, gpus, text, False, cost.iteration_s, suffix and name)


def _micro_batches(job: Job) -> int:
    return job.global_batch_size // job.micro_batch_size


def _domains(job: Job, stage: int, units: int, way: _Way) -> tuple[Domain, ...]:
    """Return units that hold all tokens and heads of as many samples, or whole micro-batches, each."""
    length, share = (
        job.seq_length,
        (_micro_batches(job) if way.is_assigned else job.micro_batch_size) // units,
    )
    return tuple(
        Domain(
            (Group(((0, length),), (Member((rank,), length, (0, job.model.heads)),)),),
            samples=None if way.is_assigned else share,
            micro_batches=share if way.is_assigned else None,
        )
        for rank in range(stage * units, (stage + 1) * units)
    )
