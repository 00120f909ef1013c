"""Finds the best layout of each baseline, or the reason why it has none."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.fit import Shortage, find_shortage
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Job
from megatron_hexi.planner.baselines.flags import FlagLayout, Floor
from megatron_hexi.planner.baselines.race import (
    Entrant,
    Race,
    Timed,
    best_uneven,
    spell_uneven,
    why_no_uneven,
)
from megatron_hexi.planner.baselines.rules import (
    ANY,
    EXPERTS,
    HOMOGENEOUS,
    NAMES,
    UNIFORM,
    candidates,
    expert_sizes,
    nodes_of_one_model,
    replica_counts,
    why_none,
)
from megatron_hexi.planner.features import is_allowed
from megatron_hexi.planner.fleet.units import Fleet, find_units, stages_in_turn
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.layouts.trial import Progress, order_of
from megatron_hexi.planner.moves.edit import plan_of_whole
from megatron_hexi.planner.precision import one_precision
from megatron_hexi.planner.recomputation import offered
from megatron_hexi.planner.request import Request

#: Megatron's pipelines whose stages have different numbers of layers.
UNEVEN = "uneven-layers"
#: Numbers of stages of pipelines with equal stages.
_DEPTHS = [1, 2, 4, 8, 16]
#: Fleets with the baselines that may use them.
Fleets = Sequence[tuple[Fleet, Sequence[str]]]


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
    race, fleets = Race(cluster, inf, progress), list(_fleets(request, cluster))
    entrants = list(_entrants(fleets, request, inf))
    race.run(entrants)
    race.add_fullest(entrants)
    if request.job.model.experts is not None:
        return tuple(_baseline(name, race, fleets, request) for name in (EXPERTS, HOMOGENEOUS)), race.trials
    uneven, timed = best_uneven(request, cluster)
    why = why_no_uneven(request) if uneven is None else ""
    baselines = [_baseline(name, race, fleets, request) for name in NAMES]
    baselines.append(Baseline(UNEVEN, uneven, why, "" if uneven is None else spell_uneven(uneven), False))
    return tuple(baselines), race.trials + timed


def find_faster(
    request: Request,
    cluster: Cluster,
    faster_than: float,
    *,
    most: float = inf,
    progress: Progress | None = None,
) -> tuple[Candidate | None, int]:
    """Return the fastest layout that Megatron's flags can express, and how many layouts were timed.

    The layout is ``None`` if none is fast enough. Fleets whose lower bound is too slow are skipped.

    Args:
        faster_than: seconds of an iteration that the layout must beat; infinite: any that fits.
        most: the most equal layouts that are timed, those with the least bounds.
        progress: callback, receives (phase, done, total).
    """
    race, equal = Race(cluster, faster_than, progress, most), not request.rules.allow("unequal_replicas")
    fleets = ((fleet, (ANY,)) for fleet, _ in _fleets(request, cluster))
    entrants = _entrants(fleets, request, faster_than)
    race.run(one for one in entrants if not equal or one.layout.is_in_order)
    found = [timed.candidate for timed in race.best.values()]
    fastest = min((candidate.iteration_s for candidate in found if candidate.fits), default=inf)
    timed = 0
    if request.job.model.experts is None:
        uneven, timed = best_uneven(request, cluster, min(faster_than, fastest))
        found += [] if uneven is None else [uneven]
    allowed = (candidate for candidate in found if is_allowed(candidate.plan, candidate.job, request))
    faster = (candidate for candidate in allowed if candidate.fits and candidate.iteration_s < faster_than)
    return min(faster, key=order_of, default=None), race.trials + timed


def _entrants(
    fleets: Iterable[tuple[Fleet, Sequence[str]]], request: Request, faster_than: float
) -> Iterator[Entrant]:
    """Yield the layouts on each fleet that may be fast enough, in so many chunks, with each recomputation."""
    fixed = _fixed_replicas(request)
    modes = offered(request, request.job)
    for fleet, names in fleets:
        job = fleet.job
        if job.global_batch_size * job.seq_length / fleet.ceiling_tokens_per_s >= faster_than:
            continue
        layouts = candidates(fleet, replica_counts(fleet, fixed, request.context_parallel), names)
        if job.model.experts is not None:
            most = replace(job, recompute=modes[-1])
            layouts = [sized for layout in layouts for sized in _with_experts(layout, most, request)]
        if not layouts:
            continue
        floor = Floor(layouts)
        all_chunks = request.chunk_counts(job) if job.model.experts is None else [1]
        for mode, chunks in itertools.product(modes, all_chunks):
            asked = replace(job, recompute=mode, virtual_stages=chunks)
            bounds = floor.seconds(asked).tolist(), floor.fullness(asked).tolist()
            for least_s, fullness, layout in zip(*bounds, layouts, strict=True):
                yield Entrant(least_s, fullness, layout, asked)


def _with_experts(layout: FlagLayout, job: Job, request: Request) -> list[FlagLayout]:
    """Return a layout with each expert-parallel size to try.

    The two smallest sizes that may fit, the largest inside a node, and the largest: sizes between these send
    more messages over the same links.

    Args:
        job: the fleet's job with the recomputation that saves most memory.
    """
    sizes = [size for size in expert_sizes(layout) if request.expert_parallel in (None, size)]
    if not sizes:
        return []
    cluster = layout.fleet.cluster
    nodes = {cluster.ranks[gpu].node for unit in layout.fleet.units for part in unit.gpus for gpu in part}
    smallest = min(len(cluster.nodes[node].ranks) for node in nodes)
    sized = [replace(layout, expert=size) for size in sizes]
    fullness = Floor(sized).fullness(job).tolist()
    fitting = [each for each, full in zip(sized, fullness, strict=True) if full <= 1]
    of_node = [each for each in fitting if each.expert <= smallest]
    return list(dict.fromkeys([*fitting[:2], *of_node[-1:], *(fitting or sized)[-1:]]))


def _fleets(request: Request, cluster: Cluster) -> Iterator[tuple[Fleet, Sequence[str]]]:
    """Yield the fleets of each tensor- and pipeline-parallel size, with the baselines that may use them.

    All GPUs, and those of one model alone. None if no size divides the layers equally among the stages.

    Raises:
        HexiError: the cluster has no units of any size.
    """
    job, experts = request.job, request.job.model.experts is not None
    sizes = [len(node.ranks) for node in cluster.nodes]
    depths = [job.pipeline_parallel] if "pipeline_parallel" in request.fixed else _DEPTHS
    problem: HexiError | None = None
    has_units = False
    for width, depth in itertools.product(request.widths(min(sizes) if experts else max(sizes)), depths):
        try:
            flags = replace(
                request.with_width(width),
                pipeline_parallel=depth,
                micro_batch_size=request.micro_batch_sizes()[0],
            )
            found = list((_staged_fleets if experts else _stacked_fleets)(flags, cluster))
        except HexiError as refused:
            problem = problem or refused
            continue
        has_units = True
        has_first_layers = depth == 1 or flags.stage_layers >= flags.first_layers
        if flags.has_equal_stages and has_first_layers and request.chunk_counts(flags):
            yield from found
    if problem is not None and not has_units:
        raise problem


def _stacked_fleets(job: Job, cluster: Cluster) -> Iterator[tuple[Fleet, Sequence[str]]]:
    """Yield all units, whose stages are alike, and those on nodes with GPUs of one model."""
    fleet = find_units(job, cluster)
    nodes_of = [{cluster.ranks[stage[0]].node for stage in unit.gpus} for unit in fleet.units]
    everywhere: Sequence[str] = NAMES[:-1]
    for nodes in map(set, nodes_of_one_model(cluster)):
        units = [unit for unit, own in enumerate(nodes_of) if own <= nodes]
        if len(units) == len(fleet.units):
            everywhere = NAMES
        elif units:
            yield fleet.subset(units), (HOMOGENEOUS,)
    yield fleet, everywhere


def _staged_fleets(job: Job, cluster: Cluster) -> Iterator[tuple[Fleet, Sequence[str]]]:
    """Yield all units, stage after stage in the order of nodes, and those on nodes with GPUs of one model."""
    width = job.tensor_parallel
    alone = nodes_of_one_model(cluster)
    everything = tuple(range(len(cluster.nodes)))
    for nodes in dict.fromkeys([everything, *alone]):
        gpus = [cluster.nodes[node].ranks for node in nodes]
        units = [own[first : first + width] for own in gpus for first in range(0, len(own), width)]
        if len(units) % job.pipeline_parallel or any(len(own) % width for own in gpus):
            continue
        names = [EXPERTS] * (nodes == everything) + [HOMOGENEOUS] * (nodes in alone)
        yield stages_in_turn(job, cluster, list(map(tuple, units))), names


def _fixed_replicas(request: Request) -> int | None:
    return request.job.data_parallel if "data_parallel" in request.fixed else None


def _baseline(name: str, race: Race, fleets: Fleets, request: Request) -> Baseline:
    uniform, best = name in UNIFORM, race.best.get(name)
    if best is None:
        return Baseline(name, None, _no_layout(name, fleets, request), "", uniform)
    candidate = best.candidate
    text = _spell_layout(name, best)
    if candidate.fits:
        return Baseline(name, candidate, "", text, uniform)
    return Baseline(name, None, f"short of memory: {_spell_shortage(best)}", text, uniform)


def _no_layout(name: str, fleets: Fleets, request: Request) -> str:
    """Return the reason why a baseline has no layout with the first choice of Megatron's flags."""
    if request.job.model.experts is not None:
        return "no equal layout of Megatron's flags has the sizes that are fixed"
    replicas = _fixed_replicas(request)
    own = [fleet for fleet, names in fleets if name in names]
    if fleets and not own:
        return "every unit has GPUs of several models"
    if not own:
        return "the layers cannot be shared equally by so many pipeline stages, or chunks of these"
    if name != HOMOGENEOUS:
        return why_none(own[0], replicas, name)
    first = [fleet for fleet in own if fleet.job == own[0].job]
    return "; ".join(f"{_spell_gpus(fleet)}: {why_none(fleet, replicas, name)}" for fleet in first)


