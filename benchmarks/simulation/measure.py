"""One cell, planned: the plan, its rivals, its bound, and what the runtime would send for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.proof import joint_bound
from benchmarks.rivals.readings import read_baselines
from benchmarks.simulation.cells import Cell, load_cluster
from benchmarks.simulation.results import Ours, Result, Rival, Wire, rounded
from benchmarks.simulation.units import as_asked, find_unit
from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import ceiling_tokens_per_s
from megatron_hexi.errors import NothingFitsError
from megatron_hexi.plan import plan_digest, validate_plan, write_plan
from megatron_hexi.planner import Baseline, Planned, Request, find_plan
from megatron_hexi.report.share_lines import find_shares, spell_layout

#: Of a cell, or of a pair of cells that must be cut alike.
_TOO_LARGE = "too little memory on {}, however the model is cut over up to 16 GPUs"

#: A result and the seconds that planning took, or what broke.
Outcome = tuple[Result, float] | str


def measure_all(cells: Sequence[Cell], plans: Path | None = None) -> list[Outcome]:
    """Plan cells of one model and context, which share what units.py finds; one that breaks says why."""
    outcomes: list[Outcome] = []
    for cell in cells:
        try:
            outcomes.append(measure(cell, plans))
        except Exception as problem:  # shown beside the others' results, and fails the run
            outcomes.append(f"{type(problem).__name__}: {problem}")
    return outcomes


def measure(cell: Cell, plans: Path | None = None) -> tuple[Result, float]:
    """Plan one cell.

    Args:
        cell: it.
        plans: a folder in which plans are kept; ``None``: they are not.

    Returns:
        The result, and seconds that planning took, baselines included.

    Raises:
        WireError: the runtime would send other bytes than the cost model counts.
        PlanError: the plan breaks a rule.
    """
    job, cluster = cell.job, load_cluster(cell.cluster)
    unit = cell.unit or find_unit(job, cell.beside or (cell.cluster,))
    result = Result(
        cell=cell.name,
        gpus=dict(Counter(rank.device.name for rank in cluster.ranks)),
        tensor_parallel=unit[0] if unit else 0,
        pipeline_parallel=unit[1] if unit else 0,
        ceiling_tokens_per_s=ceiling_tokens_per_s(job, [rank.device for rank in cluster.ranks]),
        ours=None,
        why_not="" if unit else _TOO_LARGE.format(", ".join(cell.beside or (cell.cluster,))),
        rivals=(),
    )
    if unit is None:
        return rounded(result), 0.0
    job = replace(job, tensor_parallel=unit[0], pipeline_parallel=unit[1])
    begun = time.perf_counter()
    try:
        request = as_asked(job, cell.data_parallel)
        planned = find_plan(request, cluster, with_baselines=True)
    except NothingFitsError as problem:
        return rounded(replace(result, why_not=str(problem))), time.perf_counter() - begun
    baselines = (*planned.baselines, *read_baselines(request, cluster))
    seconds = time.perf_counter() - begun
    if plans is not None:
        plans.mkdir(parents=True, exist_ok=True)
        write_plan(planned.plan, plans / f"{cell.name.replace('/', '-')}.yaml")
    return rounded(replace(result, ours=_ours(planned, request, cluster), rivals=_rivals(baselines))), seconds


def _ours(planned: Planned, request: Request, cluster: Cluster) -> Ours:
    plan, job, cost = planned.plan, planned.job, planned.cost
    validate_plan(plan)
    bound = joint_bound(request, cluster, cost.iteration_s)
    tokens = job.global_batch_size * job.seq_length
    return Ours(
        tokens_per_s=cost.tokens_per_s,
        bound_tokens_per_s=tokens / bound.iteration_s,
        bound_reason=bound.reason,
        gap=cost.iteration_s / bound.iteration_s - 1,
        layout=spell_layout(find_shares(plan, job, cost, cluster)),
        replicas=len(plan.replicas),
        window=plan.exchange.window,
        phases={
            name: round(seconds / cost.iteration_s, 4)
            for name, seconds in cost.phases.by_name.items()
            if seconds
        },
        idle=cost.idle_share,
        notes=planned.notes,
        digest=plan_digest(plan)[:16],
        wire=_wire(planned),
    )


def _wire(planned: Planned) -> Wire | None:
    try:
        from benchmarks.simulation.wire import check_wire
    except ImportError:
        return None  # no torch on this machine
    return check_wire(planned.plan, planned.job)


def _rivals(baselines: Iterable[Baseline]) -> tuple[Rival, ...]:
    return tuple(
        Rival(
            name=one.name,
            uniform=one.uniform,
            tokens_per_s=one.tokens_per_s,
            layout=one.layout,
            why_not=one.why_not,
        )
        for one in baselines
    )
