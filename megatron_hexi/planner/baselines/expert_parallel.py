"""The best layout of Megatron's flags for a model with experts: GPUs taken as alike, experts in equal parts.

Flags are tensor-, pipeline-, context- and expert-parallel size, and recomputation; experts are whole
(--expert-tensor-parallel-size 1). Each layout is written out as a plan that costs as much as Megatron's own
layout: replicas that share expert-parallel ranks are one replica there, whose domains take a sample each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.errors import HexiError
from megatron_hexi.models import RECOMPUTES, Job
from megatron_hexi.plan import Domain, Exchange, Group, JobTerms, Member, Plan, Replica, Stage
from megatron_hexi.plan.layout import apportion, causal_segments, consecutive
from megatron_hexi.plan.proportion import worthwhile_parts
from megatron_hexi.plan.terms import Recompute
from megatron_hexi.plan.units import expert_domains
from megatron_hexi.planner.baselines.arrange import nodes_of_one_model
from megatron_hexi.planner.baselines.expert_flags import EqualFloor, ExpertFlags
from megatron_hexi.planner.expert_placement import spread_experts
from megatron_hexi.planner.features import is_allowed
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.layouts.layout import with_experts
from megatron_hexi.planner.layouts.trial import Progress, order_of
from megatron_hexi.planner.request import Request

#: Numbers of stages of pipelines with equal stages.
_DEPTHS = (1, 2, 4, 8, 16)
#: Prefetch depth of the exchange, in steps.
_WINDOW = 1


def best_equal(
    request: Request,
    cluster: Cluster,
    faster_than: float = math.inf,
    progress: Progress | None = None,
    parts: Sequence[tuple[int, ...]] | None = None,
) -> tuple[Candidate | None, int]:
    """Return the fastest equal layout that fits, and how many were timed; ``None``: none is fast enough.

    Args:
        parts: sets of nodes, each of which is tried; ``None``: all nodes, and each of `nodes_of_one_model`.
        faster_than: seconds of an iteration; layouts whose lower bound is no smaller are not timed.
        progress: callback, receives (phase, done, total).
    """
    modes = [request.job.recompute] if "recompute" in request.fixed else RECOMPUTES
    choices: list[tuple[float, Recompute, ExpertFlags, tuple[int, ...]]] = []
    everything = tuple(range(len(cluster.nodes)))
    for nodes in dict.fromkeys([everything, *nodes_of_one_model(cluster)] if parts is None else parts):
        part = cluster.without(set(range(len(cluster.nodes))).difference(nodes))
        gpus = tuple(gpu for node in nodes for gpu in cluster.nodes[node].ranks)
        floor = EqualFloor(request, part)
        choices += [
            (floor.seconds(flags, mode), mode, flags, gpus)
            for flags, mode in itertools.product(_choices(request, part, floor, modes[-1]), modes)
            if floor.may_fit(flags, mode)
        ]
    choices.sort(key=lambda choice: choice[0])
    model = cache(partial(CostModel, cluster=cluster))
    best: Candidate | None = None
    trials, fitting = 0, set()
    for number, (floor_s, recompute, flags, gpus) in enumerate(choices):
        if progress is not None:
            progress("layouts of Megatron's flags", number, len(choices))
        if floor_s >= (faster_than if best is None else min(faster_than, best.iteration_s)):
            break
        if (flags, gpus) in fitting:  # more recomputation only takes longer
            continue
        trials += 1
        candidate = _candidate(flags, recompute, request, gpus, model)
        if candidate is not None and candidate.fits:
            fitting.add((flags, gpus))
            if is_allowed(candidate.plan, candidate.job, request):
                best = candidate if best is None else min(best, candidate, key=order_of)
    return best, trials


def _choices(request: Request, cluster: Cluster, floor: EqualFloor, most: Recompute) -> Iterator[ExpertFlags]:
    """Yield flags that use all GPUs and may fit in memory with `most`, the mode that recomputes most."""
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
            # With documents a micro-batch is one sequence, so that no two replicas form an expert domain.
            joined = replicas if job.documents is None else 1
            flags = [
                ExpertFlags(width, depth, context, size, 1)
                for size in _expert_sizes(experts.count, width, context, joined)
                if request.expert_parallel in (None, size)
            ]
            fitting = [choice for choice in flags if floor.may_fit(choice, most)]
            of_node = [choice for choice in fitting if choice.expert <= smallest]
            # The two smallest sizes that may fit, the largest inside a node, and the largest: sizes between
            # these send more messages over the same links.
            for choice in dict.fromkeys([*fitting[:2], *of_node[-1:], *fitting[-1:]]):
                for group in _groups(request.with_width(width), context):
                    yield replace(choice, group=group)


def _expert_sizes(count: int, width: int, context: int, replicas: int) -> list[int]:
    """Return expert-parallel sizes to try: numbers of ranks of whole units, in one or several replicas.

    A size below a unit's number of ranks would make the unit hold copies of experts, which saves nothing.
    """
    sizes = [width * n for n in range(1, context + 1) if context % n == 0]
    sizes += [width * context * n for n in range(2, replicas + 1) if replicas % n == 0]
    return [size for size in sizes if count % size == 0]


def _groups(job: Job, context: int) -> list[int]:
    """Return sizes of all-to-all groups: 1 (a ring), and the largest with equal KV heads for all units.

    If the model has layers with a state, the only size is all units; none if these do not divide the heads.
    """
    if job.model.state is not None:
        return [context] if job.workload().local_heads % context == 0 else []
    heads = job.workload().local_kv_heads
    return sorted({1, max(n for n in range(1, context + 1) if context % n == 0 and heads % n == 0)})


def _candidate(
    flags: ExpertFlags,
    recompute: Recompute,
    request: Request,
    gpus: tuple[int, ...],
    model: Callable[[Job], CostModel],
) -> Candidate | None:
    """Return the timed layout of these flags on some GPUs; ``None``: the model cannot be cut in this way."""
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
        return Candidate(plan, job, model(job).timing(plan))
    except HexiError:
        return None


def spell_equal(found: Candidate, cluster: Cluster) -> str:
    """Return a layout of `best_equal` as text: its GPUs, Megatron's parallel sizes and recomputation."""
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
    gpus = ""
    if plan.gpus is not None:
        gpus = f"{len(plan.gpus)} {cluster.ranks[plan.gpus[0]].device.name} alone: "
    again = "" if stage.recompute in (None, "none") else f", recompute {stage.recompute}"
    return f"{gpus}{flags}{again}"


def equal_plan(flags: ExpertFlags, job: Job, gpus: int) -> Plan:
    """Return Megatron's layout of these flags as a plan with `layers` in each stage.

    Args:
        job: the job, with its recomputation; a micro-batch has the samples of all merged replicas.
        gpus: number of GPUs; their ranks are numbered stage by stage.
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
            stages.append(Stage(domains, layers=layers, recompute=job.recompute, exchange=exchange))
        share = job.global_batch_size // job.micro_batch_size * per_replica // per_stage
        replicas.append(Replica(tuple(stages), share))
    workload = replace(with_experts(job.workload(), job), tensor_parallel=flags.tensor)
    return Plan(workload, tuple(replicas), job=JobTerms(micro_batch_size=job.micro_batch_size))


def _domains(flags: ExpertFlags, job: Job, first: int) -> tuple[Domain, ...]:
    """Return the domains of a stage with ranks from `first` on: one for each merged replica."""
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
