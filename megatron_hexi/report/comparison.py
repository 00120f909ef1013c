"""A plan beside every baseline: tables for a terminal, plain values for --json and for the picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import Phases, Throughput
from megatron_hexi.plan.units import rank_gpus
from megatron_hexi.report.estimate import spell_seconds, throughput_cells
from megatron_hexi.report.planned import bound_line, cluster_ceiling, job_line, kernel_lines, planned_dict
from megatron_hexi.report.shares import find_shares, spell_layout, spell_recomputed

if TYPE_CHECKING:  # brings the solver, which a report does not need
    from megatron_hexi.planner import Planned

#: The plan's own name among the results.
OURS = "hexi"

_CAPTION = (
    "tokens/s, predicted; TFLOP/s: of the model, a GPU; uniform: against the fastest of the layouts that "
    "give every GPU the same; ceiling: all GPUs at their best rates, no communication"
)


@dataclass(frozen=True)
class Result:
    """One way to do the job.

    Args:
        name: ``hexi`` for the plan, else the baseline's.
        layout: what it is, for people; may be empty where there is none.
        phases: where an iteration's time goes; ``None`` where it cannot be done.
        tokens_per_s: likewise.
        why_not: why it cannot be done; empty where it can.
        uniform: whether all of its GPUs get the same, whatever they are.
        throughput: what `tokens_per_s` is worth; ``None`` where it cannot be done.
        recompute: which layers the backward pass computes again, for people.
    """

    name: str
    layout: str
    phases: Phases | None
    tokens_per_s: float | None
    why_not: str
    uniform: bool
    throughput: Throughput | None = None
    recompute: str = ""

    @property
    def iteration_s(self) -> float | None:
        """Seconds of an iteration."""
        return None if self.phases is None else self.phases.total


@dataclass(frozen=True)
class Comparison:
    """All results.

    Args:
        results: the fastest first, those that cannot be done at the end.
        ceiling_tokens_per_s: of all the cluster's GPUs.
        lower_bound_s: below which no iteration can be.
    """

    results: tuple[Result, ...]
    ceiling_tokens_per_s: float
    lower_bound_s: float

    @property
    def best_uniform(self) -> Result | None:
        """The fastest that gives all GPUs the same."""
        return next((one for one in self.results if one.uniform and one.tokens_per_s is not None), None)

    @property
    def best_baseline(self) -> Result | None:
        """The fastest of the others, uniform or not."""
        return next((one for one in self.results if one.name != OURS and one.tokens_per_s is not None), None)

    @property
    def ours(self) -> Result:
        """The plan."""
        return next(one for one in self.results if one.name == OURS)

    def speed_up(self, result: Result) -> float | None:
        """Tokens/s over those of the fastest uniform layout, where there is one."""
        best = self.best_uniform
        if result.tokens_per_s is None or best is None or best.tokens_per_s is None:
            return None
        return result.tokens_per_s / best.tokens_per_s

    def share_of_ceiling(self, result: Result) -> float | None:
        """Tokens/s over the ceiling."""
        return None if result.tokens_per_s is None else result.tokens_per_s / self.ceiling_tokens_per_s


def compare(planned: Planned, cluster: Cluster) -> Comparison:
    """The plan and its baselines.

    Args:
        planned: with all its baselines.
        cluster: that it was made for.
    """
    shares = find_shares(planned.plan, planned.job, planned.cost, cluster)
    cost = planned.cost
    again = spell_recomputed(planned.plan, planned.job)
    results = [
        Result(
            *(OURS, spell_layout(shares), cost.phases, cost.tokens_per_s, "", False),
            throughput=cost.throughput,
            recompute=again,
        )
    ]
    for one in planned.baselines:
        if one.trial is None:
            results.append(Result(one.name, one.layout, None, None, one.why_not, one.uniform))
            continue
        plan, job = one.trial.plan, one.trial.job
        gpus = rank_gpus(plan, len(cluster.ranks))
        devices = [cluster.ranks[gpu].device for gpu in gpus]
        results.append(
            Result(
                *(one.name, one.layout, one.trial.timing.phases, one.tokens_per_s, "", one.uniform),
                throughput=Throughput.of(job, devices, one.trial.tokens_per_s),
                recompute=spell_recomputed(plan, job),
            )
        )
    # Stable: ours stands before a baseline that is just as fast.
    results.sort(key=lambda one: -(one.tokens_per_s or 0.0))
    return Comparison(tuple(results), cluster_ceiling(planned.job, cluster), planned.bound.iteration_s)


def comparison_report(planned: Planned, cluster: Cluster) -> RenderableType:
    """The comparison for a reader."""
    comparison = compare(planned, cluster)
    ceiling = f"ceiling: {comparison.ceiling_tokens_per_s:,.0f} tokens/s"
    return Group(
        Text(job_line(planned.job, cluster)),
        *(Text(line) for line in kernel_lines(planned.job, cluster)),
        comparison_table(comparison),
        Text(ceiling),
        Text(bound_line(planned)),
        Text(_verdict(comparison)),
        *(Text(f"note: {note}") for note in planned.notes),
        Text(f"planned and compared in {planned.planning_s:.1f} s, {planned.trials} layouts timed"),
    )


def comparison_table(comparison: Comparison) -> Table:
    """A line a result."""
    table = Table(caption=_CAPTION, caption_justify="left")
    for name in ("", "tokens/s", "a GPU", "TFLOP/s", "MFU", "uniform", "ceiling", "iteration s"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_column("recompute")
    table.add_column("layout, or why there is none", overflow="fold")
    for one in comparison.results:
        speed_up, share = comparison.speed_up(one), comparison.share_of_ceiling(one)
        table.add_row(
            Text(one.name),
            *throughput_cells(one.throughput),
            "-" if speed_up is None else f"{speed_up:.2f}x",
            "-" if share is None else f"{share:.1%}",
            "-" if one.iteration_s is None else spell_seconds(one.iteration_s),
            one.recompute or "-",
            Text(_layout(one)),
            style="bold" if one.name == OURS else "dim" if one.tokens_per_s is None else "",
        )
    return table


def comparison_dict(planned: Planned, cluster: Cluster) -> dict[str, Any]:
    """The comparison as plain values."""
    comparison = compare(planned, cluster)
    return {
        "cluster": cluster.name,
        "model": planned.job.model.name,
        "seq_length": planned.job.seq_length,
        "plan": planned_dict(planned, cluster),
        "ceiling_tokens_per_s": comparison.ceiling_tokens_per_s,
        "lower_bound_s": comparison.lower_bound_s,
        "best_uniform": comparison.best_uniform and comparison.best_uniform.name,
        "best_baseline": comparison.best_baseline and comparison.best_baseline.name,
        "results": [
            {
                "name": one.name,
                "tokens_per_s": one.tokens_per_s,
                **({} if one.throughput is None else one.throughput.facts),
                "recompute": one.recompute or None,
                "why_not": one.why_not or None,
                "layout": one.layout,
                "iteration_s": one.iteration_s,
                "share_of_ceiling": comparison.share_of_ceiling(one),
                "speed_up": comparison.speed_up(one),
                "uniform": one.uniform,
                "phases_s": None if one.phases is None else one.phases.by_name,
            }
            for one in comparison.results
        ],
    }


def _layout(result: Result) -> str:
    if result.tokens_per_s is not None:
        return result.layout
    return f"{result.layout}: {result.why_not}" if result.layout else result.why_not


def _verdict(comparison: Comparison) -> str:
    """What the plan is worth beside the others."""
    best, fastest = comparison.best_uniform, comparison.best_baseline
    facts = []
    if best is None:
        facts.append("no layout that gives every GPU the same can do this job")
    else:
        facts.append(f"{_times(comparison.ours, best)} the fastest uniform layout ({best.name})")
    if fastest is not None and fastest is not best:
        facts.append(f"{_times(comparison.ours, fastest)} the fastest baseline ({fastest.name})")
    return f"{OURS}: " + ", ".join(facts)


def _times(result: Result, other: Result) -> str:
    return f"{(result.tokens_per_s or 0.0) / (other.tokens_per_s or 1.0):.2f} times as fast as"
