"""Finds the best layout of each baseline, or the reason why it has none."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from sys import float_info

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.cost.fit import Shortage, find_shortage
from megatron_hexi.cost.memory import GIB, RESERVE_BYTES, owned_params, part_params, static_memory
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.errors import HexiError
from megatron_hexi.models import RECOMPUTES, Job
from megatron_hexi.planner.baselines.arrange import nodes_of_one_model
from megatron_hexi.planner.baselines.expert_parallel import best_equal, spell_equal
from megatron_hexi.planner.baselines.race import BaselineSearch, TimedLayouts
from megatron_hexi.planner.baselines.rules import (
    HOMOGENEOUS,
    NAMES,
    UNIFORM,
    BaselineLayouts,
    candidates,
    replica_counts,
    why_none,
)
from megatron_hexi.planner.baselines.uneven_layers import best_uneven, spell_uneven, why_no_uneven
from megatron_hexi.planner.features import is_allowed
from megatron_hexi.planner.fleet.units import Fleet, find_units
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.layouts.trial import Progress, Trial, order_of
from megatron_hexi.planner.moves.edit import plan_of_whole, written_out
from megatron_hexi.planner.precision import one_precision
from megatron_hexi.planner.request import Request

#: Megatron's pipelines whose stages have different numbers of layers.
UNEVEN = "uneven-layers"
#: Megatron's flags with expert parallelism, for models with experts.
EQUAL_EXPERTS = "expert-parallel"
#: Name under which all equal layouts are compared, whichever baseline may use them.
_ANY = "any"
#: Numbers of stages of pipelines with equal stages.
_DEPTHS = [1, 2, 4, 8, 16]


@dataclass(frozen=True, eq=False)
class Baseline:
    """A baseline: its best layout, or the reason why it has none.

    Args:
        name: ``ring``, ``ulysses``, ``usp``, ``te-a2a+p2p``, ``proportion``, ``homogeneous`` or
            ``uneven-layers``; for models with experts ``expert-parallel`` or ``homogeneous``.
        trial: the best layout that its rules allow; ``None``: there is none, or none fits.
        why_not: reason why there is no `trial`, one sentence with numbers.
        layout: description of the best layout (or of the one that comes closest to fitting), for people.
        uniform: whether all of its GPUs get equal tokens and heads, whatever their speed.
    """

    name: str
    trial: Candidate | None
    why_not: str
    layout: str
    uniform: bool

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the global batch a second."""
        return None if self.trial is None else self.trial.tokens_per_s

    def on_whole(self, cluster: Cluster, left_out: Collection[int]) -> Baseline:
        """Return the baseline of a cluster without some nodes with GPUs numbered as in all of it."""
        if not left_out or self.trial is None:
            return self
        plan = plan_of_whole(self.trial.plan, cluster, left_out)
        return replace(self, trial=Candidate(plan, self.trial.job, self.trial.timing))


def find_baselines(
    request: Request, cluster: Cluster, *, progress: Progress | None = None
) -> tuple[tuple[Baseline, ...], int]:
    """Return all baselines, each with its best layout; kernels and overlap are those of plans.

    All ranks compute in one precision: fp8 on GPUs that have it alone, or bf16 on all. Each is tried with all
    tensor-parallel sizes, numbers of equal stages, chunks of these, numbers of equal
    replicas, and recomputation, except those that the request fixes. So ``usp`` is the best equal layout that
    Megatron can run.

    Args:
        progress: callback, receives (phase, done, total).

    Returns:
        The baselines, and how many layouts were timed.
    """
    found: dict[str, Baseline] = {}
    timed = 0
    for asked, left_out in one_precision(request, cluster):
        try:
            own, more = _find_baselines(asked, cluster.without(left_out) if left_out else cluster, progress)
        except HexiError:
            if not left_out:
                raise
            continue  # sizes that are fixed may be too large for a part of the cluster
        timed += more
        for baseline in own:
            best = found.get(baseline.name)
            if best is None or (baseline.tokens_per_s or 0) > (best.tokens_per_s or 0):
                found[baseline.name] = baseline.on_whole(cluster, left_out)
    return tuple(found.values()), timed


