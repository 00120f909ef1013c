"""A plan and every baseline (tables, plain values, values for the picture), and the next best layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel, IterationCost, Phases, Throughput
from megatron_hexi.plan.units import rank_gpus
from megatron_hexi.report.estimate import THROUGHPUT_COLUMNS, spell_throughput, throughput_cells
from megatron_hexi.report.planned import (
    bound_line,
    choice_lines,
    cluster_ceiling,
    job_line,
    kernel_lines,
    layout_line,
    planned_dict,
)
from megatron_hexi.report.share_lines import find_shares, spell_layout, spell_recomputed
from megatron_hexi.report.tables import Report, make_table
from megatron_hexi.spelling import spell_seconds

if TYPE_CHECKING:
    from megatron_hexi.planner import Baseline, FeatureAblation, Planned, WeakKind

#: The plan's own name among the results.
OURS = "hexi"
#: Megatron's pipelines with other numbers of layers in each stage, among the baselines.
_UNEVEN = "uneven-layers"

_CAPTION = (
    "tokens/s, predicted; TFLOP/s: of the model, per GPU; uniform: against the fastest of the layouts that "
    "give every GPU the same; ceiling: all GPUs at their best rates, no communication"
)
_RIVALS_CAPTION = (
    "TFLOP/s: of the model, per GPU; seconds of an iteration: recomputation is in compute; wires: "
    "communication not hidden; GiB: of the fullest GPU, and of all in the mean"
)


@dataclass(frozen=True)
class LayoutResult:
    """A layout for the job, or a baseline without one.

    Args:
        name: ``hexi`` for the plan, else the baseline's.
        why_not: why there is no layout; empty where there is one.
        uniform: whether all of its GPUs get equal work, whatever their kind.
        throughput: `tokens_per_s` in other units; ``None`` without a layout.
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
        """Predicted seconds per iteration; ``None`` without a layout."""
        return None if self.phases is None else self.phases.total


@dataclass(frozen=True)
class Comparison:
    """Results of a plan and its baselines.

    Args:
        results: the fastest first, those without a layout last.
    """

    results: tuple[LayoutResult, ...]
    ceiling_tokens_per_s: float
    lower_bound_s: float
    is_mixed: bool = True

    @property
    def best_uniform(self) -> LayoutResult | None:
        """The fastest uniform result."""
        return next((r for r in self.results if r.uniform and r.tokens_per_s is not None), None)

    @property
    def best_baseline(self) -> LayoutResult | None:
        """The fastest result besides the plan."""
        return next((r for r in self.results if r.name != OURS and r.tokens_per_s is not None), None)

    @property
    def one_kind(self) -> LayoutResult | None:
        """The fastest result on the GPUs of one model alone; ``None`` if these are all of the cluster."""
        return next((r for r in self.results if r.name == "homogeneous" and self.is_mixed), None)

    @property
    def by_flags(self) -> LayoutResult | None:
        """The fastest result of Megatron's flags on all kinds of GPU."""
        fastest = (r for r in self.results if r.tokens_per_s is not None)
        return next((r for r in fastest if r.uniform or r.name == _UNEVEN), None)

    @property
    def ours(self) -> LayoutResult:
        """The plan's result."""
        return next(result for result in self.results if result.name == OURS)

    def speed_up(self, result: LayoutResult) -> float | None:
        """Return tokens/s over those of the fastest uniform layout; ``None`` without one."""
        best = self.best_uniform
        if result.tokens_per_s is None or best is None or best.tokens_per_s is None:
            return None
        return result.tokens_per_s / best.tokens_per_s

    def share_of_ceiling(self, result: LayoutResult) -> float | None:
        """Return tokens/s over the ceiling."""
        return None if result.tokens_per_s is None else result.tokens_per_s / self.ceiling_tokens_per_s


def compare(planned: Planned, cluster: Cluster) -> Comparison:
    """Return the results of a plan and its baselines."""
    shares = find_shares(planned.plan, planned.job, planned.cost, cluster)
    cost = planned.cost
    again = spell_recomputed(planned.plan, planned.job)
    layout = spell_layout(shares)
    results = [LayoutResult(OURS, layout, cost.phases, cost.tokens_per_s, "", False, cost.throughput, again)]
    results += [_baseline_result(baseline, cluster) for baseline in planned.baselines]
    # The sort is stable: the plan comes before a baseline that is just as fast.
    results.sort(key=lambda result: -(result.tokens_per_s or 0.0))
    is_mixed = len({rank.device.name for rank in cluster.ranks}) > 1
    ceiling = cluster_ceiling(planned.job, cluster)
    return Comparison(tuple(results), ceiling, planned.bound.iteration_s, is_mixed)


