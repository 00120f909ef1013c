"""The best layout of Megatron's flags for a model with experts: GPUs taken as alike, experts in equal parts.

Flags are tensor-, pipeline-, context- and expert-parallel size, and recomputation; experts are whole
(--expert-tensor-parallel-size 1). Each layout is written out as a plan, which costs what Megatron's own
would: expert-parallel ranks of several replicas are one replica there, whose domains take a sample each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import RECOMPUTES, CostModel, Job, ceiling_tokens_per_s
from megatron_hexi.cost.memory import GIB, ModelPart, part_params, static_memory
from megatron_hexi.errors import HexiError
from megatron_hexi.plan import Domain, Exchange, Group, JobTerms, Member, Plan, Replica, Stage
from megatron_hexi.plan.experts import expert_domains
from megatron_hexi.plan.layout import apportion, causal_segments, consecutive
from megatron_hexi.plan.parts import worthwhile_parts
from megatron_hexi.planner.expert_placement import spread_experts
from megatron_hexi.planner.features import is_allowed
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.layouts.layout import with_experts
from megatron_hexi.planner.layouts.trial import Progress, order_of
from megatron_hexi.planner.request import Request

#: Pipelines whose stages have as many layers each.
_DEPTHS = (1, 2, 4, 8, 16)
#: Exchange steps whose keys are under way.
_WINDOW = 1


@dataclass(frozen=True)
class ExpertFlags:
    """Sizes of Megatron's flags.

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
        """Replicas whose ranks hold the experts together."""
        return max(1, self.expert // (self.tensor * self.context))

    def __str__(self) -> str:
        return f"TP {self.tensor}, PP {self.pipeline}, CP {self.context}, EP {self.expert}"


def best_equal(
    request: Request, cluster: Cluster, progress: Progress | None = None
) -> tuple[Candidate | None, int]:
    """The fastest equal layout that fits, and how many were timed; ``None``: none fits.

    Args:
        request: the job; what it fixes stays.
        cluster: where: on all GPUs, and on those of each model alone.
        progress: callback, receives (phase, done, total).
    """
    choices = []
    for nodes in _alike(cluster):
        part = cluster.without(set(range(len(cluster.nodes))).difference(nodes))
        gpus = tuple(gpu for node in nodes for gpu in cluster.nodes[node].ranks)
        floor = _floor_s(request, part)
        choices += [(floor(flags), flags, gpus) for flags in _choices(request, part)]
    choices.sort(key=lambda choice: choice[0])
    model = cache(partial(CostModel, cluster=cluster))
    best: Candidate | None = None
    trials = 0
    for number, (floor_s, flags, gpus) in enumerate(choices):
        if progress is not None:
            progress("Megatron's flags", number, len(choices))
        if best is not None and floor_s >= best.iteration_s:
            break
        for candidate in _in_modes(flags, request, gpus, model):
            trials += 1
            if candidate.fits:  # more recomputation only takes longer
                if is_allowed(candidate.plan, request):
                    best = candidate if best is None else min(best, candidate, key=order_of)
                break
    return best, trials


def _alike(cluster: Cluster) -> list[list[int]]:
    """The nodes that equal layouts are tried on: all, and where GPUs differ those of each model."""
    of_model: dict[int, list[int]] = {}
    for number, node in enumerate(cluster.nodes):
        of_model.setdefault(id(node.device), []).append(number)
    everything = list(range(len(cluster.nodes)))
    return [everything, *(of_model.values() if len(of_model) > 1 else ())]


def _choices(request: Request, cluster: Cluster) -> Iterator[ExpertFlags]:
    """The flags that fill the cluster and that some GPU has memory for."""
    job, gpus = request.job, len(cluster.ranks)
    experts = job.model.experts
    assert experts is not None
    smallest = min(len(node.ranks) for node in cluster.nodes)
    depths = [job.pipeline_parallel] if "pipeline_parallel" in request.fixed else _DEPTHS
    for width, depth in itertools.product(request.widths(smallest), depths):
        if gpus % (width * depth) or job.model.layers % depth:
            continue
        units = gpus // (width * depth)
        for context in [n for n in range(1, units + 1) if units % n == 0]:
            if request.context_parallel not in (None, context):
                continue
            replicas = units // context
            if "data_parallel" in request.fixed and replicas != job.data_parallel:
                continue
            if job.global_batch_size % (replicas * request.micro_batch_sizes()[0]) or any(
                len(node.ranks) % width for node in cluster.nodes
            ):
                continue
            flags = [
                ExpertFlags(width, depth, context, size, 1)
                for size in _expert_sizes(experts.count, width, context, replicas)
            ]
            fitting = [choice for choice in flags if _may_fit(choice, request, cluster)]
            of_node = [choice for choice in fitting if choice.expert <= smallest]
            # The least two that may fit, the ranks of a node, and as many as there are: those between are
            # more messages over the same links.
            for choice in dict.fromkeys([*fitting[:2], *of_node[-1:], *fitting[-1:]]):
                for group in _groups(request.with_width(width), context):
                    yield replace(choice, group=group)


def _floor_s(request: Request, cluster: Cluster) -> Callable[[ExpertFlags], float]:
    """Seconds that an equal layout takes at least: the slowest GPU's part of all work, and the bubble."""
    job = replace(request.job, recompute="none")
    slowest = max(1 / ceiling_tokens_per_s(job, [node.device]) for node in cluster.nodes)
    work = slowest * job.seq_length * job.global_batch_size / len(cluster.ranks)

    def seconds(flags: ExpertFlags) -> float:
        replicas = len(cluster.ranks) // (flags.tensor * flags.pipeline * flags.context)
        micro_batches = job.global_batch_size // (replicas * request.micro_batch_sizes()[0])
        return work * (micro_batches + flags.pipeline - 1) / micro_batches

    return seconds


def _expert_sizes(count: int, width: int, context: int, replicas: int) -> list[int]:
    """Expert-parallel sizes: whole units of a replica, or the ranks of several replicas.

    Less than a unit's ranks would hold copies of an expert inside it, which takes memory and saves nothing.
    """
    sizes = [width * n for n in range(1, context + 1) if context % n == 0]
    sizes += [width * context * n for n in range(2, replicas + 1) if replicas % n == 0]
    return [size for size in sizes if count % size == 0]


def _groups(job: Job, context: int) -> list[int]:
    """Sizes of all-to-all groups: a ring, and the largest that has a KV head for each unit."""
    heads = job.workload().local_kv_heads
    return sorted({1, max(n for n in range(1, context + 1) if context % n == 0 and heads % n == 0)})


def _may_fit(flags: ExpertFlags, request: Request, cluster: Cluster) -> bool:
    """Whether weights, gradients and state of a stage without embeddings fit on the largest GPU."""
    job = replace(request.with_width(flags.tensor), pipeline_parallel=1)
    experts = job.model.experts
    assert experts is not None
    layers = job.model.layers // flags.pipeline
    part = ModelPart(layers, 0, is_first=False, is_last=False, ahead=1)
    params = float(part_params(job, part, experts.count / flags.expert))
    owned = params * flags.pipeline / len(cluster.ranks)
    needed = float(sum(static_memory(job, part, params, params, owned).values()))
    return needed <= GIB * max(node.device.usable_gib for node in cluster.nodes)


def _in_modes(
    flags: ExpertFlags, request: Request, gpus: tuple[int, ...], model: Callable[[Job], CostModel]
) -> Iterator[Candidate]:
    """The layout on some of a cluster's GPUs, with ever more recomputation."""
    fixed = "recompute" in request.fixed
    for recompute in [request.job.recompute] if fixed else RECOMPUTES:
        job = replace(
            request.with_width(flags.tensor),
            pipeline_parallel=1,
            micro_batch_size=flags.merged * request.micro_batch_sizes()[0],
            recompute="none",
        )
        try:
            plan = equal_plan(flags, replace(job, recompute=recompute), len(gpus))
            job = replace(job, data_parallel=len(plan.replicas))
            whole = gpus == tuple(range(len(model(job).cluster.ranks)))
            plan = replace(plan, gpus=None if whole else gpus)
            yield Candidate(plan, job, model(job).timing(plan))
        except HexiError:  # a size that the model cannot be cut into
            return


def spell_equal(found: Candidate) -> str:
    """Megatron's flags of a layout of `best_equal`, for people."""
    plan, (stage, *_) = found.plan, found.plan.replicas[0].stages
    assert plan.workload.experts is not None
    members = stage.domains[0].members
    flags = ExpertFlags(
        tensor=len(members[0].ranks),
        pipeline=len(plan.replicas[0].stages),
        context=len(members),
        expert=len(expert_domains(stage, plan.workload.experts)[0]),
        group=len(stage.domains[0].groups[0].members),
    )
    gpus = "" if plan.gpus is None else f"{len(plan.gpus)} GPUs alone: "
    again = "" if stage.recompute in (None, "none") else f", recompute {stage.recompute}"
    return f"{gpus}{flags}{again}"


def equal_plan(flags: ExpertFlags, job: Job, gpus: int) -> Plan:
    """Megatron's layout of these flags, written out.

    Args:
        flags: the sizes; they divide each other.
        job: the job, with its recomputation; a micro-batch has a sample of each merged replica.
        gpus: of the cluster, in whose order ranks are.
    """
    per_stage = gpus // flags.pipeline
    per_replica = flags.tensor * flags.context * flags.merged
    replicas = []
    for first in range(0, per_stage, per_replica):
        stages = []
        for stage in range(flags.pipeline):
            begin = stage * per_stage + first
            layers = (
                stage * job.model.layers // flags.pipeline,
                (stage + 1) * job.model.layers // flags.pipeline,
            )
            domains = _domains(flags, job, begin)
            alone = [Replica((Stage((domain,)),)) for domain in domains]
            exchange = Exchange(_WINDOW, worthwhile_parts(alone))
            stages.append(Stage(domains, layers, job.recompute, exchange))
        share = job.global_batch_size // job.micro_batch_size * per_replica // per_stage
        replicas.append(Replica(tuple(stages), share))
    workload = replace(with_experts(job.workload(), job), tensor_parallel=flags.tensor)
    return Plan(workload, tuple(replicas), job=JobTerms(micro_batch_size=job.micro_batch_size))


def _domains(flags: ExpertFlags, job: Job, first: int) -> tuple[Domain, ...]:
    """The domains of a stage whose ranks begin at `first`: one for each sample."""
    domains = []
    for sample in range(flags.merged):
        ranks = [
            tuple(range(begin, begin + flags.tensor))
            for begin in itertools.islice(
                itertools.count(first + sample * flags.tensor * flags.context, flags.tensor), flags.context
            )
        ]
        groups = _groups_of(ranks, flags.group, job)
        domains.append(
            Domain(groups, samples=job.micro_batch_size // flags.merged if flags.merged > 1 else None)
        )
    experts = job.model.experts
    assert experts is not None
    return spread_experts(domains, experts.count, flags.expert, lambda _: 1.0)


def _groups_of(ranks: Sequence[tuple[int, ...]], size: int, job: Job) -> tuple[Group, ...]:
    count = len(ranks) // size
    totals = apportion(job.seq_length, [1.0] * count)
    heads = consecutive([job.workload().local_heads // size] * size)
    groups = []
    for number, (total, segments) in enumerate(zip(totals, causal_segments(totals), strict=True)):
        tokens = apportion(total, [1.0] * size)
        own = ranks[number * size : (number + 1) * size]
        members = (Member(*each) for each in zip(own, tokens, heads, strict=True))
        groups.append(Group(segments, tuple(members)))
    return tuple(groups)