def _find_baselines(
    request: Request, cluster: Cluster, progress: Progress | None
) -> tuple[tuple[Baseline, ...], int]:
    """Return the baselines of a request in which all GPUs compute in one precision."""
    if request.job.model.experts is not None:
        everything = tuple(range(len(cluster.nodes)))
        found = {
            name: best_equal(request, cluster, progress=progress, parts=parts)
            for name, parts in {
                EQUAL_EXPERTS: [everything],
                HOMOGENEOUS: nodes_of_one_model(cluster),
            }.items()
        }
        equal = tuple(_equal_experts(name, best, cluster) for name, (best, _) in found.items())
        return equal, sum(timed for _, timed in found.values())
    replicas = _fixed_replicas(request)
    fleets = _fleets(request, cluster)
    race = BaselineSearch(inf, progress)
    race.run(_entrants(fleets, request, inf))
    baselines = [_baseline(name, race.best.get(name), fleets, replicas) for name in NAMES]
    uneven, timed = best_uneven(request, cluster)
    why = why_no_uneven(request) if uneven is None else ""
    baselines.append(Baseline(UNEVEN, uneven, why, "" if uneven is None else spell_uneven(uneven), False))
    return tuple(baselines), race.trials + timed


def find_faster(
    request: Request, cluster: Cluster, faster_than: float, *, progress: Progress | None = None
) -> tuple[Candidate | None, int]:
    """Return the fastest layout that Megatron's flags can express, and how many layouts were timed.

    The layout is ``None`` if none is fast enough. Fleets whose lower bound is too slow are skipped.

    Args:
        faster_than: seconds of an iteration that the layout must beat; infinite: any that fits.
        progress: callback, receives (phase, done, total).
    """
    if request.job.model.experts is not None:
        best, trials = best_equal(request, cluster, faster_than, progress)
        return (best if best is not None and best.iteration_s < faster_than else None), trials
    race = BaselineSearch(min(faster_than, float_info.max), progress)
    equal = not request.rules.allow("unequal_replicas")
    race.run(
        [replace(each, texts={_ANY: ""}) for each in entrants if each.is_in_order or not equal]
        for entrants in _entrants(_fleets(request, cluster), request, faster_than)
    )
    candidates_found: list[Candidate] = [best.trial for best in race.best.values()]
    if request.job.model.mtp_layers:
        candidates_found = [_trainable(candidate, cluster) for candidate in candidates_found]
    fastest = min((candidate.iteration_s for candidate in candidates_found if candidate.fits), default=inf)
    uneven, timed = best_uneven(request, cluster, min(faster_than, fastest))
    candidates_found += [] if uneven is None else [uneven]
    allowed = (
        candidate for candidate in candidates_found if is_allowed(candidate.plan, candidate.job, request)
    )
    faster = (candidate for candidate in allowed if candidate.fits and candidate.iteration_s < faster_than)
    return min(faster, key=order_of, default=None), race.trials + timed


def _equal_experts(name: str, best: Candidate | None, cluster: Cluster) -> Baseline:
    why = "" if best is not None else "no equal layout of Megatron's flags fits in memory"
    return Baseline(
        name, best, why, "" if best is None else spell_equal(best, cluster), name == EQUAL_EXPERTS
    )


def _fixed_replicas(request: Request) -> int | None:
    return request.job.data_parallel if "data_parallel" in request.fixed else None


def _trainable(found: Candidate, cluster: Cluster) -> Candidate:
    """Return a layout with `layers` in each of several stages, as training multi-token prediction needs."""
    if found.job.pipeline_parallel == 1:
        return found
    plan, job = written_out(found.plan, found.job)
    return Candidate(plan, job, CostModel(job, cluster).timing(plan))


def _entrants(
    fleets: Sequence[Fleet], request: Request, faster_than: float
) -> Iterator[list[BaselineLayouts]]:
    """Yield the layouts on each fleet that may be fast enough, on each GPU model alone, in so many chunks."""
    for fleet in fleets:
        alone = {id(part): part for part in _homogeneous_parts(fleet)}
        for part in ({id(fleet): fleet} | alone).values():
            if part.job.global_batch_size * part.job.seq_length / part.ceiling_tokens_per_s >= faster_than:
                continue
            names = [name for name in NAMES if (id(part) in alone if name == HOMOGENEOUS else part is fleet)]
            counts = replica_counts(part, _fixed_replicas(request), request.context_parallel)
            layouts = candidates(part, counts, names)
            for chunks in request.chunk_counts(part.job):
                cut = replace(part, job=replace(part.job, virtual_stages=chunks)) if chunks > 1 else part
                yield [replace(each, fleet=cut) for each in layouts]


