"""The plan for the nodes that are present: the job's own while all of its nodes are there, else the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hexi.cluster import Cluster, cluster_digest
from megatron_hexi.elastic.planning.job import lasting_job
from megatron_hexi.elastic.planning.node import find_node
from megatron_hexi.errors import HexiError
from megatron_hexi.plan import Plan
from megatron_hexi.plan.units import job_ranks, rank_gpus
from megatron_hexi.planner import find_plan, plan_of_whole


@dataclass(frozen=True)
class Survivors:
    """The plan that a job continues with after a node failure.

    Args:
        plan: plan for the present nodes; `gpus` counts in the whole cluster.
        ranks: the started rank that takes each of the plan's ranks.
        left_out: names of absent nodes of the job's own plan.
    """

    plan: Plan
    ranks: tuple[int, ...]
    left_out: tuple[str, ...]


def survive(
    plan: Plan, cluster: Cluster, present: Sequence[tuple[str, int]], words: Sequence[str]
) -> Survivors:
    """Return a plan for the nodes that are present.

    Args:
        present: node in the cluster file, and number there, of each started rank.
    """
    starts, job = _starts(cluster, present), lasting_job(plan, words, cluster)
    if plan.provenance and plan.provenance.cluster_digest not in (None, cluster_digest(cluster)):
        raise HexiError(
            f"--hexi-plan was made for a different cluster than that of --hexi-cluster, {cluster.name}; "
            "give its own file"
        )
    gpus = rank_gpus(plan, job_ranks(plan, job.stages))
    numbers = {cluster.ranks[gpu].node for gpu in starts}
    if not starts.keys() >= set(gpus):
        others = set(range(len(cluster.nodes))).difference(numbers)
        found = job.written(find_plan(job.request, cluster.without(others)))
        plan = plan_of_whole(found, cluster, others)
    absent = sorted({cluster.ranks[gpu].node for gpu in gpus}.difference(numbers))
    names = tuple(cluster.nodes[number].name for number in absent)
    return Survivors(plan, tuple(starts[gpu] for gpu in rank_gpus(plan, len(gpus))), names)


def _starts(cluster: Cluster, present: Sequence[tuple[str, int]]) -> dict[int, int]:
    """Return the started rank of each GPU, by the GPU's number in the cluster."""
    starts: dict[int, int] = {}
    for rank, (name, local) in enumerate(present):
        node = find_node(cluster, name, sum(node_name == name for node_name, _ in present))
        if not 0 <= local < len(node.ranks):
            raise HexiError(f"--node {name}: has no GPU {local}; number its ranks from 0")
        starts[node.ranks[local]] = rank
    return starts
