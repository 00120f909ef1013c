"""`find_plan`: from a job and a cluster to a plan, what it costs, and how far from the best it can be."""

from __future__ import annotations

import time
from dataclasses import replace
from importlib.metadata import version

from megatron_hexi import __version__
from megatron_hexi.cluster import Cluster, cluster_digest
from megatron_hexi.cost import CostModel, Job
from megatron_hexi.errors import HexiError
from megatron_hexi.plan import Estimate, Provenance
from megatron_hexi.planner.advice import nothing_fits
from megatron_hexi.planner.baselines import Baseline, find_baselines
from megatron_hexi.planner.bound import Bound, LowerBound
from megatron_hexi.planner.budget import SHORT, THOROUGH, Budget
from megatron_hexi.planner.fleet.choose import fleets
from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.room import fleet_has_room
from megatron_hexi.planner.fleet.units import Fleet, find_units
from megatron_hexi.planner.layouts.layout import Grouping
from megatron_hexi.planner.layouts.trial import Judge, Trial
from megatron_hexi.planner.result import Planned, Progress
from megatron_hexi.planner.search.domain import DomainSearch
from megatron_hexi.planner.search.guess import FirstGuess
from megatron_hexi.planner.search.replicas import ReplicaSearch, equal_deals, free_deals
from megatron_hexi.planner.tuning.improve import LEFT, improve
from megatron_hexi.planner.tuning.solver import SEED, refine

#: Of up to so many units, `auto` also tries equal replicas on every set of them.
_FEW_UNITS = 8


def find_plan(
    job: Job,
    cluster: Cluster,
    *,
    data_parallel: int | None = 1,
    with_baselines: bool = False,
    thorough: bool = False,
    progress: Progress | None = None,
) -> Planned:
    """The best plan found, never slower than a baseline, with a proof of how far from the best it can be.

    Args:
        job: the job; its own `data_parallel` is not looked at.
        cluster: where it runs.
        data_parallel: replicas, equal in size and share; ``None``: as many as are best, equal or not.
        with_baselines: time every baseline, also those that cannot win.
        thorough: look much longer for a better plan and a closer proof: random changes of groupings besides,
            and more of everything (budget.py).
        progress: told how far it is.

    Raises:
        NothingFitsError: no plan fits in memory; says what would.
        HexiError: the job cannot be cut as asked for.
    """
    begun = time.perf_counter()
    tell: Progress = progress or (lambda _what, _done, _of: None)
    fleet = find_units(replace(job, data_parallel=data_parallel or 1), cluster)
    _check_replicas(fleet, data_parallel)
    judge = Judge(fleet)
    _check_room(judge, fleet, data_parallel or 1)
    best = _search(judge, fleet, data_parallel, tell)
    tell("baselines", 0, 1)
    limit = float("inf") if with_baselines or not best.fits else best.iteration_s
    baselines = find_baselines(judge, fleet, data_parallel, faster_than=limit, progress=tell)
    for baseline in baselines:
        if baseline.trial is not None and baseline.trial.order < best.order:
            best = baseline.trial
    tell("CP-SAT", 0, 1)
    best = refine(judge, best).trial
    if not best.fits:
        raise nothing_fits(fleet, best)
    tell("bound", 0, 1)
    budget = THOROUGH if thorough else SHORT
    lower = LowerBound(fleet, data_parallel, best.iteration_s, budget.proof)
    bound = lower.roughly()
    if best.iteration_s > (1 + LEFT) * bound.iteration_s:
        tell("changes", 0, 1)
        named = _named(fleet, best, lower, data_parallel, budget)
        best = improve(judge, fleet, best, named, bound.iteration_s, budget)
        if thorough:
            # The shorter an iteration is known to be possible, the closer the same work comes.
            lower = LowerBound(fleet, data_parallel, best.iteration_s, budget.proof)
    tell("proof", 0, 1)
    bound = lower.closely(best.iteration_s)
    return _planned(fleet, best, bound, baselines, judge.trials, begun)


def _check_replicas(fleet: Fleet, count: int | None) -> None:
    if count is None:
        return
    job, units = fleet.job, len(fleet.units)
    together = job.global_batch_size // job.micro_batch_size
    if count > units:
        raise HexiError(
            f"data_parallel = {count}: cluster {fleet.cluster.name} has units for {units} replicas (tensor "
            f"{job.tensor_parallel} x pipeline {job.pipeline_parallel} GPUs each); give {units} or fewer"
        )
    if together % count:
        raise HexiError(
            f"data_parallel = {count} does not divide the {together} micro-batches of an iteration (global "
            f"batch {job.global_batch_size} / micro-batch {job.micro_batch_size}); give a divisor, or auto"
        )


