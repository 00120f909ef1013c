"""A layout of Megatron's flags, the plan that costs as much as Megatron's own run, and its lower bounds.

    group     >= the longest of its members' token work + the longest of their attention
    stage     >= its slowest group; the last one's with the longest logits
    replica   >= micro-batches x slowest stage + a micro-batch, or a chunk of it, on the others
    iteration >= slowest replica

Products take the time of each member's rows, attention that of its GPU's best rate; tensor-parallel sums, and
rows that travel to experts and back, count with the token work. Other communication and the keys in flight
are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from megatron_hexi.cost import attention_seconds
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.collectives import tensor_parallel_seconds
from megatron_hexi.cost.compute import device_speeds, logits_times, token_times
from megatron_hexi.cost.expert_messages import ExpertRanks, exchange_seconds
from megatron_hexi.cost.experts import busiest_rows, routed_times
from megatron_hexi.cost.layer_bytes import Flights
from megatron_hexi.cost.memory import GIB, Holdings, owned_params, part_memory, part_params
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.models import Job
from megatron_hexi.plan import JobTerms, Plan, Replica, Stage
from megatron_hexi.plan.recompute import spell_recompute
from megatron_hexi.planner.expert_placement import spread_experts
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.layout import Layout, build_plan, units_by_rank
from megatron_hexi.planner.moves.edit import Place, with_stages, written_out


@dataclass(frozen=True, eq=False)
class FlagLayout:
    """A layout of Megatron's flags, whatever is recomputed and however stages are cut into chunks.

    Args:
        fleet: the units that the layout uses, all of them, with the GPUs of each on every stage; the job has
            tensor- and pipeline-parallel size.
        layouts: groups, tokens and heads of each replica.
        texts: description for people, for each baseline that may use the layout.
        expert: --expert-model-parallel-size; 1 for models without experts. Experts are whole
            (--expert-tensor-parallel-size 1).
        layers: number of layers of each stage; ``None``: equally many.
    """

    fleet: Fleet
    layouts: tuple[Layout, ...]
    texts: dict[str, str] = field(default_factory=dict)
    expert: int = 1
    layers: tuple[int, ...] | None = None

    @property
    def context(self) -> int:
        """Number of units of a replica (--context-parallel-size)."""
        return len(self.fleet.units) // len(self.layouts)

    @property
    def merged(self) -> int:
        """Number of replicas whose ranks together are an expert domain."""
        return max(1, self.expert // (self.fleet.job.tensor_parallel * self.context))

    @property
    def is_in_order(self) -> bool:
        """Whether replicas have consecutive ranks in order, as Megatron assigns them."""
        number = {unit: place for place, unit in enumerate(units_by_rank(self.fleet, self.layouts))}
        ranks = [
            sorted(number[unit] for part in layout.parts for unit in part.units) for layout in self.layouts
        ]
        dealt = [rank for replica_ranks in ranks for rank in replica_ranks]
        return dealt == sorted(dealt)

    def plan(self, job: Job, window: int) -> tuple[Plan, Job]:
        """Return the layout as a plan, and the job of that plan.

        Stages state `layers` where they differ, and where training needs it: with experts, and with several
        stages and multi-token prediction.

        Args:
            job: the fleet's job with recomputation and chunks.
            window: prefetch depth of the exchange, in steps.
        """
        model, job = job.model, replace(job, data_parallel=len(self.layouts))
        plan = build_plan(self.fleet, self.layouts, window)
        if model.experts is not None or self.layers or (model.mtp_layers and job.pipeline_parallel > 1):
            plan, job = written_out(plan, job)
        if self.layers is not None:
            ends = [0, *itertools.accumulate(self.layers)]

            def with_layers(place: Place, stage: Stage) -> Stage:
                return replace(stage, layers=(ends[place[1]], ends[place[1] + 1]))

            plan = with_stages(plan, with_layers)
        if model.experts is not None:
            plan = self._with_expert_domains(plan, model.experts.count)
            together = self.merged * job.micro_batch_size
            plan = replace(plan, job=JobTerms(micro_batch_size=together))
            job = replace(job, data_parallel=len(plan.replicas), micro_batch_size=together)
        return plan, job

    def _with_expert_domains(self, plan: Plan, experts: int) -> Plan:
        """Return the plan with replicas that share experts joined: each takes samples of its own."""
        replicas = []
        for joined in itertools.batched(plan.replicas, self.merged):
            samples = self.fleet.job.micro_batch_size if len(joined) > 1 else None
            stages = []
            for alike in zip(*(replica.stages for replica in joined), strict=True):
                domains = [replace(stage.domains[0], samples=samples) for stage in alike]
                placed = spread_experts(domains, experts, self.expert, lambda _rank: 1.0)
                stages.append(replace(alike[0], domains=placed))
            replicas.append(Replica(tuple(stages), joined[0].micro_batches))
        return replace(plan, replicas=tuple(replicas))

    def spell(self, job: Job) -> str:
        """Return Megatron's parallel sizes, chunks and recomputation of a job as text."""
        text = f"TP {job.tensor_parallel}, PP {self.fleet.job.pipeline_parallel}"
        if job.model.experts is not None:
            text += f", CP {self.context}, EP {self.expert}"
        if job.virtual_stages > 1:
            text += f", {job.virtual_stages} chunks a stage"
        return text if job.recompute == "none" else f"{text}, recompute {spell_recompute(job.recompute)}"


