"""How long an iteration takes, and what each rank does in it.

layer     = the slowest group of the replica, as in layer.py; backward after what recomputation repeats
stage     = layers x (forward + backward) + logits on the last stage + sends to the next stage and back
replica   = sum of its stages + (micro-batches - 1) x its slowest stage      (1F1B)
iteration = slowest replica with what it does not hide of gradients and weights + optimizer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.ceiling import ceiling_tokens_per_s
from megatron_hexi.cost.compute import Speeds, device_speeds
from megatron_hexi.cost.job import Job
from megatron_hexi.cost.layer import Stage, layer_times
from megatron_hexi.cost.memory import GIB, Holdings, stage_memory, stage_params
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.placement import Placement, place
from megatron_hexi.cost.plan_arrays import PlanArrays, plan_arrays
from megatron_hexi.cost.ranks import Pace, RankCost, paces, rank_costs
from megatron_hexi.cost.rings import Rings
from megatron_hexi.cost.stage import StageCost, exposed_synchronisation, optimizer_times, stage_cost
from megatron_hexi.errors import PlanError
from megatron_hexi.plan import Plan, deal_micro_batches


@dataclass(frozen=True)
class IterationCost:
    """What an iteration is predicted to cost.

    Args:
        iteration_s: seconds.
        tokens_per_s: global batch x sequence length over it.
        ceiling_tokens_per_s: the same if all GPUs worked at their best rates, without communication.
        phases: where the time goes, along the slowest way; they add up to `iteration_s`.
        paces: the rank that each kind of work waits for.
        ranks: by rank of the job.
    """

    iteration_s: float
    tokens_per_s: float
    ceiling_tokens_per_s: float
    phases: Phases
    paces: tuple[Pace, ...]
    ranks: tuple[RankCost, ...]

    @property
    def exposed_communication_s(self) -> float:
        """Communication on the slowest way through the iteration that no work hides."""
        return self.phases.communication

    @property
    def idle_share(self) -> float:
        """Part of all ranks' time in which they neither compute nor communicate."""
        return sum(rank.idle_s for rank in self.ranks) / (len(self.ranks) * self.iteration_s)

    @property
    def memory_gib(self) -> tuple[float, ...]:
        """Peak memory of each rank, GiB."""
        return tuple(rank.memory_gib for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether every rank's memory suffices."""
        return all(rank.memory_gib <= rank.usable_gib for rank in self.ranks)


@dataclass(frozen=True, eq=False)
class Timing:
    """A plan's iteration in arrays over units, for a search that reads what bounds it.

    Args:
        arrays: the plan.
        placement: where its units are.
        stages: what each pipeline stage does for one micro-batch.
        replicas: where each replica's time goes, the optimizer aside.
        phases: of the slowest replica, with the optimizer.
        synchronisation: what each replica waits for gradients and weights, s.
        optimizer: the optimizer's step of each stage's units, s, [U].
        micro_batches: of each replica.
        memory: of each stage: bytes on one GPU of each unit by term, [U].
    """

    arrays: PlanArrays
    placement: Placement
    stages: list[StageCost]
    replicas: tuple[Phases, ...]
    phases: Phases
    synchronisation: list[float]
    optimizer: list[Floats]
    micro_batches: Ints
    memory: list[dict[str, Floats]]

    @property
    def needed(self) -> Floats:
        """Bytes that a GPU of each unit needs, [stages, U]."""
        return np.array([sum(terms.values()) for terms in self.memory])

    @property
    def usable(self) -> Floats:
        """Bytes that it has, [stages, U]."""
        return np.array([device.usable_gib for device in self.placement.devices])[self.placement.kinds] * GIB

    @property
    def fits(self) -> bool:
        """Whether every GPU's memory suffices."""
        return bool((self.needed <= self.usable).all())


@dataclass(frozen=True, eq=False)
class _Ground:
    """What all plans on the same GPUs have in common; fields as of `Timing`."""

    placement: Placement
    stages: list[Stage]
    optimizer: list[Floats]


class CostModel:
    """A job on a cluster; what does not depend on the plan is worked out once.

    Args:
        job: the job.
        cluster: the cluster.
        shards: units that share the optimizer's state, where plans are parts of a larger one; ``None``: the
            plan's own.
    """

    def __init__(self, job: Job, cluster: Cluster, shards: int | None = None) -> None:
        self.job = job
        self.cluster = cluster
        self.shards = shards
        self.links = LinkTable(cluster)
        self.rings = Rings(self.links)
        nodes = [cluster.nodes[rank.node] for rank in cluster.ranks]
        self._bandwidth = np.array([node.bandwidth for node in nodes])
        self._latency = np.array([node.latency_s for node in nodes])
        #: By identity: devices are the cluster's own, few, and long to compare.
        self._speeds: dict[int, Speeds] = {}
        #: By the plan's ranks and their GPUs: a search asks for few choices, over and over.
        self._grounds: dict[tuple[int, tuple[int, ...] | None], _Ground] = {}

    def estimate(self, plan: Plan, gpus: Sequence[int] | None = None) -> IterationCost:
        """What the plan costs.

        Args:
            plan: a plan that passed its checks.
            gpus: the cluster's rank of each rank of the job; ``None``: those that the plan names, or else all
                of the cluster in file order.

        Raises:
            PlanError: the plan was made for another job.
            ClusterError: the plan's units do not match the cluster, or a GPU cannot do the job.
        """
        timing = self.timing(plan, gpus)
        total = timing.phases.total
        ranks = rank_costs(
            timing.arrays,
            self.cluster,
            timing.placement,
            timing.stages,
            timing.optimizer,
            timing.memory,
            timing.micro_batches,
            timing.synchronisation,
            total,
        )
        devices = [self.cluster.ranks[gpu].device for gpu in timing.placement.gpus.flat]
        return IterationCost(
            iteration_s=total,
            tokens_per_s=self.job.global_batch_size * self.job.seq_length / total,
            ceiling_tokens_per_s=ceiling_tokens_per_s(self.job, devices, timing.arrays.causal),
            phases=timing.phases,
            paces=paces(ranks),
            ranks=ranks,
        )

    def timing(self, plan: Plan, gpus: Sequence[int] | None = None) -> Timing:
        """The same in arrays, without what is for people only. Arguments and errors as of `estimate`."""
        job = self.job
        micro_batches = check_job(plan, job)
        ground = self._ground(plan, gpus)
        placement, stages, optimizer = ground.placement, ground.stages, ground.optimizer
        arrays = plan_arrays(plan)
        window, shards = plan.exchange.window, self.shards or len(arrays.tokens)
        costs = []
        for number, stage in enumerate(stages):
            following = placement.gpus[(number + 1) % len(stages), :, 0]
            layer = layer_times(arrays, job, stage, self.links, window)
            costs.append(stage_cost(arrays, job, number, stage, layer, self.links, following))
        synchronisation = exposed_synchronisation(arrays, job, stages, costs, self.rings)
        step = max(float(times.max()) for times in optimizer)
        replicas = [
            _replica_phases([cost.replicas[number] for cost in costs], count)
            + Phases(gradients=synchronisation[number])
            for number, count in enumerate(micro_batches)
        ]
        memory = [
            stage_memory(job, number, Holdings.of(arrays, micro_batches, cost.layer.flights), window, shards)
            for number, cost in enumerate(costs)
        ]
        return Timing(
            arrays=arrays,
            placement=placement,
            stages=costs,
            replicas=tuple(replicas),
            phases=max(replicas, key=lambda phases: phases.total) + Phases(optimizer=step),
            synchronisation=synchronisation,
            optimizer=optimizer,
            micro_batches=micro_batches,
            memory=memory,
        )

    def _ground(self, plan: Plan, gpus: Sequence[int] | None) -> _Ground:
        asked = plan.units, plan.gpus if gpus is None else tuple(gpus)
        if asked not in self._grounds:
            self._grounds[asked] = self._find_ground(place(plan, self.job, self.cluster, gpus))
        return self._grounds[asked]

    def _find_ground(self, placement: Placement) -> _Ground:
        speeds = tuple(map(self._device_speeds, placement.devices))
        stages = [
            Stage(first, kinds, speeds, self._bandwidth[first], self._latency[first])
            for first, kinds in zip(placement.gpus[:, :, 0], placement.kinds, strict=True)
        ]
        optimizer = [
            optimizer_times(self.job, stage, stage_params(self.job, number), self.shards or len(stage.gpus))
            for number, stage in enumerate(stages)
        ]
        return _Ground(placement, stages, optimizer)

    def _device_speeds(self, device: Device) -> Speeds:
        if id(device) not in self._speeds:
            self._speeds[id(device)] = device_speeds(device, self.job)
        return self._speeds[id(device)]


def estimate(plan: Plan, job: Job, cluster: Cluster, gpus: Sequence[int] | None = None) -> IterationCost:
    """What a plan costs; see `CostModel.estimate`, which is for many plans of one job and cluster."""
    return CostModel(job, cluster).estimate(plan, gpus)


def check_job(plan: Plan, job: Job) -> Ints:
    """Hold the plan against the job; the micro-batches of each replica.

    Raises:
        PlanError: they differ; with both values.
    """
    wanted = job.workload()
    fields = "seq_length", "heads", "kv_heads", "head_dim", "layers", "hidden_size", "tensor_parallel"
    pairs = [(field, getattr(plan.workload, field), getattr(wanted, field)) for field in fields]
    for field, planned, asked in (*pairs, ("value_dim", plan.workload.value_size, wanted.value_size)):
        if planned is not None and planned != asked:
            raise PlanError(
                f"workload.{field}: the plan is for {planned}, the job has {asked} (model {job.model.name}); "
                "give the job that the plan was made for, or make a plan for this one"
            )
    replicas = len(plan.replicas)
    if replicas != job.data_parallel:
        raise PlanError(
            f"replicas: the plan has {replicas}, the job has data_parallel = {job.data_parallel}; "
            "make them equal"
        )
    shares = deal_micro_batches(plan, job.global_batch_size, job.micro_batch_size)
    return np.array([share.count for share in shares])


def _replica_phases(stages: Sequence[Phases], micro_batches: int) -> Phases:
    """1F1B: every micro-batch passes the slowest stage, one of them passes the others besides."""
    slowest = max(stages, key=lambda phases: phases.total)
    others = sum(phases.total for phases in stages) - slowest.total
    return slowest * int(micro_batches) + Phases(bubble=others)
