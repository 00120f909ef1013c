"""The same stages run whole and in ministages of one layer.

In ministages also with all in host memory that can be, and with whole micro-batches in place of samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.measured.layouts import Layout
from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel, Job
from megatron_hexi.cost.job import job_terms
from megatron_hexi.plan import Domain, Group, Member, Plan, Replica, Stage, validate_plan
from megatron_hexi.plan.terms import Offload

if TYPE_CHECKING:
    from benchmarks.measured.scenarios import Scenario

#: All that a stage can offload.
_ALL: tuple[Offload, ...] = ("parameters", "optimizer", "activations")
#: Units of a stage, which share the samples of each micro-batch.
_UNITS = 2
#: By what is written behind the name of the stages: whether they run in ministages, what they offload, and
#: whether their units take whole micro-batches.
_WAYS: dict[str, tuple[bool, tuple[Offload, ...] | None, bool]] = {
    "": (False, None, False),
    ", ministages": (True, None, False),
    ", offloaded": (True, _ALL, False),
    ", dealt": (True, None, True),
}


def ministage_layouts(scenario: Scenario, cluster: Cluster) -> list[Layout]:
    """One stage and two, in each of the ways.

    Args:
        scenario: the job.
        cluster: as it was probed.
    """
    return list(_layouts(scenario, cluster))


def _layouts(scenario: Scenario, cluster: Cluster) -> Iterator[Layout]:
    job = scenario.job
    for name, depth in (("one stage", 1), ("two stages", 2)):
        layers = job.model.layers // depth
        for way, (in_turns, offload, is_assigned) in _WAYS.items():
            ministages = layers if in_turns else None
            stages = tuple(
                replace(
                    Stage(_domains(job, number, is_assigned), (number * layers, (number + 1) * layers)),
                    ministages=ministages,
                    offload=offload,
                )
                for number in range(depth)
            )
            plan = Plan(job.workload(), (Replica(stages, _micro_batches(job)),))
            plan = replace(plan, job=job_terms({"micro_batch_size": job.micro_batch_size}, plan))
            validate_plan(plan)
            gpus = tuple(range(depth * _UNITS))
            text = f"{depth * _UNITS} units" + (f" in {ministages} ministages" if ministages else "")
            cost = CostModel(job, cluster).estimate(plan, gpus)
            yield Layout(name + way, plan, job, gpus, text, False, cost.iteration_s, way and name)


def _micro_batches(job: Job) -> int:
    return job.global_batch_size // job.micro_batch_size


def _domains(job: Job, stage: int, is_assigned: bool) -> tuple[Domain, ...]:
    """Units that hold all tokens and heads of as many samples, or whole micro-batches, each."""
    length, share = (
        job.seq_length,
        (_micro_batches(job) if is_assigned else job.micro_batch_size) // _UNITS,
    )
    return tuple(
        Domain(
            (Group(((0, length),), (Member((rank,), length, (0, job.model.heads)),)),),
            samples=None if is_assigned else share,
            micro_batches=share if is_assigned else None,
        )
        for rank in range(stage * _UNITS, (stage + 1) * _UNITS)
    )