class Floor:
    """Lower bounds of several layouts on one fleet.

    Args:
        candidates: the layouts; they use all units of the fleet.
    """

    def __init__(self, candidates: Sequence[FlagLayout]) -> None:
        fleet = candidates[0].fleet
        self._fleet, self._job = fleet, fleet.job
        layouts = [layout for candidate in candidates for layout in candidate.layouts]
        parts = [part for layout in layouts for part in layout.parts]
        units, self._tokens, self._heads = (
            np.array([value for part in parts for value in getattr(part, name)])
            for name in ("units", "tokens", "heads")
        )
        sizes, groups = (
            np.array([len(each) for each in which])
            for which in ([part.units for part in parts], [layout.parts for layout in layouts])
        )
        #: First member of each group, first group of each replica, first replica of each candidate.
        self._group, self._replica = np.cumsum(sizes) - sizes, np.cumsum(groups) - groups
        replicas = np.array([len(each.layouts) for each in candidates])
        self._candidate = np.cumsum(replicas) - replicas
        self._totals = np.repeat(np.add.reduceat(self._tokens, self._group), sizes)
        self._micro_batches = np.array([layout.micro_batches for layout in layouts])
        self._shares = np.repeat(np.repeat(self._micro_batches, groups), sizes)
        #: Whether each member's group is its replica's only one, [members].
        self._alone = np.repeat(np.repeat(groups == 1, groups), sizes)
        #: Expert-parallel size of each member, [members].
        self._expert = np.repeat([each.expert for each in candidates], len(fleet.units))
        self._alike = [(each.context, each.expert) for each in candidates]
        devices = {id(device): device for kind in fleet.kinds for device in kind.devices}
        numbers = [[list(devices).index(id(device)) for device in kind.devices] for kind in fleet.kinds]
        #: Number of each member's device on each stage, [S, members].
        self._device = np.array([numbers[unit.kind] for unit in fleet.units]).T[:, units]
        self._usable = np.array([device.usable_gib for device in devices.values()])
        self._speeds = [device_speeds(device, fleet.job) for device in devices.values()]
        self._copies = np.array([own.fp8_copies for own in self._speeds])[self._device]
        self._units = units

    def seconds(self, job: Job) -> Floats:
        """Return a lower bound of each candidate's seconds, infinite where Megatron cannot interleave it.

        Args:
            job: the fleet's job with recomputation and chunks.
        """
        token = attention = np.zeros(self._device.shape)
        part = ModelPart.of_job(job, np.arange(job.pipeline_parallel))
        share = self._heads / (job.workload().local_heads * job.tensor_parallel)
        queries = job.micro_batch_size * self._totals * share
        for kind, held, (forward, both) in zip(job.kinds, part.of_kinds(job.model), self._token, strict=True):
            layers, again = (np.reshape(count, (-1, 1)) for count in held)
            token = token + layers * both + again * kind.again.is_whole * forward
            once, twice = (
                np.array([attention_seconds(own, each, True) for own in self._speeds])[self._device]
                / sum(each.model.layers_run)
                for each in (replace(kind, recompute="none"), kind)
            )
            # In a window the first of several groups sees fewer keys.
            seen = queries if kind.model.window is None else queries * self._alone
            attention = attention + (layers * once + again * (twice - once)) * seen
        slowest = np.maximum.reduceat(token, self._group, axis=1)
        slowest += np.maximum.reduceat(attention, self._group, axis=1)
        stages = np.maximum.reduceat(slowest, self._replica, axis=1)
        stages[-1] += self._logits
        longest = stages.max(axis=0)
        seconds = self._micro_batches * longest + (stages.sum(axis=0) - longest) / job.virtual_stages
        if job.virtual_stages > 1:
            seconds[self._micro_batches % job.pipeline_parallel != 0] = np.inf
        return np.maximum.reduceat(seconds, self._candidate) * (1 - 1e-9)  # rounding

    @cached_property
    def _token(self) -> list[tuple[Floats, Floats]]:
        """Seconds of one layer of each kind outside attention: forward, and in both passes, [S, members]."""
        fleet, rows = self._fleet, self._job.micro_batch_size * self._tokens.astype(float)
        cluster, found = fleet.cluster, []
        nodes = np.array([[cluster.ranks[part[0]].node for part in unit.gpus] for unit in fleet.units]).T
        width = self._job.tensor_parallel
        inside = np.array([(node.unit_bandwidth(width), node.latency_s) for node in cluster.nodes]).T
        bandwidth, latency = inside[:, nodes[:, self._units]]
        sums = tensor_parallel_seconds(self._job, rows, bandwidth, latency, self._copies > 0)
        for kind in self._job.kinds:
            passes = self._by_device([token_times(own, kind, rows) for own in self._speeds])
            passes += len(kind.model.parts) * sums
            if kind.model.experts is not None:
                passes += self._routed(kind) + 2 * self._exchanged(kind)
            found.append((passes[0], passes.sum(axis=0)))
        return found

    @cached_property
    def _logits(self) -> Floats:
        """Seconds of the slowest member's logits of a micro-batch, [replicas]."""
        rows = self._job.micro_batch_size * self._tokens.astype(float)
        passes = self._by_device([logits_times(own, self._job, rows) for own in self._speeds])
        return np.maximum.reduceat(passes.sum(axis=0)[-1], self._group[self._replica])

    def fullness(self, job: Job) -> Floats:
        """Return a lower bound of the part of its memory that the fullest GPU of each candidate needs.

        Args:
            job: the fleet's job with recomputation and chunks.
        """
        experts = job.model.expert_count or 0
        held = Holdings(
            tokens=self._tokens.astype(float),
            group_tokens=self._totals.astype(float),
            heads=self._heads.astype(float),
            kv=self._heads / job.workload().queries_per_kv,
            micro_batches=self._shares,
            flights=Flights(np.zeros(1), np.zeros(1)),
            experts=experts / self._expert if experts else 0.0,
            routed_rows=self._routed_rows(job) if experts else np.zeros(1),
            fp8_copies=self._copies,
        )
        part, units = ModelPart.of_job(job, np.arange(job.pipeline_parallel)[:, None]), len(self._fleet.units)
        shared = part_params(job, part)
        routed = part_params(job, part, held.experts) - shared
        owned = owned_params(job, part_params(job, part, trained=True), units)
        owned = owned + owned_params(job, routed, units * job.tensor_parallel / self._expert)
        needed = sum(part_memory(job, part, held, 1, owned).values())
        fullest = (needed / (GIB * self._usable[self._device])).max(axis=0)
        return np.maximum.reduceat(fullest, self._group[self._replica[self._candidate]])

    def _by_device(self, times: Sequence[Sequence[Floats]]) -> Floats:
        """Return the times of each member on each stage from those on each device, [..., S, members]."""
        member = np.arange(len(self._tokens))
        return np.array(times)[self._device, :, member].transpose(2, 0, 1)

    def _routed_rows(self, job: Job) -> Floats:
        """Return the number of rows that the experts of each member's GPU compute, [members]."""
        experts = job.model.expert_count or 0
        tokens = self._job.micro_batch_size * self._tokens * self._expert / job.tensor_parallel
        return busiest_rows(job, experts // self._expert, tokens)

    def _routed(self, kind: Job) -> Floats:
        """Return the seconds of routed experts in one layer, forward and backward, [2, S, members]."""
        count = (kind.model.expert_count or 0) // self._expert
        rows, whole = self._routed_rows(kind), np.ones(len(count), dtype=np.int64)
        return self._by_device([routed_times(own, kind, count, whole, rows) for own in self._speeds])

    def _exchanged(self, kind: Job) -> Floats:
        """Return the seconds of one all-to-all of a layer's experts, in the stage with the fastest links."""
        width, depth, links = (
            kind.tensor_parallel,
            self._job.pipeline_parallel,
            LinkTable(self._fleet.cluster),
        )
        units = self._fleet.units
        gpus = np.array([[gpu for unit in units for gpu in unit.gpus[stage]] for stage in range(depth)])
        unlike = {links.likeness(stage): stage for stage in gpus}.values()
        ranks, found = gpus.shape[1], {}
        for context, expert in dict.fromkeys(self._alike):
            rows = np.full(ranks, kind.micro_batch_size * kind.seq_length / (context * width))
            count = np.full(ranks, (kind.model.expert_count or 0) // expert)
            domain, alone = np.arange(ranks) // expert, np.zeros(ranks, dtype=np.int64)
            found[context, expert] = min(
                exchange_seconds(
                    kind, ExpertRanks(stage, domain, alone, rows, count, count.astype(float)), links
                ).max()
                for stage in unlike
            )
        return np.repeat([found[alike] for alike in self._alike], len(self._fleet.units))