def _baseline_result(baseline: Baseline, cluster: Cluster) -> LayoutResult:
    name, layout, trial = baseline.name, baseline.layout, baseline.trial
    if trial is None:
        return LayoutResult(name, layout, None, None, baseline.why_not, baseline.uniform)
    devices = [cluster.ranks[gpu].device for gpu in rank_gpus(trial.plan, len(cluster.ranks))]
    throughput = Throughput.of(trial.job, devices, trial.tokens_per_s)
    again = spell_recomputed(trial.plan, trial.job)
    phases, rate = trial.timing.phases, baseline.tokens_per_s
    return LayoutResult(name, layout, phases, rate, "", baseline.uniform, throughput, again)


def comparison_report(planned: Planned, cluster: Cluster) -> Report:
    """Return the comparison for a terminal."""
    comparison = compare(planned, cluster)
    return Report(
        Text(job_line(planned.job, cluster)),
        *(Text(line) for line in choice_lines(planned)),
        *(Text(line) for line in kernel_lines(planned, cluster)),
        comparison_table(comparison),
        Text(f"ceiling: {comparison.ceiling_tokens_per_s:,.0f} tokens/s"),
        Text(bound_line(planned)),
        *(Text(f"note: {note}") for note in planned.notes),
        Text(f"planned and compared in {planned.planning_s:.1f} s, {planned.trials} layouts timed"),
        Text(_gain_line(comparison)),
    )


