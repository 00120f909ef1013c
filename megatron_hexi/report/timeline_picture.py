"""One layer of a simulated iteration as a picture: who computes what, who sends, who waits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_hexi.plan import Plan
from megatron_hexi.report.pictures import plan_title
from megatron_hexi.simulator import RankTimeline, Simulation, Span

#: Above so many units those that do the same share a row.
_MOST_ROWS = 32
_MAX_HEIGHT = 60.0  # inches; beyond it rows get thinner instead
_HEADING = 0.6  # height of a heading, in rows
#: Top and height of the lanes in a row, where rows are one apart: work above, the network thin below.
_LANES = {"compute": (-0.42, 0.52), "network": (0.14, 0.2)}
_COLOURS = {
    "token work": "#4878a8",
    "own block": "#e08214",
    "other groups' blocks": "#fdb863",
    "logits": "#8c8c8c",
    "all-to-all": "#1b9e77",
    "keys": "#7b3294",
    "gradients": "#e7298a",
    "sums in a unit": "#a6611a",
}
#: Neighbouring layers, of which ends reach into the picture.
_FAINT = 0.35


@dataclass(frozen=True)
class _Row:
    """What one unit (or several that are alike) does in a window of each panel."""

    label: str
    heading: str
    section: int
    panels: tuple[tuple[Span, ...], ...]


def draw_timeline(simulation: Simulation, plan: Plan | None = None) -> Figure:
    """A layer forward on the left and backward on the right, one row a rank; waiting is left blank.

    The last layer replayed in each direction, with what is recomputed; of a tensor-parallel unit one row.
    Each stage starts at 0. What reaches in from the layers before and after is faint.

    Args:
        simulation: of the plan.
        plan: gives the title, and the replica and stage of rows; ``None``: neither.
    """
    panels = _panels(simulation)
    rows = _rows(simulation, panels, plan)
    places = _places(rows)
    height = min(2.2 + 0.36 * (places[-1] + 1), _MAX_HEIGHT)
    figure = Figure(figsize=(16, height), layout="constrained")
    widths = [max(end - start for start, end in windows) for _, _, windows in panels]
    axes = figure.subplots(
        1,
        len(panels),
        sharey=True,
        squeeze=False,
        width_ratios=[max(width, max(widths) / 4) for width in widths],
    )[0]
    shown: set[str] = set()
    for number, (one, (title, layers, windows), width) in enumerate(zip(axes, panels, widths, strict=True)):
        scale, unit = (1e3, "ms") if width < 1 else (1.0, "s")
        one.set_title(title)
        one.set_xlabel(unit)
        one.set_xlim(0, width * scale or 1)
        for place, row in zip(places, rows, strict=True):
            shown |= _draw_row(
                one, row.panels[number], place, windows[row.section], scale, layers[row.section]
            )
    axes[0].set_yticks(places, [row.label for row in rows], fontsize=8)
    axes[0].set_ylim(places[-1] + 0.5, places[0] - 0.5 - _HEADING * bool(rows[0].heading))
    for number, (place, row) in enumerate(zip(places, rows, strict=True)):
        if row.heading and (number == 0 or row.heading != rows[number - 1].heading):
            top = place - 0.5 - _HEADING / 4
            axes[0].text(0, top, row.heading, fontsize=9, fontweight="bold", va="center")
    if plan is not None:
        figure.suptitle(plan_title(plan))
    for one in axes:
        one.spines[["top", "right", "left"]].set_visible(False)
        one.tick_params(axis="y", length=0)
    handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in shown]
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False
        )
    return figure


#: A title, of each section the layer that is shown (in which ways), and in which time it does it.
_Panel = tuple[str, list[tuple[tuple[str, int], ...]], list[tuple[float, float]]]


def _panels(simulation: Simulation) -> list[_Panel]:
    """The last layer that was replayed in each direction."""
    panels: list[_Panel] = []
    sections = 1 + max(rank.section for rank in simulation.ranks)
    for title, ways in (("forward", ("forward",)), ("backward", ("again", "backward"))):
        layers, windows = list[int](), list[tuple[float, float]]()
        for section in range(sections):
            own = [
                span
                for span in simulation.spans
                if span.way in ways and simulation.ranks[span.rank].section == section
            ]
            layer = (max if title == "forward" else min)((span.layer for span in own), default=0)
            shown = [span for span in own if span.layer == layer]
            start = min((span.start_s for span in shown), default=0.0)
            layers.append(layer)
            windows.append((start, max((span.end_s for span in shown), default=start)))
        name = f"layer {layers[0] + 1}" if len(set(layers)) == 1 else "a layer of each stage"
        name += f", {title}"
        if any(span.way == "again" for span in simulation.spans) and title == "backward":
            name += " (what is recomputed first)"
        panels.append((name, [tuple((way, layer) for way in ways) for layer in layers], windows))
    return panels


def _places(rows: Sequence[_Row]) -> list[float]:
    """The height of each row's centre, downwards; rows are one apart, with room for headings."""
    places, at = list[float](), 0.0
    for number, row in enumerate(rows):
        if number:
            at += 1 + _HEADING * (row.heading != rows[number - 1].heading)
        places.append(at)
    return places