def _check_room(judge: Judge, fleet: Fleet, replicas: int) -> None:
    """Say at once that nothing fits: all memory together is too small for a sequence of each replica."""
    if not fleet_has_room(fleet, replicas):
        everything = (tuple(range(len(fleet.units))),)
        together = fleet.job.global_batch_size // fleet.job.micro_batch_size
        layout = FirstGuess(fleet, Rates(fleet)).layout(everything, together)
        raise nothing_fits(fleet, judge.try_out(fleet, [layout], 1))


def _search(judge: Judge, fleet: Fleet, data_parallel: int | None, tell: Progress) -> Trial:
    """All units or some of them, as one replica or several: the best of everything that can be the best."""
    together = fleet.job.global_batch_size // fleet.job.micro_batch_size
    tokens = fleet.job.global_batch_size * fleet.job.seq_length
    best: Trial | None = None
    parts = list(fleets(fleet))
    for number, part in enumerate(parts):
        tell("units", number, len(parts))
        if _is_beaten(best, tokens / part.ceiling_tokens_per_s):
            continue
        replicas = ReplicaSearch(judge, part, together)
        for count in _equal_counts(fleet, part, data_parallel, together):
            if count == 1:
                best = _better(best, DomainSearch(judge, _as_one(part), together).run())
                continue
            for equal in dict.fromkeys(equal_deals(part, count)):
                best = _better(best, replicas.equal(equal))
    assert best is not None  # the first part is everything
    if data_parallel is None:
        replicas = ReplicaSearch(judge, fleet, together)
        deals = list(free_deals(fleet, together))
        for number, deal in enumerate(deals):
            tell("replicas", number, len(deals))
            found = replicas.free(deal, best.iteration_s if best.fits else float("inf"))
            best = best if found is None else _better(best, found)
    return best


def _named(
    fleet: Fleet, best: Trial, lower: LowerBound, data_parallel: int | None, budget: Budget
) -> tuple[Grouping, ...]:
    """Groupings that the bound does not rule out to be faster; of many units they are not looked at."""
    if len(fleet.units) > budget.walked:
        return ()
    named = lower.groupings()
    if data_parallel is None and len(best.layouts) == 1:
        # Of one replica, other groupings hold most than of as many as one likes.
        named += LowerBound(fleet, 1, best.iteration_s, budget.proof).groupings()
    return tuple(dict.fromkeys(named))


def _equal_counts(fleet: Fleet, part: Fleet, data_parallel: int | None, together: int) -> list[int]:
    """Numbers of equal replicas to try on some of the units: the one given; on few units all; else one."""
    if data_parallel is not None:
        return [data_parallel] if data_parallel <= len(part.units) else []
    most = min(together, len(part.units)) if len(fleet.units) <= _FEW_UNITS else 1
    return [count for count in range(1, most + 1) if together % count == 0]


def _as_one(fleet: Fleet) -> Fleet:
    return replace(fleet, job=replace(fleet.job, data_parallel=1))


def _is_beaten(best: Trial | None, least_s: float) -> bool:
    return best is not None and best.fits and least_s >= best.iteration_s


def _better(best: Trial | None, other: Trial) -> Trial:
    return other if best is None or other.order < best.order else best


def _planned(
    fleet: Fleet,
    best: Trial,
    bound: Bound,
    baselines: tuple[Baseline, ...],
    trials: int,
    begun: float,
) -> Planned:
    job = replace(fleet.job, data_parallel=len(best.layouts))
    cost = CostModel(job, fleet.cluster).estimate(best.plan)
    planned = Planned(best.plan, job, cost, bound, baselines, trials, 0.0, _notes(fleet, best))
    against = {item.name: item.trial.tokens_per_s for item in baselines if item.trial is not None}
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
        cluster=fleet.cluster.name,
        cluster_digest=cluster_digest(fleet.cluster),
        model=job.model.name,
    )
    plan = replace(best.plan, estimate=estimate, provenance=provenance)
    return replace(planned, plan=plan, planning_s=time.perf_counter() - begun)


def _notes(fleet: Fleet, best: Trial) -> tuple[str, ...]:
    """What has nothing to do, and why."""
    cluster, notes = fleet.cluster, []
    if fleet.left_out:
        names = ", ".join(cluster.rank_name(gpu) for gpu in fleet.left_out[:4])
        more = f" and {len(fleet.left_out) - 4} more" if len(fleet.left_out) > 4 else ""
        notes.append(f"{names}{more} left out: too few GPUs on their node for a unit of this job")
    idle = len(fleet.units) - sum(len(layout.units) for layout in best.layouts)
    if idle:
        notes.append(
            f"{idle} of {len(fleet.units)} units left out: nothing found with them fits and is faster"
        )
    return tuple(notes)
