"""A plan of some of a cluster's nodes, as a plan of the whole cluster that leaves the other nodes out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megatron_hexi.cluster import Cluster, cluster_digest
from megatron_hexi.plan import Plan
from megatron_hexi.plan.units import rank_gpus


def plan_of_whole(plan: Plan, cluster: Cluster, left_out: Collection[int]) -> Plan:
    """Return a plan of some nodes with its GPUs numbered as in the whole cluster.

    Args:
        plan: a plan for `cluster.without(left_out)`.
    """
    numbers = [rank.rank for rank in cluster.ranks if rank.node not in left_out]
    made = plan.provenance and replace(plan.provenance, cluster_digest=cluster_digest(cluster))
    return replace(plan, gpus=tuple(numbers[gpu] for gpu in rank_gpus(plan, len(numbers))), provenance=made)