def _heading(rank: RankTimeline, replica: int, has_replicas: bool, has_stages: bool) -> str:
    """Replica and stage, where there are several, and the GPU."""
    words = [f"replica {replica}"] * has_replicas + [f"stage {rank.stage}"] * has_stages
    return ": ".join(filter(None, (", ".join(words), rank.device)))


def _rows(simulation: Simulation, panels: Sequence[_Panel], plan: Plan | None) -> list[_Row]:
    """One for each unit; by replica and stage where the plan is given."""
    units: dict[tuple[int, int], list[RankTimeline]] = {}
    for rank in simulation.ranks:
        units.setdefault((rank.stage, rank.unit), []).append(rank)
    replica_of = _replicas(plan)
    stages: dict[int, set[int]] = {}
    if plan is not None:
        for stage, unit in units:
            stages.setdefault(replica_of[unit], set()).add(stage)
        units = dict(sorted(units.items(), key=lambda item: (replica_of[item[0][1]], item[0][0])))
    by_rank: dict[int, list[Span]] = {}
    for span in simulation.spans:
        by_rank.setdefault(span.rank, []).append(span)
    found = []
    for ranks in units.values():
        section = ranks[0].section
        spans = by_rank.get(ranks[0].rank, [])
        inside = tuple(
            tuple(s for s in spans if s.end_s > windows[section][0] and s.start_s < windows[section][1])
            for _, _, windows in panels
        )
        found.append((ranks, section, inside))
    several = len(found) > _MOST_ROWS

    def look(item: tuple[int, tuple[list[RankTimeline], int, tuple[tuple[Span, ...], ...]]]) -> object:
        number, (ranks, section, inside) = item
        if not several:
            return number
        node = ranks[0].name.rpartition("/")[0]
        end = max((span.end_s for spans in inside for span in spans), default=0.0) or 1.0
        marks = [
            (s.lane, s.name, round(s.start_s / end, 3), round(s.end_s / end, 3)) for p in inside for s in p
        ]
        return node, section, replica_of.get(ranks[0].unit), ranks[0].stage, tuple(marks)

    rows = []
    for _, alike in itertools.groupby(enumerate(found), key=look):
        items = [item for _, item in alike]
        ranks = [rank for item in items for rank in item[0]]
        heading = ""
        if plan is not None:
            replica = replica_of[ranks[0].unit]
            heading = _heading(ranks[0], replica, len(plan.replicas) > 1, len(stages[replica]) > 1)
        rows.append(_Row(_label(ranks), heading, items[0][1], items[0][2]))
    return rows


def _replicas(plan: Plan | None) -> dict[int, int]:
    """The replica of each member of the plan, by the member's number."""
    if plan is None:
        return {}
    of_lead = {
        member.lead: number
        for number, replica in enumerate(plan.replicas)
        for stage in replica.stages
        for member in stage.members
    }
    return {number: of_lead[member.lead] for number, member in enumerate(plan.members)}


def _label(ranks: Sequence[RankTimeline]) -> str:
    first, last = ranks[0], ranks[-1]
    if first is last:
        return f"{first.rank}: {first.name}"
    return f"{first.rank}-{last.rank}: {first.name}-{last.name.rpartition('/')[2]}"


def _draw_row(
    axes: Axes,
    spans: Sequence[Span],
    place: float,
    window: tuple[float, float],
    scale: float,
    layer: tuple[tuple[str, int], ...],
) -> set[str]:
    """Bars of one row; what they show."""
    bars: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}
    for span in spans:
        start, end = max(span.start_s, window[0]), min(span.end_s, window[1])
        key = (span.lane, _what(span), (span.way, span.layer) in layer)
        bars.setdefault(key, []).append(((start - window[0]) * scale, (end - start) * scale))
    for (lane, what, own), ranges in bars.items():
        top, height = _LANES[lane]
        axes.broken_barh(
            ranges,
            (place + top, height),
            facecolor=_COLOURS[what],
            edgecolor="white",
            linewidth=0.3 if lane == "compute" else 0,
            alpha=1.0 if own else _FAINT,
        )
    return {what for _, what, _ in bars}


def _what(span: Span) -> str:
    """What a span is called in the legend."""
    if span.kind == "token":
        return "token work"
    if span.kind == "attention":
        return "own block" if span.name.endswith("own block") else "other groups' blocks"
    if span.kind == "exchange":
        return "keys" if span.name.startswith("keys") else "gradients"
    return {"all_to_all": "all-to-all", "tensor_parallel": "sums in a unit"}.get(span.kind, span.kind)
