"""The next best layouts, and the gain of a plan from each feature that Megatron's flags lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel, IterationCost
from megatron_hexi.report.estimate import spell_throughput, throughput_cells
from megatron_hexi.report.planned import layout_line
from megatron_hexi.spelling import spell_seconds

if TYPE_CHECKING:
    from megatron_hexi.planner import FeatureAblation, Planned, WeakKind


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
    table = Table(
        caption="TFLOP/s: of the model, per GPU; seconds of an iteration: recomputation is in compute; "
        "wires: communication not hidden; "
        "GiB: of the fullest GPU, and of all in the mean",
        caption_justify="left",
    )
    for name in (
        *(
            "layout",
            "tokens/s",
            "per GPU",
            "TFLOP/s",
            "MFU",
            "iteration",
            "compute",
            "wires",
            "bubble",
            "GiB",
        ),
        *("mean GiB", "idle"),
    ):
        table.add_column(name, justify="left" if name == "layout" else "right")
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
