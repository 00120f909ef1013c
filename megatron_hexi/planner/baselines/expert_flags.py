"""Equal layouts of Megatron's flags with expert parallelism: their sizes, least time and least memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.cost import attention_seconds
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.compute import device_speeds, token_times
from megatron_hexi.cost.expert_messages import ExpertRanks, exchange_seconds
from megatron_hexi.cost.experts import busiest_rows, routed_times
from megatron_hexi.cost.layer_bytes import Flights
from megatron_hexi.cost.memory import GIB, Holdings, owned_params, part_memory, part_params
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.models import Job
from megatron_hexi.models.job import layers_again
from megatron_hexi.plan.terms import Recompute
from megatron_hexi.planner.request import Request


@dataclass(frozen=True)
class ExpertFlags:
    """Parallel sizes of an equal layout, as Megatron's flags give them.

    Args:
        tensor: --tensor-model-parallel-size.
        pipeline: --pipeline-model-parallel-size.
        context: --context-parallel-size.
        expert: --expert-model-parallel-size.
        group: units of an all-to-all group (--hierarchical-context-parallel-sizes); 1: a ring.
    """

    tensor: int
    pipeline: int
    context: int
    expert: int
    group: int

    @property
    def merged(self) -> int:
        """Number of replicas whose ranks together are an expert domain."""
        return max(1, self.expert // (self.tensor * self.context))

    def __str__(self) -> str:
        return f"TP {self.tensor}, PP {self.pipeline}, CP {self.context}, EP {self.expert}"


class EqualFloor:
    """Lower bounds of time and memory of equal layouts on all GPUs of a cluster.

    Args:
        request: the job.
        cluster: the cluster that the job runs on.
    """

    def __init__(self, request: Request, cluster: Cluster) -> None:
        self._request, self._gpus = request, len(cluster.ranks)
        self._links = LinkTable(cluster)
        self._devices = list({id(node.device): node.device for node in cluster.nodes}.values())
        self._layer = cache(self._layer_seconds)
        self._exchange = cache(self._exchange_seconds)

    def seconds(self, flags: ExpertFlags, recompute: Recompute) -> float:
        """Return a lower bound of an iteration, s: 1F1B's period on the slowest GPU, the rest on the fastest.

        Matrix products run at the rate of the rows that each GPU has, all-to-alls of experts over the
        cluster's links, attention at its best rate; other communication is left out.
        """
        model = self._request.job.model
        stage = [
            model.layers // flags.pipeline * self._layer(device, replace(flags, group=1), recompute)
            for device in self._devices
        ]
        micro_batches = self._micro_batches(flags)
        return micro_batches * max(stage) + (flags.pipeline - 1) * min(stage)

    def may_fit(self, flags: ExpertFlags, recompute: Recompute) -> bool:
        """Whether the first stage may fit in memory; of several stages it is assumed on the largest GPUs."""
        job = self._job(flags, recompute)
        model, layers = job.model, job.model.layers // flags.pipeline
        experts = model.experts
        assert experts is not None
        part = ModelPart(
            layers,
            layers_again(layers, recompute),
            is_first=True,
            is_last=flags.pipeline == 1,
            ahead=flags.pipeline,
            ranges=((0, layers),),
        )
        tokens = np.array([job.seq_length / flags.context])
        heads = np.array([job.workload().local_heads / flags.group])
        held = Holdings(
            tokens=tokens,
            group_tokens=tokens * flags.group,
            heads=heads,
            kv=np.maximum(1.0, heads / job.workload().queries_per_kv),
            micro_batches=np.array([self._micro_batches(flags)]),
            flights=Flights(np.zeros(1), np.zeros(1)),
            experts=experts.count / flags.expert,
            routed_rows=self._routed_rows(flags),
            fp8_copies=min(device_speeds(device, job).fp8_copies for device in self._devices),
        )
        ranks = self._gpus // flags.pipeline
        routed = float(part_params(job, part, held.experts) - part_params(job, part))
        whole = float(part_params(job, part))
        owned = owned_params(job, whole, ranks / flags.tensor)
        owned = owned + owned_params(job, routed, ranks / flags.expert)
        needed = sum(float(term.max()) for term in part_memory(job, part, held, 1, owned).values())
        usable = [device.usable_gib * GIB for device in self._devices]
        return needed <= (min(usable) if flags.pipeline == 1 else max(usable))

    def _job(self, flags: ExpertFlags, recompute: Recompute) -> Job:
        return replace(
            self._request.with_width(flags.tensor),
            pipeline_parallel=1,
            micro_batch_size=self._request.micro_batch_sizes()[0],
            recompute=recompute,
        )

    def _micro_batches(self, flags: ExpertFlags) -> int:
        replicas = self._gpus // (flags.tensor * flags.pipeline * flags.context)
        return self._request.job.global_batch_size // (replicas * self._request.micro_batch_sizes()[0])

    def _layer_seconds(self, device: Device, flags: ExpertFlags, recompute: Recompute) -> float:
        """Return the seconds of a mean layer or, with several stages, of a layer of the fastest kind."""
        job = self._job(flags, recompute)
        speeds = device_speeds(device, job)
        units = flags.context * flags.tensor
        rows = np.array([job.micro_batch_size * job.seq_length / flags.context])
        kinds: list[tuple[int, float]] = []
        for kind in job.kinds:
            forward, backward = (float(times[0]) for times in token_times(speeds, kind, rows))
            experts = kind.model.experts
            if experts is not None:
                count, whole = np.array([experts.count // flags.expert]), np.ones(1, dtype=np.int64)
                routed = routed_times(speeds, kind, count, whole, self._routed_rows(flags))
                moved = 2 * self._exchange(flags)
                forward += float(routed.forward[0]) + moved
                backward += float(routed.backward[0]) + moved
            attention = attention_seconds(speeds, kind, causal=True) / kind.model.layers
            again = forward if kind.mode == "full" else 0.0
            once = attention * job.micro_batch_size * job.seq_length / units
            kinds.append((kind.model.layers, forward + backward + again + once))
        if flags.pipeline > 1:
            return min(seconds for _, seconds in kinds)
        return sum(layers * seconds for layers, seconds in kinds) / job.model.layers

    def _routed_rows(self, flags: ExpertFlags) -> Floats:
        """Return the number of rows that a GPU's experts compute if all units have equal tokens, [1]."""
        job = self._request.job
        experts = job.model.experts
        assert experts is not None
        tokens = self._request.micro_batch_sizes()[0] * job.seq_length / flags.context
        rows = np.array([tokens * flags.expert / flags.tensor])
        return busiest_rows(job, np.array([experts.count // flags.expert]), rows)

    def _exchange_seconds(self, flags: ExpertFlags) -> float:
        """Return the seconds of one all-to-all of a layer's experts, in the stage with the fastest links."""
        job, ranks = self._job(flags, "none"), self._gpus // flags.pipeline
        experts = job.model.experts
        assert experts is not None
        rows = np.full(ranks, job.micro_batch_size * job.seq_length / (flags.context * flags.tensor))
        domain, count = np.arange(ranks) // flags.expert, np.full(ranks, experts.count // flags.expert)
        stages = [first + np.arange(ranks) for first in range(0, self._gpus, ranks)]
        unlike = {self._links.likeness(gpus): gpus for gpus in stages}.values()
        alone = np.zeros(ranks, dtype=np.int64)
        seconds = (
            exchange_seconds(
                job, ExpertRanks(gpus, domain, alone, rows, count, count.astype(float)), self._links
            )
            for gpus in unlike
        )
        return min(float(longest.max()) for longest in seconds)