def _spell_layout(name: str, best: Timed) -> str:
    layout, job = best.entrant.layout, best.entrant.job
    text = layout.spell(job)
    if job.model.experts is None:
        several = max(len(own.parts) for own in layout.layouts) > 1
        text = f"{text}: {layout.texts[name]}" + (f", window {best.window}" if several else "")
    return f"{_spell_gpus(layout.fleet)} alone: {text}" if name == HOMOGENEOUS else text


def _spell_gpus(fleet: Fleet) -> str:
    """Return the number and the model of a fleet's GPUs as text."""
    gpus = len(fleet.units) * fleet.job.tensor_parallel * fleet.job.pipeline_parallel
    return f"{gpus} {fleet.kinds[fleet.units[0].kind].name}"


def _spell_shortage(best: Timed) -> str:
    """Return text about the fullest GPU: its rank, the memory it needs and has, and the largest term."""
    candidate = best.candidate
    short = find_shortage(candidate.timing.model.estimate(candidate.plan))
    assert isinstance(short, Shortage), "what does not fit is short of a GPU's memory: none is offloaded"
    return (
        f"rank {short.rank} ({short.name}, {short.device}) needs {short.needed_gib:.1f} GiB and has "
        f"{short.usable_gib:.1f}, most of it {short.term.replace('_', ' ')}, {short.term_gib:.1f} GiB"
    )
