"""Where a plan's units stand on the cluster.

A member of a plan is a unit of `tensor_parallel` consecutive GPUs of one node, and each pipeline stage
repeats all units. GPUs are numbered as Megatron numbers ranks by default (tp-cp-dp-pp): unit u of stage s
is the ranks (s U + u) tp to (s U + u) tp + tp - 1, with U units a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.cost.arrays import Ints
from megatron_hexi.cost.job import Job
from megatron_hexi.errors import ClusterError
from megatron_hexi.plan import Plan


@dataclass(frozen=True, eq=False)
class Placement:
    """GPUs of a job.

    Args:
        gpus: the cluster's rank of each GPU, [stages, units, tensor_parallel].
        devices: models of GPU in use.
        kinds: index into `devices` of each unit, [stages, units].
    """

    gpus: Ints
    devices: tuple[Device, ...]
    kinds: Ints


def place(plan: Plan, job: Job, cluster: Cluster, gpus: Sequence[int] | None = None) -> Placement:
    """Put the plan's units on the cluster.

    Args:
        plan: the plan.
        job: the job.
        cluster: the cluster.
        gpus: the cluster's rank of each rank of the job; ``None``: those that the plan names, or else all
            of the cluster in file order.

    Raises:
        ClusterError: too many or too few GPUs, one given twice, or a unit on two nodes.
    """
    tp, pp = job.tensor_parallel, job.pipeline_parallel
    units = plan.units
    gpus = plan.gpus if gpus is None else gpus
    chosen = np.asarray(range(len(cluster.ranks)) if gpus is None else gpus, dtype=np.int64)
    needed = units * tp * pp
    if len(chosen) != needed:
        said = f"{units} ranks" if tp * pp == 1 else f"{units} ranks x {tp} tensor x {pp} pipeline"
        has = f"cluster {cluster.name} has" if gpus is None else "the plan names"
        raise ClusterError(
            f"{has} {len(chosen)} GPUs, the plan is for {needed} ({said}); "
            "make the plan for this cluster, or take GPUs out of the cluster file"
        )
    if gpus is not None:
        _check_choice(chosen, cluster)
    placed = chosen.reshape(pp, units, tp)
    nodes = np.array([rank.node for rank in cluster.ranks])[placed]
    split = np.argwhere(nodes.min(axis=2) != nodes.max(axis=2))
    if len(split):
        unit = placed[tuple(split[0])]
        raise ClusterError(
            f"cluster {cluster.name}: a tensor-parallel unit of {tp} would be "
            f"{cluster.rank_name(int(unit[0]))} to {cluster.rank_name(int(unit[-1]))}, on two nodes; "
            "give a tensor_parallel that divides every node's GPUs"
        )
    devices: dict[int, Device] = {}
    kind_of_node = np.zeros(len(cluster.nodes), dtype=np.int64)
    for number in np.unique(nodes):
        device = cluster.nodes[number].device
        devices.setdefault(id(device), device)
        kind_of_node[number] = list(devices).index(id(device))
    return Placement(placed, tuple(devices.values()), kind_of_node[nodes[:, :, 0]])


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
