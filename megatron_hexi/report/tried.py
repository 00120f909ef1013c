"""A table of the plans that a search timed: the step that made each, its layout, time, memory and outcome."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import Timing
from megatron_hexi.cost.memory import GIB
from megatron_hexi.grouping import grouped
from megatron_hexi.models import Job
from megatron_hexi.plan import Plan
from megatron_hexi.plan.recompute import spell_recompute
from megatron_hexi.plan.units import domain_rows, rank_gpus
from megatron_hexi.planner.features import forbidden_by, means_of
from megatron_hexi.report.planned import layout_line

if TYPE_CHECKING:
    from megatron_hexi.planner import Planned, Request
    from megatron_hexi.planner.joint import Candidate

#: Difference of two parts of memory that rounding explains.
_ROUNDING = 1e-9
_HEAD = (
    *("number", "step", "layout", "stages", "means"),
    *("iteration_s", "memory_gib", "usable_gib", "outcome", "why"),
)


class _Fullest(NamedTuple):
    """The GPU of a plan whose memory is fullest."""

    name: str
    needed_gib: float
    usable_gib: float

    @property
    def fullness(self) -> float:
        """Needed memory as a part of usable memory."""
        return self.needed_gib / self.usable_gib


class _TriedPlan(NamedTuple):
    """The columns of a plan that was timed, and why it cannot be chosen; empty: it can.

    Args:
        host_problem: host memory that it lacks.
        forbidden: the flag of the request that it breaks.
    """

    step: str
    layout: str
    stages: str
    means: tuple[str, ...]
    iteration_s: float
    gpu: _Fullest
    host_problem: str
    forbidden: str


class TriedPlans:
    """Notes the plans that a search times, and writes the outcome of each.

    Args:
        request: the request to the planner.
        cluster: the cluster that it plans for.
    """

    def __init__(self, request: Request, cluster: Cluster) -> None:
        self._request = replace(request, rules=request.rules.over(cluster.file.planner))
        self._cluster = cluster
        self.rows: list[_TriedPlan] = []

    def note(self, step: str, candidate: Candidate) -> None:
        """Note a plan that a step of the search has timed."""
        plan, job, timing = candidate.plan, candidate.job, candidate.timing
        host = max(timing.host_loads, key=lambda load: load.fullness, default=None)
        host_problem = ""
        if host is not None and host.fullness > 1:
            host_problem = f"host memory of node {host.name}: {host.short_gib:.1f} GiB short"
        words = layout_line(plan, job), _spell_stages(plan, job, self._cluster), means_of(plan, self._cluster)
        fullest, forbidden = _fullest(timing, self._cluster), forbidden_by(plan, job, self._request)
        row = _TriedPlan(step, *words, candidate.iteration_s, fullest, host_problem, forbidden)
        self.rows.append(row)

    def text(self, planned: Planned | None) -> str:
        """Return the table as CSV.

        Args:
            planned: the plan that was chosen; ``None``: none was found that fits.
        """
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(_HEAD)
        kept = self._kept(planned)
        for number, row in enumerate(self.rows, start=1):
            outcome, why = _outcome(row, planned, kept)
            writer.writerow(
                [
                    *(number, row.step, row.layout, row.stages, "; ".join(row.means)),
                    *(f"{value:.6g}" for value in (row.iteration_s, row.gpu.needed_gib, row.gpu.usable_gib)),
                    *(outcome, why),
                ]
            )
        return stream.getvalue()

    def _kept(self, planned: Planned | None) -> float:
        """Return the part of each GPU's usable memory that plans had to keep free."""
        if planned is None:
            return 0.0
        fullest = max(rank.memory_gib / rank.usable_gib for rank in planned.cost.ranks)
        return self._request.memory_margin if fullest <= 1 - self._request.memory_margin + _ROUNDING else 0.0


def _spell_stages(plan: Plan, job: Job, cluster: Cluster) -> str:
    """Return the stages of each kind of replica: layers, GPUs, TP size, recomputation, offload."""
    gpus = rank_gpus(plan, len(cluster.ranks))
    all_rows = domain_rows(plan, job.micro_batch_size, job.pipeline_parallel, job.model.layers)
    stages = grouped(((row.replica, row.stage), row) for row in all_rows)
    replicas: dict[int, list[str]] = {}
    for (replica, _), rows in stages.items():
        first, layers = rows[0], rows[0].layers or (0, 0)
        ranks = [row.first_rank + rank for row in rows for one in row.domain.members for rank in one.ranks]
        counts = Counter(cluster.ranks[gpus[rank]].device.name for rank in ranks)
        words = [
            f"{layers[1] - layers[0]} layers on {' + '.join(f'{n} {name}' for name, n in counts.items())}"
        ]
        if first.ministages is not None:
            words[0] += f" in {len(first.ministages)} {'interleaved ' * first.interleaved}ministages"
        words += [f"TP {first.width}", f"recompute {spell_recompute(first.recompute or job.recompute)}"]
        if first.offload:
            words.append(f"{' and '.join(first.offload)} in host memory")
        replicas.setdefault(replica, []).append(", ".join(words))
    kinds = Counter(" | ".join(words) for words in replicas.values())
    return "; ".join(f"{count} x ({words})" for words, count in kinds.items())


def _fullest(timing: Timing, cluster: Cluster) -> _Fullest:
    """Return the fullest GPU of a plan that may have been timed for GPUs with more memory."""
    gpus = np.concatenate([section.placement.gpus[:, 0] for section in timing.sections]).tolist()
    needed = (np.concatenate(timing.needed) / GIB).tolist()
    usable = [cluster.ranks[gpu].device.usable_gib for gpu in gpus]
    most = max(range(len(gpus)), key=lambda unit: needed[unit] / usable[unit])
    return _Fullest(cluster.rank_name(gpus[most]), needed[most], usable[most])


def _outcome(row: _TriedPlan, planned: Planned | None, kept: float) -> tuple[str, str]:
    """Return the outcome of a plan, and the reason."""
    short = row.gpu.needed_gib - (1 - kept) * row.gpu.usable_gib
    if row.gpu.fullness > 1 - kept + _ROUNDING:
        free = f" of what {kept:.0%} kept free leaves" if row.gpu.fullness <= 1 else ""
        return "does not fit", f"{row.gpu.name} is {short:.1f} GiB short{free}"
    if row.host_problem:
        return "does not fit", row.host_problem
    if row.forbidden:
        return "forbidden", row.forbidden
    if planned is None or planned.choice is None:
        return "not chosen", ""
    chosen = layout_line(planned.plan, planned.job), planned.choice.means, planned.cost.iteration_s
    if (row.layout, row.means, row.iteration_s) == chosen:
        return "chosen", ""
    part = row.iteration_s / planned.cost.iteration_s - 1
    if part < 0:
        return "less simple", f"{-part:.2%} faster than the plan, with more means (--fastest)"
    return "slower", f"{part:.2%} slower than the plan"