def comparison_table(comparison: Comparison) -> Table:
    """Return a table with a line for each result."""
    table = Table(caption=_CAPTION, caption_justify="left")
    for name in ("", *THROUGHPUT_COLUMNS, "uniform", "ceiling", "iteration s"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_column("recompute")
    table.add_column("layout, or why there is none", overflow="fold")
    for result in comparison.results:
        speed_up, share = comparison.speed_up(result), comparison.share_of_ceiling(result)
        table.add_row(
            Text(result.name),
            *throughput_cells(result.throughput),
            "-" if speed_up is None else f"{speed_up:.2f}x",
            "-" if share is None else f"{share:.1%}",
            "-" if result.iteration_s is None else spell_seconds(result.iteration_s),
            result.recompute or "-",
            Text(_layout(result)),
            style="bold" if result.name == OURS else "dim" if result.tokens_per_s is None else "",
        )
    return table


def comparison_dict(planned: Planned, cluster: Cluster) -> dict[str, Any]:
    """Return the comparison as plain values."""
    comparison = compare(planned, cluster)
    return {
        "cluster": cluster.name,
        "model": planned.job.model.name,
        "seq_length": planned.job.seq_length,
        "plan": planned_dict(planned, cluster),
        "ceiling_tokens_per_s": comparison.ceiling_tokens_per_s,
        "lower_bound_s": comparison.lower_bound_s,
        "best_uniform": comparison.best_uniform and comparison.best_uniform.name,
        "gain": {
            "over_one_kind": _gain_dict(comparison, comparison.one_kind),
            "over_flags": _gain_dict(comparison, comparison.by_flags),
        },
        "best_baseline": comparison.best_baseline and comparison.best_baseline.name,
        "results": [
            {
                "name": result.name,
                "tokens_per_s": result.tokens_per_s,
                **({} if result.throughput is None else result.throughput.facts),
                "recompute": result.recompute or None,
                "why_not": result.why_not or None,
                "layout": result.layout,
                "iteration_s": result.iteration_s,
                "share_of_ceiling": comparison.share_of_ceiling(result),
                "speed_up": comparison.speed_up(result),
                "uniform": result.uniform,
                "phases_s": None if result.phases is None else result.phases.by_name,
            }
            for result in comparison.results
        ],
    }


def _layout(result: LayoutResult) -> str:
    if result.tokens_per_s is not None:
        return result.layout
    return f"{result.layout}: {result.why_not}" if result.layout else result.why_not


def alone_text(comparison: Comparison) -> str:
    """Return how the plan compares with the fastest GPUs alone, as text; empty without such a result."""
    alone = comparison.one_kind
    if alone is None or alone.tokens_per_s is None:
        return ""
    return f"{_times(comparison.ours, alone)} {alone.layout.partition(':')[0]}"


def _gain_line(comparison: Comparison) -> str:
    """Return a sentence on the gain over the fastest GPUs alone, and over the best of Megatron's flags."""
    alone, flags = alone_text(comparison), comparison.by_flags
    facts = [alone] if alone else []
    if comparison.is_mixed and not alone:
        facts.append("able to do what no kind of GPU can do alone")
    if flags is None:
        facts.append("able to do what no layout of Megatron's flags on all GPUs can")
    else:
        facts.append(f"{_times(comparison.ours, flags)} Megatron's best flags on all GPUs ({flags.name})")
    return f"beside what one would run today, the plan is {' and '.join(facts)}"


def _gain_dict(comparison: Comparison, other: LayoutResult | None) -> dict[str, Any] | None:
    """Return the plan's tokens/s over those of another result; ``None``: that has no layout."""
    ours = comparison.ours.tokens_per_s
    if other is None or other.tokens_per_s is None or ours is None:
        return None
    return {"name": other.name, "layout": other.layout, "times": ours / other.tokens_per_s}


def _times(result: LayoutResult, other: LayoutResult) -> str:
    return f"{(result.tokens_per_s or 0.0) / (other.tokens_per_s or 1.0):.2f} times as fast as"


def rivals_report(planned: Planned, cluster: Cluster, *, explain: bool = False) -> RenderableType:
    """Return the next best layouts: a line each, or a table of time and memory."""
    if not planned.rivals and not explain:
        return Text("next best: no other kind of layout that fits came within 10 % of it")
    rows = _rows(planned, cluster)
    if explain:
        return _table(rows)
    best = rows[0][1].iteration_s
    lines = [
        f"next best: {layout}: {cost.tokens_per_s:,.0f} tokens/s ({spell_throughput(cost.throughput)}), "
        f"{cost.iteration_s / best - 1:+.1%} time"
        for layout, cost in rows[1:]
    ]
    return Group(*map(Text, lines))


def rivals_dict(planned: Planned, cluster: Cluster) -> list[dict[str, Any]]:
    """Return the next best layouts as plain values: seconds, GiB, tokens/s."""
    return [
        {
            "layout": layout,
            "tokens_per_s": cost.tokens_per_s,
            **cost.throughput.facts,
            "iteration_s": cost.iteration_s,
            "memory_gib": max(cost.memory_gib),
            "phases_s": cost.phases.by_name,
        }
        for layout, cost in _rows(planned, cluster)[1:]
    ]


def _rows(planned: Planned, cluster: Cluster) -> list[tuple[str, IterationCost]]:
    """Return text and cost of the chosen layout and the next best."""
    return [
        (layout_line(planned.plan, planned.job), planned.cost),
        *(
            (layout_line(rival.plan, rival.job), CostModel(rival.job, cluster).estimate(rival.plan))
            for rival in planned.rivals
        ),
    ]


def _table(rows: list[tuple[str, IterationCost]]) -> Table:
    times = ("iteration", "compute", "wires", "bubble")
    columns = ("layout", *THROUGHPUT_COLUMNS, *times, "GiB", "mean GiB", "idle")
    table = make_table(columns, ("layout",), _RIVALS_CAPTION)
    for number, (layout, cost) in enumerate(rows):
        wires, bubble = cost.phases.communication, cost.phases.bubble
        table.add_row(
            Text(("chosen: " if number == 0 else "") + layout),
            *throughput_cells(cost.throughput),
            *map(spell_seconds, (cost.iteration_s, cost.iteration_s - wires - bubble, wires, bubble)),
            f"{max(cost.memory_gib):.1f}",
            f"{sum(cost.memory_gib) / len(cost.memory_gib):.1f}",
            f"{cost.idle_share:.1%}",
        )
    return table


def gains_report(planned: Planned, gains: Sequence[FeatureAblation]) -> RenderableType:
    """Return a line for each feature: the best plan without it, and the option that asks for that."""
    if not gains:
        return Text("gains: the plan is one of Megatron's own flags")
    return Group(*(Text(_line(planned, gain)) for gain in gains))


def gains_dict(planned: Planned, gains: Sequence[FeatureAblation]) -> list[dict[str, Any]]:
    """Return the gains as plain values: tokens/s, and the relative speed-up."""
    return [vars(gain) | {"gain": _gain(planned, gain)} for gain in gains]


def weak_report(planned: Planned, weak: Sequence[WeakKind]) -> Group:
    """Return a line for each weak kind of GPU: the best plan without it."""
    return Group(*(Text(_weak_line(planned, kind)) for kind in weak))


def _weak_line(planned: Planned, kind: WeakKind) -> str:
    more = planned.cost.tokens_per_s / kind.tokens_per_s_without - 1
    without = f"without them {kind.tokens_per_s_without:,.0f} tokens/s"
    return f"the {kind.gpus} {kind.name} bring {more:.1%}: {without}"


def _gain(planned: Planned, gain: FeatureAblation) -> float | None:
    rate = gain.tokens_per_s_without
    return None if rate is None else planned.cost.tokens_per_s / rate - 1


def _line(planned: Planned, gain: FeatureAblation) -> str:
    name, option = gain.feature.replace("_", " "), f"--no-{gain.feature.replace('_', '-')}"
    more = _gain(planned, gain)
    if gain.tokens_per_s_without is None or more is None:
        return f"gain by {name}: without, no plan was found that fits ({option})"
    return f"gain by {name}: {more:.1%}; without, {gain.tokens_per_s_without:,.0f} tokens/s ({option})"
