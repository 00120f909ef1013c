"""Where a plan's units stand on the cluster.

A unit is GPUs of one node. Where the job repeats a stage they are consecutive, and each pipeline stage
repeats all units. GPUs are numbered as Megatron numbers ranks by default (tp-cp-dp-pp): unit u of stage s is
the ranks (s U + u) tp to (s U + u) tp + tp - 1, with U units a stage. Else the plan says a unit's ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.arrays import Ints
from megatron_hexi.cost.job import Job
from megatron_hexi.errors import ClusterError
from megatron_hexi.plan import Plan
from megatron_hexi.plan.units import rank_gpus


def place(
    plan: Plan, job: Job, cluster: Cluster, ranks: Sequence[Ints], gpus: Sequence[int] | None = None
) -> list[Ints]:
    """Put the plan's units on the cluster.

    Args:
        plan: the plan.
        job: the job.
        cluster: the cluster.
        ranks: of the job, of the units of each section, [U, tensor_parallel] each.
        gpus: the cluster's rank of each rank of the job; ``None``: those that the plan names, or else all
            of the cluster in file order.

    Returns:
        The cluster's rank of each GPU, likewise.

    Raises:
        ClusterError: too many or too few GPUs, one given twice, or a unit on two nodes.
    """
    are_chosen = gpus is not None or plan.gpus is not None
    chosen = np.asarray(rank_gpus(plan, len(cluster.ranks)) if gpus is None else gpus, dtype=np.int64)
    needed = sum(own.size for own in ranks)
    if len(chosen) != needed:
        has = "the plan names" if are_chosen else f"cluster {cluster.name} has"
        raise ClusterError(
            f"{has} {len(chosen)} GPUs, the plan is for {needed} ({_spell_size(plan, job)}); "
            "make the plan for this cluster, or take GPUs out of the cluster file"
        )
    if are_chosen:
        _check_choice(chosen, cluster)
    node_of = np.array([rank.node for rank in cluster.ranks])
    placed = [chosen[own] for own in ranks]
    for own, on in zip(ranks, placed, strict=True):
        nodes = node_of[on]
        split = np.flatnonzero(nodes.min(axis=1) != nodes.max(axis=1))
        if len(split):
            _refuse_split(plan, cluster, own[split[0]], on[split[0]])
    return placed


def _spell_size(plan: Plan, job: Job) -> str:
    tp, pp = job.tensor_parallel, job.pipeline_parallel
    if not plan.is_repeated or tp * pp == 1:
        return f"{plan.ranks} ranks"
    return f"{plan.units} ranks x {tp} tensor x {pp} pipeline"


def _refuse_split(plan: Plan, cluster: Cluster, ranks: Ints, gpus: Ints) -> None:
    ends = f"{cluster.rank_name(int(gpus[0]))} to {cluster.rank_name(int(gpus[-1]))}"
    if plan.is_repeated:
        who, remedy = "would be", "give a tensor_parallel that divides every node's GPUs"
    else:
        who, remedy = f"has ranks {ranks.tolist()}, which are", "give it ranks of one node"
    raise ClusterError(
        f"cluster {cluster.name}: a tensor-parallel unit of {len(gpus)} {who} {ends}, on two nodes; {remedy}"
    )


def _check_choice(chosen: Ints, cluster: Cluster) -> None:
    outside = chosen[(chosen < 0) | (chosen >= len(cluster.ranks))]
    if len(outside):
        raise ClusterError(
            f"cluster {cluster.name} has no GPU {outside[0]}; give 0 to {len(cluster.ranks) - 1}"
        )
    ranks, counts = np.unique(chosen, return_counts=True)
    if (counts > 1).any():
        twice = cluster.rank_name(int(ranks[counts > 1][0]))
        raise ClusterError(f"cluster {cluster.name}: GPU {twice} is given twice; give each once")
