"""The next best layouts: of the plans that the search timed, the best of each kind."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_hexi.plan.units import domain_rows, job_ranks
from megatron_hexi.planner.joint import Candidate

#: The most layouts that are kept besides the chosen one.
_MOST = 4
#: Properties that layouts of one kind share: replicas, pipeline depths, tensor-parallel sizes, GPUs in use.
_Kind = tuple[int, tuple[int, ...], tuple[int, ...], int]


def best_of_each_kind(found: Iterable[Candidate], best: Candidate) -> tuple[Candidate, ...]:
    """Return the fastest plan of each kind except that of the chosen plan, fastest first."""
    seen = {_kind(best)}
    rivals: list[Candidate] = []
    for candidate in sorted(found, key=lambda candidate_plan: candidate_plan.iteration_s):
        if _kind(candidate) not in seen:
            seen.add(_kind(candidate))
            rivals.append(candidate)
    return tuple(rivals[:_MOST])


def _kind(candidate: Candidate) -> _Kind:
    plan, stages = candidate.plan, candidate.job.pipeline_parallel
    rows = domain_rows(plan, stages=stages)
    depths = tuple(sorted({row.replica: row.depth for row in rows}.values()))
    widths = tuple(sorted({row.width for row in rows}))
    return len(plan.replicas), depths, widths, job_ranks(plan, stages)
