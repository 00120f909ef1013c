"""The next best layouts, with their time and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel, IterationCost
from megatron_hexi.report.estimate import spell_throughput, throughput_cells
from megatron_hexi.report.planned import layout_line
from megatron_hexi.spelling import spell_seconds

if TYPE_CHECKING:  # brings the solver, which a report does not need
    from megatron_hexi.planner import Planned


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
