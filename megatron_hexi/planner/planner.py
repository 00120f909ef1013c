"""Finds a plan for a job on a cluster, its cost, and its largest distance from the best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version

from megatron_hexi import __version__
from megatron_hexi.cluster import Cluster, cluster_digest
from megatron_hexi.cost import CostModel
from megatron_hexi.errors import ClusterError, HexiError
from megatron_hexi.plan import Estimate, Provenance
from megatron_hexi.plan.flags import spell_flag
from megatron_hexi.planner.advice import nothing_fits
from megatron_hexi.planner.baselines import Baseline, find_baselines, find_faster
from megatron_hexi.planner.bound import Bound, lower_bound, memory_fits
from megatron_hexi.planner.expert_placement import expert_rules
from megatron_hexi.planner.features import means_of
from megatron_hexi.planner.improve import Improvement, best_of_each_kind, first_plan
from megatron_hexi.planner.joint import DEEPEST, Candidate, JointSearches
from megatron_hexi.planner.joint.packing import SEED
from megatron_hexi.planner.layouts.trial import Progress, noting, order_of
from megatron_hexi.planner.longest import with_longest_sequence
from megatron_hexi.planner.notes import gpus_of, left_out, margin_note, spell_savings, why_saved
from megatron_hexi.planner.precision import (
    as_quick_in_bf16,
    precision_notes,
    refuse_without_fp8,
    with_precision,
    without_fp8,
)
from megatron_hexi.planner.request import Request, refuse_untrained
from megatron_hexi.planner.result import Planned
from megatron_hexi.planner.simplest import SIMPLEST, choose


def find_plan(
    request: Request,
    cluster: Cluster,
    *,
    with_baselines: bool = False,
    simpler_within: float = 0.0,
    progress: Progress | None = None,
    tried: Callable[[str, Candidate], None] | None = None,
) -> Planned:
    """Return the best plan found, with a lower bound over all layouts.

    Args:
        request: the job, with the terms that are fixed; the planner chooses the others.
        with_baselines: whether to time every baseline, too. The plan is the same in both cases.
        simpler_within: part of an iteration by which the plan may take longer than the fastest one if it has
            fewer means (`means_of`); 0: the fastest plan, whatever it uses.
        progress: callback, receives (phase, done, total).
        tried: callback, receives the phase and each plan that the search times.

    Raises:
        NothingFitsError: no plan fits in memory; the message proposes changes of the request.
        ClusterError: the GPUs of a node differ.
        HexiError: no layout on the cluster has the sizes that are fixed, or training has no plan for the
            model's layers.
    """
    begun = time.perf_counter()
    request = replace(request, rules=request.rules.over(cluster.file.planner))
    refuse_untrained(request)
    phase = ""

    def tell(what: str, done: int, of: int) -> None:
        nonlocal phase
        phase = what
        if progress is not None:
            progress(what, done, of)

    searches = JointSearches(tell)
    _check_nodes(cluster)
    refuse_without_fp8(request, cluster)
    _check_fixed(request, cluster)
    if not memory_fits(request, cluster):
        raise nothing_fits(request, cluster, partial(_first_trained, searches), proven=True)
    asked = request
    with noting(None if tried is None else lambda candidate: tried(phase, candidate)):
        result, request, machines, fp8_s = _search_precisions(request, cluster, searches, tell)
        equal, timed = _equal_layouts(asked, machines, result, simpler_within, tell)
    if result.best is None:
        raise nothing_fits(asked, cluster, partial(_first_trained, searches), proven=False)
    choice = choose(result.best, [*result.tried, *equal], cluster, simpler_within)
    best = choice.chosen
    trials = searches.trials + result.trials + timed
    baselines: tuple[Baseline, ...] = ()
    if with_baselines:
        roomy = cluster.with_memory_margin(1 - result.memory)
        baselines, timed = find_baselines(_without_dealing(asked), roomy, progress=tell)
        trials += timed
    tell("lower bound", 0, 1)
    bound = lower_bound(asked, cluster, best.iteration_s)
    planned = _planned(best, cluster, machines, bound, baselines, trials, begun)
    notes = (
        *why_saved(best.plan, best.iteration_s, result.unsaved_s),
        *margin_note(planned.cost, request.memory_margin),
        *left_out(best, cluster, [*result.tried, result.best]),
        *precision_notes(asked.job, cluster, machines, fp8_s / best.iteration_s - 1),
    )
    slower = [plan for plan in result.tried if plan.iteration_s >= best.iteration_s]
    rivals = best_of_each_kind(slower, best)
    return replace(planned, rivals=rivals, notes=notes, unsaved_s=result.unsaved_s, choice=choice)


def longest_request(request: Request, cluster: Cluster, progress: Progress) -> Request:
    """Return the request with the longest sequence for which a plan is found (`with_longest_sequence`)."""
    searches = JointSearches(progress)
    return with_longest_sequence(request, cluster, partial(_first_trained, searches), progress)


def _without_dealing(request: Request) -> Request:
    """Return the request as Megatron's flags train it.

    Each document is cut over all groups, and every rank encodes all images of its sequences.
    """
    job = request.job
    if job.documents is not None:
        job = replace(job, documents=replace(job.documents, dealt=False))
    if job.images is not None:
        job = replace(job, images=replace(job.images, divided=False))
    return replace(request, job=job)


@dataclass(frozen=True)
class _SearchResult:
    """The result of the search for one request.

    Args:
        best: the fastest plan that fits; ``None``: none was found.
        tried: plans that were timed and fit, none of which saves memory but by recomputation.
        unsaved_s: seconds of an iteration of the fastest of `tried`; infinite: there is none.
    """

    best: Candidate | None
    tried: list[Candidate]
    unsaved_s: float
    memory: float
    trials: int


def _first_trained(searches: JointSearches, request: Request, cluster: Cluster) -> Candidate | None:
    """Return the first plan that fits and that training accepts; ``None`` if no plan does."""
    try:
        refuse_untrained(request)
        return first_plan(searches, request, cluster)
    except HexiError:
        return None


def _equal_layouts(
    request: Request, cluster: Cluster, result: _SearchResult, within: float, tell: Progress
) -> tuple[list[Candidate], int]:
    """Return the best layout of Megatron's flags if it may be the simplest plan, and how many were timed.

    The search times such layouts only where it finds nothing else. On GPUs of several kinds they leave the
    faster ones idle, which takes longer than a simpler plan may.

    Args:
        within: part of an iteration by which the plan may take longer than the fastest; 0: no layout is.
    """
    if result.best is None or within == 0 or not means_of(result.best.plan, cluster):
        return [], 0
    if len({cluster.ranks[gpu].device.name for gpu in gpus_of(result.best.plan, cluster)}) > 1:
        return [], 0
    plain = replace(request, job=replace(request.job, latent_exchange=False))
    roomy = cluster.with_memory_margin(1 - result.memory)
    most_s = (1 + max(within, SIMPLEST)) * result.best.iteration_s
    best, trials = find_faster(plain, roomy, most_s, most=request.most_timings, progress=tell)
    return ([] if best is None else [best]), trials


def _search_precisions(
    request: Request, cluster: Cluster, searches: JointSearches, tell: Progress
) -> tuple[_SearchResult, Request, Cluster, float]:
    """Search with fp8 on all GPUs that have it, and in bf16 on those that are about as quick so.

    Returns:
        The faster result, the request with its placement of experts, the cluster without rates in fp8 of GPUs
        that are not to use it, and the seconds of an iteration with fp8 on all that have it.
    """
    result, choice = _search_experts(request, cluster, searches, tell)
    fp8_s = math.inf if result.best is None else result.best.iteration_s
    models = as_quick_in_bf16(request, cluster, result.best)
    if models:
        machines = without_fp8(cluster, models)
        plain, placed = _search_experts(request, machines, searches, tell, fp8_s)
        trials = result.trials + plain.trials
        if plain.best is not None and plain.best.iteration_s < fp8_s:
            result, choice, cluster = plain, placed, machines
        result = replace(result, trials=trials)
    return result, choice, cluster, fp8_s


def _search_experts(
    request: Request, cluster: Cluster, searches: JointSearches, tell: Progress, fastest_s: float = math.inf
) -> tuple[_SearchResult, Request]:
    """Search with each placement of experts; return the best result, and the request with its placement.

    For models with latent attention search again, with that placement and the exchange of latent columns in
    place of keys and values.

    Args:
        fastest_s: seconds of an iteration of a plan that is known; slower ones are left out.
    """
    best: tuple[_SearchResult, Request] | None = None
    trials = 0
    improvements = cache(partial(Improvement, request, cluster, searches=searches))
    for rule in expert_rules(
        request.job, cluster, request.expert_parallel, request.rules.allow("unequal_experts")
    ):
        choice = replace(request, experts=rule)
        result = _search(choice, cluster, searches, improvements, tell, fastest_s)
        trials += result.trials
        if best is None or (result.best is not None and result.best.iteration_s < fastest_s):
            best = result, choice
            fastest_s = fastest_s if result.best is None else min(fastest_s, result.best.iteration_s)
    assert best is not None, "there is a rule for every model"
    for sends_latent in request.job.model.attention.exchanges[1:]:
        choice = replace(best[1], job=replace(request.job, latent_exchange=sends_latent))
        result = _search(choice, cluster, searches, improvements, tell, fastest_s)
        trials += result.trials
        if result.best is not None and result.best.iteration_s < fastest_s:
            best = result, choice
    return replace(best[0], trials=trials), best[1]


def _search(
    request: Request,
    cluster: Cluster,
    searches: JointSearches,
    improvements: Callable[[float], Improvement],
    tell: Progress,
    faster_than: float,
) -> _SearchResult:
    """Search for the fastest plan that fits, at first with the margin of memory kept free.

    Args:
        improvements: returns the moves for plans that may use a part of the GPUs' memory.
        faster_than: seconds of an iteration of a plan found with another placement or exchange; if finite,
            layouts of Megatron's flags are not tried.
    """
    trials = 0
    for memory in dict.fromkeys((1 - request.memory_margin, 1.0)):
        tried = searches.plans(request, cluster, memory, faster_than)
        best = min(tried, key=order_of, default=None)
        if faster_than < math.inf:
            break
        roomy = cluster.with_memory_margin(1 - memory)
        # The search may pass over the only layouts that fit; where stages must be equal it has no pipelines;
        # and on two of forty random fleets Megatron's flags were faster, by 0.001 and 1.7 %. They exchange no
        # latent columns.
        plain = replace(request, job=replace(request.job, latent_exchange=False))
        least_s, most = (math.inf, math.inf) if best is None else (best.iteration_s, request.most_timings)
        faster, timed = find_faster(plain, roomy, least_s, most=most, progress=tell)
        trials += timed
        if faster is not None:
            best = faster
            tried.append(faster)
        if best is not None:
            break
    unsaved_s = math.inf if best is None else best.iteration_s
    if best is None and faster_than < math.inf:
        return _SearchResult(None, tried, unsaved_s, memory, trials)
    tell("moves from the best plans", 0, 1)
    improvement = improvements(memory)
    before = improvement.trials
    if best is None:
        best = improvement.made_to_fit(request)
    else:
        best = improvement.best(request, best, tried, faster_than)
    if best is not None and best not in tried and not spell_savings(best.plan):
        # Found for GPUs with more memory, it fits these as it is: more replicas share its optimizer's state.
        tried.append(best)
        unsaved_s = min(unsaved_s, best.iteration_s)
    return _SearchResult(best, tried, unsaved_s, memory, trials + improvement.trials - before)


def _check_nodes(cluster: Cluster) -> None:
    """Refuse nodes whose GPUs differ (no cluster file has any): pools and units are made of whole nodes."""
    for node in cluster.nodes:
        for rank in node.ranks:
            if cluster.ranks[rank].device is not node.device:
                raise ClusterError(
                    f"node {node.name} of cluster {cluster.name}: {cluster.rank_name(rank)} is not as fast "
                    "as the others, and plans take a node's GPUs as alike; give all of them the speed of the "
                    "slowest, or leave the node out"
                )


def check_depth(stages: int, layers: int) -> None:
    """Refuse a pipeline that is deeper than any that is planned.

    Raises:
        HexiError: there are more stages than layers, or than the planner tries.
    """
    most = min(DEEPEST, layers)
    if stages > most:
        why = (
            f"the model has {layers} layers"
            if layers < DEEPEST
            else f"pipelines of up to {DEEPEST} stages are planned"
        )
        raise HexiError(
            f"{spell_flag('pipeline_parallel', stages)}: {why}; give {most} or fewer, or leave it to the "
            "planner"
        )


def _check_fixed(request: Request, cluster: Cluster) -> None:
    """Refuse fixed sizes that no layout on the cluster can have."""
    job, gpus = request.job, len(cluster.ranks)
    if "pipeline_parallel" in request.fixed:
        check_depth(job.pipeline_parallel, job.model.layers)
    chunks = request.virtual_stages
    if chunks is not None and "pipeline_parallel" in request.fixed:
        replace(job, virtual_stages=chunks)  # refuses what Megatron cannot cut
    unit = request.context_parallel or 1
    sizes = [] if request.context_parallel is None else [spell_flag("context_parallel", unit)]
    for name in ("tensor_parallel", "pipeline_parallel"):
        if name in request.fixed:
            unit *= getattr(job, name)
            sizes.append(spell_flag(name, getattr(job, name)))
    if unit > gpus:
        raise HexiError(
            f"{' '.join(sizes)}: take {unit} GPUs, cluster {cluster.name} has {gpus}; give smaller sizes"
        )
    _check_expert_domains(request, cluster)
    if "data_parallel" not in request.fixed:
        return
    least = request.micro_batch_sizes()[0]
    batch = job.global_batch_size // least
    if job.data_parallel * unit > gpus and gpus // unit <= batch:
        raise HexiError(
            f"{spell_flag('data_parallel', job.data_parallel)}: cluster {cluster.name} has {gpus} GPUs, for "
            f"{gpus // unit} replicas of {unit} or more; give {gpus // unit} or fewer, or auto"
        )
    if job.data_parallel > batch:
        raise HexiError(
            f"{spell_flag('data_parallel', job.data_parallel)}: an iteration has {batch} micro-batches "
            f"(global batch {job.global_batch_size} / micro-batch {least}); give {batch} or fewer, or auto"
        )


def _check_expert_domains(request: Request, cluster: Cluster) -> None:
    """Refuse a fixed expert-parallel size that is not a number of whole units of one stage."""
    job, size = request.job, request.expert_parallel
    if size is None:
        return
    spelled, stages = spell_flag("expert_parallel", size), 1
    if "pipeline_parallel" in request.fixed:
        stages = job.pipeline_parallel
    if size * stages > len(cluster.ranks):
        raise HexiError(
            f"{spelled}: an expert domain lies in one stage, and a stage of {len(cluster.ranks) // stages} "
            f"GPUs is the largest on cluster {cluster.name}; give that or less"
        )
    if "tensor_parallel" in request.fixed and size % job.tensor_parallel:
        width = spell_flag("tensor_parallel", job.tensor_parallel)
        raise HexiError(f"{spelled}: expert domains are whole units of {width}; give a multiple of that")


def _planned(
    best: Candidate,
    cluster: Cluster,
    machines: Cluster,
    bound: Bound,
    baselines: tuple[Baseline, ...],
    trials: int,
    begun: float,
) -> Planned:
    plan, job = with_precision(best.plan, best.job, machines)
    cost = CostModel(job, cluster).estimate(plan)
    planned = Planned(plan, job, cost, bound, baselines, trials, 0.0)
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
        model=job.model.name,
    )
    plan = replace(plan, estimate=estimate, provenance=provenance)
    return replace(planned, plan=plan, planning_s=time.perf_counter() - begun)
