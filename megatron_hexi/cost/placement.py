"""Placement of a plan's units on the cluster: GPUs, speeds, links and memory. A unit is GPUs of one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.arrays import Bools, Floats, Ints
from megatron_hexi.cost.ceiling import ceiling_tokens_per_s
from megatron_hexi.cost.compute import Speeds, device_speeds
from megatron_hexi.cost.layer import UnitGpus
from megatron_hexi.cost.memory import GIB
from megatron_hexi.cost.recent import Recent
from megatron_hexi.errors import ClusterError
from megatron_hexi.models.job import Job
from megatron_hexi.plan import Plan
from megatron_hexi.plan.units import rank_gpus

#: Placements that are kept: a search asks for few, over and over.
_MOST_KEPT = 256


@dataclass(frozen=True, eq=False)
class Placement:
    """The GPUs of a section's units.

    Args:
        gpus: number in the cluster of each rank's GPU, [U, tensor_parallel].
        stage: rates and links of the units' GPUs.
        usable: bytes of memory that a job may use on a GPU of each unit, the least of its GPUs, [U].
    """

    gpus: Ints
    stage: UnitGpus
    usable: Floats


class Placer:
    """Finds the GPUs of plans' units.

    Args:
        job: the job of the plans.
        cluster: the cluster that the job runs on.
    """

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self._job, self._cluster = job, cluster
        nodes = [cluster.nodes[rank.node] for rank in cluster.ranks]
        #: The node of each GPU.
        self.nodes = np.array([rank.node for rank in cluster.ranks])
        self._bandwidth = np.array([node.unit_bandwidth(job.tensor_parallel) for node in nodes])
        self._latency = np.array([node.latency_s for node in nodes])
        self._usable = np.array([rank.device.usable_gib * GIB for rank in cluster.ranks])
        #: The cluster's distinct devices, by identity, because comparing their values takes long.
        self._devices = list({id(rank.device): rank.device for rank in cluster.ranks}.values())
        number = {id(device): place for place, device in enumerate(self._devices)}
        #: Index into these of each GPU of the cluster.
        self._device = np.array([number[id(rank.device)] for rank in cluster.ranks])
        self._speeds: dict[int, Speeds] = {}
        self._kept = Recent[list[Placement]](_MOST_KEPT)

    def place(
        self,
        plan: Plan,
        ranks: Sequence[Ints],
        gpus: Sequence[int] | None,
        in_bf16: Sequence[Bools] | None = None,
    ) -> list[Placement]:
        """Return the placement of the units of each section.

        Args:
            ranks: for each section, the ranks of its units in the job, [U, tensor_parallel].
            gpus: number in the cluster of each rank's GPU; ``None``: the GPUs that the plan names, or else
                all of the cluster in file order.
            in_bf16: for each section, whether the plan has each unit compute in bf16, [U]; ``None``: no unit
                whose GPU has the job's precision does.

        Raises:
            ClusterError: there are too many or too few GPUs, one is given twice or does not exist, a unit is
                on two nodes, or a GPU cannot do the job.
        """
        # Units of different sizes may have the same ranks in the same order.
        units = tuple((own.shape, own.tobytes()) for own in ranks)
        plain = np.concatenate(in_bf16) if in_bf16 else np.zeros(0, dtype=bool)
        asked = units, plan.gpus if gpus is None else tuple(gpus), plain.tobytes() if plain.any() else b""
        return self._kept.of(
            asked,
            lambda: self._placed(
                _find_gpus(plan, self._job, self._cluster, ranks, gpus), in_bf16 if plain.any() else None
            ),
        )

    def _placed(self, gpus: Sequence[Ints], in_bf16: Sequence[Bools] | None) -> list[Placement]:
        slowest = [self._slowest(self._device[own]) for own in gpus]
        if in_bf16 is not None:  # as units of further models
            more = len(self._devices)
            slowest = [kinds + more * plain for kinds, plain in zip(slowest, in_bf16, strict=True)]
        used = np.unique(np.concatenate(slowest))
        speeds = {device: self._device_speeds(device) for device in used.tolist()}
        return [self._placement(own, devices, speeds) for own, devices in zip(gpus, slowest, strict=True)]

    def _placement(self, gpus: Ints, kinds: Ints, speeds: Mapping[int, Speeds]) -> Placement:
        first = gpus[:, 0]
        stage = UnitGpus(first, kinds, speeds, self._bandwidth[first], self._latency[first])
        return Placement(gpus, stage, self._usable[gpus].min(axis=1))

    def _slowest(self, devices: Ints) -> Ints:
        """Return the slowest device of each unit, [U], from the devices of its GPUs, [U, tensor_parallel]."""
        if (devices == devices[:, :1]).all():
            return devices[:, 0]
        found = {one: ceiling_tokens_per_s(self._job, [self._devices[one]]) for one in set(devices.flat)}
        rates = np.vectorize(found.__getitem__)(devices)
        return devices[np.arange(len(devices)), rates.argmin(axis=1)]

    def _device_speeds(self, device: int) -> Speeds:
        if device not in self._speeds:
            further, known = divmod(device, len(self._devices))
            self._speeds[device] = device_speeds(
                self._devices[known], self._job.in_bf16 if further else self._job
            )
        return self._speeds[device]


def _find_gpus(
    plan: Plan, job: Job, cluster: Cluster, ranks: Sequence[Ints], gpus: Sequence[int] | None
) -> list[Ints]:
    """Return the cluster's GPU of each rank, by section; for arguments and errors see `Placer.place`."""
    are_chosen = gpus is not None or plan.gpus is not None
    chosen = np.asarray(rank_gpus(plan, len(cluster.ranks)) if gpus is None else gpus, dtype=np.int64)
    needed = sum(own.size for own in ranks)
    if len(chosen) != needed:
        has = "the plan names" if are_chosen else f"cluster {cluster.name} has"
        raise ClusterError(
            f"{has} {len(chosen)} GPUs, but the plan is for {needed} ({_spell_size(plan, job, needed)}); "
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
            _refuse_split(cluster, own[split[0]], on[split[0]])
    return placed


def _spell_size(plan: Plan, job: Job, ranks: int) -> str:
    if ranks == plan.ranks:
        return f"{ranks} ranks"
    return f"{plan.units} ranks x {job.tensor_parallel} tensor x {job.pipeline_parallel} pipeline"


def _refuse_split(cluster: Cluster, ranks: Ints, gpus: Ints) -> None:
    ends = f"{cluster.rank_name(int(gpus[0]))} to {cluster.rank_name(int(gpus[-1]))}"
    raise ClusterError(
        f"cluster {cluster.name}: a tensor-parallel unit of {len(gpus)} has ranks {ranks.tolist()}, which "
        f"span two nodes ({ends}); give it ranks of one node, or a tensor_parallel that divides each node's "
        "GPUs"
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
