"""`find_plan`: from a job and a cluster to a plan, what it costs, and how far from the best it can be."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import version

from megatron_hexi import __version__
from megatron_hexi.cluster import Cluster, cluster_digest
from megatron_hexi.cost import CostModel, IterationCost
from megatron_hexi.errors import ClusterError, HexiError
from megatron_hexi.plan import Estimate, Plan, Provenance
from megatron_hexi.plan.flags import spell_flag
from megatron_hexi.planner.advice import nothing_fits
from megatron_hexi.planner.baselines import Baseline, find_baselines, find_faster
from megatron_hexi.planner.bound import Bound, joint_bound, memory_fits
from megatron_hexi.planner.joint import DEEPEST, Candidate, JointSearches
from megatron_hexi.planner.layouts.trial import Progress, order_of
from megatron_hexi.planner.request import Request
from megatron_hexi.planner.result import Planned
from megatron_hexi.planner.rivals import best_of_each_kind
from megatron_hexi.planner.saved_plans import SavedPlans, first_plan
from megatron_hexi.planner.savings import spell_savings
from megatron_hexi.planner.search.solver import SEED

#: On so many GPUs it takes a part of the search's own time to see whether any baseline is faster.
_CHECKED = 32


def find_plan(
    request: Request,
    cluster: Cluster,
    *,
    with_baselines: bool = False,
    progress: Progress | None = None,
) -> Planned:
    """The best plan found, and how far from the best of all layouts it can be.

    Args:
        request: the job, and what of it is fixed; the rest is chosen.
        cluster: where it runs.
        with_baselines: time every baseline too. The plan is never slower than one of these, nor without
            them on up to 32 GPUs.
        progress: told how far it is.

    Raises:
        NothingFitsError: no plan fits in memory; says what would.
        ClusterError: the GPUs of a node differ.
        HexiError: the job cannot be cut as asked for.
    """
    begun = time.perf_counter()
    tell: Progress = progress or (lambda _what, _done, _of: None)
    searches = JointSearches(tell)
    _check_nodes(cluster)
    _check_fixed(request, cluster)
    if not memory_fits(request, cluster):
        raise nothing_fits(request, cluster, partial(first_plan, searches), proven=True)
    memory = 1 - request.memory_margin
    found = searches.plans(request, cluster, memory)
    if not found and memory < 1:
        memory = 1.0
        found = searches.plans(request, cluster, memory)
    roomy = cluster.with_memory_margin(1 - memory)
    best = min(found, key=order_of, default=None)
    baselines: tuple[Baseline, ...] = ()
    trials = 0
    if with_baselines:
        baselines, trials = find_baselines(request, roomy, progress=tell)
        others = [one.trial for one in baselines if one.trial is not None]
        best = min([*([] if best is None else [best]), *others], key=order_of, default=None)
    elif len(cluster.ranks) <= _CHECKED:  # what the search passes over may be all that fits
        faster, trials = find_faster(request, roomy, math.inf if best is None else best.iteration_s)
        best = faster or best
    unsaved_s = math.inf if best is None else best.iteration_s
    tell("memory", 0, 1)
    saved = SavedPlans(request, cluster, memory, searches)
    best = saved.made_to_fit() if best is None else saved.best(best, found)
    if best is None:
        raise nothing_fits(request, cluster, partial(first_plan, searches), proven=False)
    tell("bound", 0, 1)
    bound = joint_bound(request, cluster, best.iteration_s)
    trials += searches.trials + saved.trials
    planned = _planned(best, cluster, bound, baselines, trials, begun)
    why = _why_saved(best.plan, best.iteration_s, unsaved_s)
    notes = (*why, *_margin_note(planned.cost, request.memory_margin), *planned.notes)
    return replace(planned, rivals=best_of_each_kind(found, best), notes=notes, unsaved_s=unsaved_s)


def _check_nodes(cluster: Cluster) -> None:
    """Refuse nodes whose GPUs differ, which no cluster file has: pools and units are made of whole nodes."""
    for node in cluster.nodes:
        for rank in node.ranks:
            if cluster.ranks[rank].device is not node.device:
                raise ClusterError(
                    f"node {node.name} of cluster {cluster.name}: {cluster.rank_name(rank)} is not as fast "
                    "as the others, and plans take a node's GPUs as alike; give all of them the speed of the "
                    "slowest, or leave the node out"
                )


def _why_saved(plan: Plan, seconds: float, unsaved_s: float) -> tuple[str, ...]:
    """What saves memory, and what it brings."""
    what = spell_savings(plan)
    if seconds >= unsaved_s:
        return ()
    without = "no layout was found that fits"
    if unsaved_s < math.inf:
        without = f"the best layout takes {unsaved_s / seconds - 1:.1%} longer"
    return (f"{what or "GPUs with the same weights share the optimizer's state"}: without that {without}",)


def _check_fixed(request: Request, cluster: Cluster) -> None:
    """Refuse fixed numbers that no layout has."""
    job, gpus = request.job, len(cluster.ranks)
    if "pipeline_parallel" in request.fixed and job.pipeline_parallel > DEEPEST:
        raise HexiError(
            f"{spell_flag('pipeline_parallel', job.pipeline_parallel)}: pipelines of up to {DEEPEST} stages "
            f"are planned; give {DEEPEST} or fewer, or leave it to the planner"
        )
    if "data_parallel" not in request.fixed:
        return
    least = request.micro_batch_sizes()[0]
    batch = job.global_batch_size // least
    unit = 1
    for name in ("tensor_parallel", "pipeline_parallel"):
        unit *= getattr(job, name) if name in request.fixed else 1
    if job.data_parallel * unit > gpus:
        raise HexiError(
            f"{spell_flag('data_parallel', job.data_parallel)}: cluster {cluster.name} has {gpus} GPUs, for "
            f"{gpus // unit} replicas of {unit} or more; give {gpus // unit} or fewer, or auto"
        )
    if job.data_parallel > batch:
        raise HexiError(
            f"{spell_flag('data_parallel', job.data_parallel)}: an iteration has {batch} micro-batches "
            f"(global batch {job.global_batch_size} / micro-batch {least}); give {batch} or fewer, or auto"
        )


def _margin_note(cost: IterationCost, margin: float) -> tuple[str, ...]:
    """A warning where the margin is not kept."""
    fullest = max(cost.ranks, key=lambda rank: rank.memory_gib / rank.usable_gib)
    free = 1 - fullest.memory_gib / fullest.usable_gib
    if free >= margin - 1e-9:
        return ()
    warning = (
        f"no plan was found that keeps {margin:.0%} of usable memory free: this one leaves {free:.1%} on "
        f"{fullest.name} ({fullest.memory_gib:.1f} of {fullest.usable_gib:.1f} GiB) and may run out of memory"
    )
    return (warning,)


def _planned(
    best: Candidate,
    cluster: Cluster,
    bound: Bound,
    baselines: tuple[Baseline, ...],
    trials: int,
    begun: float,
) -> Planned:
    cost = CostModel(best.job, cluster).estimate(best.plan)
    planned = Planned(best.plan, best.job, cost, bound, baselines, trials, 0.0, _notes(best.plan, cluster))
    against = {item.name: item.tokens_per_s for item in baselines if item.tokens_per_s is not None}
    estimate = Estimate(
        iteration_s=cost.iteration_s,
        tokens_per_s=cost.tokens_per_s,
        lower_bound_s=bound.iteration_s,
        gap=planned.gap,
        memory_gib=cost.memory_gib,
        against=against or None,
    )
    provenance = Provenance(
        planner=f"megatron-hexi {__version__}",
        solver=f"OR-Tools CP-SAT {version('ortools')}",
        seed=SEED,
        cluster=cluster.name,
        cluster_digest=cluster_digest(cluster),
        model=best.job.model.name,
    )
    plan = replace(best.plan, estimate=estimate, provenance=provenance)
    return replace(planned, plan=plan, planning_s=time.perf_counter() - begun)


def _notes(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """What has nothing to do."""
    if plan.gpus is None:
        return ()
    idle = [gpu for gpu in range(len(cluster.ranks)) if gpu not in set(plan.gpus)]
    if not idle:
        return ()
    names = ", ".join(cluster.rank_name(gpu) for gpu in idle[:4])
    more = f" and {len(idle) - 4} more" if len(idle) > 4 else ""
    return (
        f"{len(idle)} of {len(cluster.ranks)} GPUs left out ({names}{more}): no plan with them is faster",
    )