def _fleets(request: Request, cluster: Cluster) -> list[Fleet]:
    """Return a fleet for each choice of flags that may fit; if none may, for the one that needs least memory.

    Empty if no choice divides the layers equally among the pipeline's stages.

    Raises:
        HexiError: the cluster has no units for any choice of flags.
    """
    job, fixed = request.job, request.fixed
    widest = max(len(node.ranks) for node in cluster.nodes)
    depths = [job.pipeline_parallel] if "pipeline_parallel" in fixed else _DEPTHS
    again = [job.recompute] if "recompute" in fixed else list(RECOMPUTES)
    problem: HexiError | None = None
    has_units = False
    fleets: list[tuple[float, Fleet]] = []
    for width, depth, recompute in itertools.product(request.widths(widest), depths, again):
        try:
            flags = replace(
                request.with_width(width),
                pipeline_parallel=depth,
                recompute=recompute,
                micro_batch_size=request.micro_batch_sizes()[0],
            )
            fleet = find_units(flags, cluster)
        except HexiError as refused:
            problem = problem or refused
            continue
        has_units = True
        if flags.has_equal_stages and request.chunk_counts(flags):
            fleets.append((_least_bytes(fleet), fleet))
    if not fleets:
        if problem is not None and not has_units:
            raise problem
        return []
    most = max(node.device.usable_gib for node in cluster.nodes) * GIB
    fitting = [fleet for needed, fleet in fleets if needed <= most]
    return fitting or [min(fleets, key=lambda entry: entry[0])[1]]


def _least_bytes(fleet: Fleet) -> float:
    """Return the bytes that a GPU of the smallest stage needs at least, without activations."""
    job = fleet.job
    params = float(np.min(part_params(job, ModelPart.of_job(job, np.arange(job.pipeline_parallel)))))
    owned = owned_params(job, params, len(fleet.units))
    return float(
        sum(static_memory(job, ModelPart.of_job(job, 0), params, params, owned).values()) + RESERVE_BYTES
    )


def _homogeneous_parts(fleet: Fleet) -> list[Fleet]:
    """Return a fleet for each set of nodes with GPUs of one model that has units of its own."""
    nodes_of = [
        {fleet.cluster.ranks[stage[0]].node for stage in fleet_unit.gpus} for fleet_unit in fleet.units
    ]
    parts = [
        [unit for unit, own in enumerate(nodes_of) if own <= nodes]
        for nodes in map(set, nodes_of_one_model(fleet.cluster))
    ]
    return [fleet if len(units) == len(fleet.units) else fleet.subset(units) for units in parts if units]


def _baseline(
    name: str, best: TimedLayouts | None, fleets: list[Fleet], data_parallel: int | None
) -> Baseline:
    uniform = name in UNIFORM
    if best is None:
        return Baseline(name, None, _no_layout(name, fleets, data_parallel), "", uniform)
    trial = best.trial
    text = _spell_layout(name, best.candidate, trial.window)
    if trial.fits:
        return Baseline(name, trial, "", text, uniform)
    return Baseline(name, None, f"short of memory: {_spell_shortage(trial)}", text, uniform)


def _no_layout(name: str, fleets: Sequence[Fleet], data_parallel: int | None) -> str:
    """Return the reason why a baseline has no layout with the first choice of Megatron's flags."""
    if not fleets:
        return "the layers cannot be shared equally by so many pipeline stages, or chunks of these"
    fleet = fleets[0]
    alone = _homogeneous_parts(fleet)
    if name != HOMOGENEOUS:
        return why_none(fleet, data_parallel, name)
    if not alone:
        return "every unit has GPUs of several models"
    return "; ".join(f"{_spell_gpus(part)}: {why_none(part, data_parallel, name)}" for part in alone)


def _spell_layout(name: str, candidate: BaselineLayouts, window: int) -> str:
    several = max(len(layout.parts) for layout in candidate.layouts) > 1
    text = candidate.texts[name] + (f", window {window}" if several else "")
    text = f"{_spell_flags(candidate.fleet.job)}: {text}"
    return f"{_spell_gpus(candidate.fleet)} alone: {text}" if name == HOMOGENEOUS else text


def _spell_flags(job: Job) -> str:
    """Return a job's parallel sizes and recomputation as text."""
    chunks = "" if job.virtual_stages == 1 else f", {job.virtual_stages} chunks a stage"
    recompute = "" if job.recompute == "none" else f", recompute {job.recompute}"
    return f"TP {job.tensor_parallel}, PP {job.pipeline_parallel}{chunks}{recompute}"


def _spell_gpus(fleet: Fleet) -> str:
    """Return the number and the model of a fleet's GPUs as text."""
    gpus = len(fleet.units) * fleet.job.tensor_parallel * fleet.job.pipeline_parallel
    return f"{gpus} {fleet.kinds[fleet.units[0].kind].name}"


def _spell_shortage(trial: Trial) -> str:
    """Return text about the fullest GPU: its rank, the memory it needs and has, and the largest term."""
    short = find_shortage(CostModel(trial.job, trial.fleet.cluster).estimate(trial.plan))
    assert isinstance(short, Shortage), "what does not fit is short of a GPU's memory: none is offloaded"
    return (
        f"rank {short.rank} ({short.name}, {short.device}) needs {short.needed_gib:.1f} GiB and has "
        f"{short.usable_gib:.1f}, most of it {short.term.replace('_', ' ')}, {short.term_gib:.1f} GiB"
    )
