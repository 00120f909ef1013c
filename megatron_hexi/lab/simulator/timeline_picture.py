"""A simulated iteration as a picture: its pipeline, and work and messages of each unit in a layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch

from megatron_hexi.grouping import grouped
from megatron_hexi.lab.simulator import RankTimeline, Simulation, Span
from megatron_hexi.lab.simulator.pipeline_picture import (
    draw_pipeline,
    pipeline_height,
    pipeline_rows,
    replicas_of_units,
)
from megatron_hexi.plan import Plan
from megatron_hexi.report.estimate import rank_cells
from megatron_hexi.report.labels import add_legend, every_nth, set_title, wrap
from megatron_hexi.report.pictures import plan_title
from megatron_hexi.spelling import TimeUnit, spell_time, time_unit

#: Number of units above which similar units share a row.
_MOST_ROWS = 32
_WIDTH = 16.0  # inches
_LINE, _LETTERS = 0.16, 44  # of a label: its height in inches, its length
#: Factor between stages' times of a layer above which they have scales of their own.
_ALIKE = 1.2
_MAX_HEIGHT = 60.0  # inches; beyond it rows get thinner instead
_HEADING = 0.6  # height of a heading, in rows
#: Top and height of the lanes in a row, where rows are one apart: work above, the network thin below.
_LANES = {"compute": (-0.42, 0.52), "network": (0.14, 0.2)}
_COLOURS = {
    "token work": "#4878a8",
    "own block": "#e08214",
    "other groups' blocks": "#fdb863",
    "experts": "#d9a5c7",
    "logits": "#8c8c8c",
    "all-to-all": "#1b9e77",
    "keys": "#7b3294",
    "gradients": "#e7298a",
    "tokens of experts": "#66c2a5",
    "sums in a unit": "#a6611a",
}
#: Opacity of neighbouring layers, whose ends reach into the picture.
_FAINT = 0.35


@dataclass(frozen=True)
class _Row:
    """Spans of one unit, or of several similar units, in the window of each panel."""

    label: str
    heading: str
    section: int
    panels: tuple[tuple[Span, ...], ...]


def draw_timeline(simulation: Simulation, plan: Plan | None = None) -> Figure:
    """Draw a simulated iteration: above, micro-batches by stage; below, a layer of each unit.

    The pipeline is drawn where it has several rows. The layer is the last of each kind that was replayed in
    each direction, forward on the left and backward with recomputation on the right; a tensor-parallel unit
    has one row, waiting is blank, and spans of the layers before and after are faint.

    Args:
        plan: plan for the title, and for replica and stage of rows; ``None``: there are none.
    """
    stages = pipeline_rows(simulation)
    panels = _panels(simulation)
    rows = _rows(simulation, panels, plan)
    height = min(2.2 + 0.36 * (_places(rows)[-1] + 1), _MAX_HEIGHT)
    if len(stages) > 1:
        above = pipeline_height(stages)
        figure = Figure(figsize=(_WIDTH, above + height), layout="constrained")
        halves = figure.subfigures(2, 1, height_ratios=[above, height], squeeze=False)[:, 0]
        draw_pipeline(halves[0], stages, simulation, plan)
        _draw_layer(halves[1], panels, rows, height)
    else:
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        _draw_layer(figure, panels, rows, height)
    if plan is not None:
        set_title(figure, plan_title(plan))
    return figure


def _draw_layer(
    figure: Figure | SubFigure, panels: Sequence[_Panel], rows: Sequence[_Row], height: float
) -> None:
    """Draw forward and backward pass of one layer; stages that take very different times get own scales."""
    places = _places(rows)
    scales = _Scales.of(panels, rows)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=scales.widths)[0]
    shown: set[str] = set()
    for number, (panel_axes, (title, layers, windows)) in enumerate(zip(axes, panels, strict=True)):
        panel_axes.set_title(title, fontsize=10, loc="left")
        panel_axes.set_xlabel(scales.names[number])
        panel_axes.set_xlim(0, scales.ends[number])
        for place, row in zip(places, rows, strict=True):
            unit_s = scales.unit_s(windows[row.section])
            shown |= _draw_row(
                panel_axes, row.panels[number], place, windows[row.section], unit_s, layers[row.section]
            )
        panel_axes.spines[["top", "right", "left"]].set_visible(False)
        panel_axes.tick_params(axis="y", length=0)
    step = every_nth(len(rows), height - 2.2, _LINE)
    axes[0].set_yticks(places[::step], [row.label for row in rows[::step]], fontsize=8)
    axes[0].set_ylim(places[-1] + 0.5, places[0] - 0.5 - _HEADING * bool(rows[0].heading))
    for number, (place, row) in enumerate(zip(places, rows, strict=True)):
        if row.heading and (number == 0 or row.heading != rows[number - 1].heading):
            top = place - 0.5 - _HEADING / 4
            for panel_axes, (_, _, windows) in zip(axes, panels, strict=True):
                begin, end = windows[row.section]
                text = row.heading if panel_axes is axes[0] else ""
                if scales.differ:
                    text = f"{text} ({spell_time(end - begin)})" if text else spell_time(end - begin)
                panel_axes.text(0, top, text, fontsize=9, fontweight="bold", va="center")
    handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in shown]
    if handles:
        add_legend(figure, handles)


@dataclass(frozen=True)
class _Scales:
    """The axes of the panels."""

    differ: bool
    widths: list[float]
    ends: list[float]
    names: list[str]
    unit: TimeUnit

    @classmethod
    def of(cls, panels: Sequence[_Panel], rows: Sequence[_Row]) -> _Scales:
        """Return the scales: common, or by stage if times differ much and headings can show them."""
        used = {row.section for row in rows}
        times = [[end - start for start, end in windows] for _, _, windows in panels]
        longest = [max(panel_times) for panel_times in times]
        # A stage without layers of the kind takes no time.
        shortest = [
            min((panel_times[section] for section in used if panel_times[section]), default=0.0)
            for panel_times in times
        ]
        differ = bool(rows[0].heading) and any(
            most > _ALIKE * least for most, least in zip(longest, shortest, strict=True)
        )
        unit = time_unit(max(longest))
        return cls(
            differ,
            [max(most, max(longest) / 4) or 1 for most in longest],
            [100.0 if differ else most / unit.seconds or 1 for most in longest],
            ["per cent of the stage's time of a layer" if differ else unit.word] * len(panels),
            unit,
        )

    def unit_s(self, window: tuple[float, float]) -> float:
        """Return the seconds of one unit of the axis, for a stage whose layer takes this window (s)."""
        return ((window[1] - window[0]) / 100 or 1.0) if self.differ else self.unit.seconds


#: A title, the shown layer of each section with its ways, and its window of time.
_Panel = tuple[str, list[tuple[tuple[str, int], ...]], list[tuple[float, float]]]


def _panels(simulation: Simulation) -> list[_Panel]:
    """Return panels of the last layer of each kind that was replayed in each direction."""
    shown = {span.layer_kind for span in simulation.spans}
    return [
        _panel(simulation, kind, title, ways)
        for kind in sorted(shown) or [0]
        for title, ways in (("forward", ("forward",)), ("backward", ("again", "backward")))
    ]


def _panel(simulation: Simulation, kind: int, title: str, ways: tuple[str, ...]) -> _Panel:
    layers, windows = list[int](), list[tuple[float, float]]()
    for section in range(1 + max(rank.section for rank in simulation.ranks)):
        section_spans = [
            span
            for span in simulation.spans
            if (span.way in ways and span.layer_kind == kind)
            and simulation.ranks[span.rank].section == section
        ]
        layer = (max if title == "forward" else min)((span.layer for span in section_spans), default=0)
        shown = [span for span in section_spans if span.layer == layer]
        start = min((span.start_s for span in shown), default=0.0)
        layers.append(layer)
        windows.append((start, max((span.end_s for span in shown), default=start)))
    if len(simulation.kinds) > 1:
        name = simulation.kinds[kind]
    else:
        name = f"layer {layers[0] + 1}" if len(set(layers)) == 1 else "a layer of each stage"
    name += f", {title}"
    if any(span.way == "again" for span in simulation.spans) and title == "backward":
        name += " (what is recomputed first)" if len(simulation.kinds) == 1 else " (recomputed first)"
    return name, [tuple((way, layer) for way in ways) for layer in layers], windows


def _places(rows: Sequence[_Row]) -> list[float]:
    """Return the height of each row's centre, downwards; rows are one apart, with room for headings."""
    places, at = list[float](), 0.0
    for number, row in enumerate(rows):
        if number:
            at += 1 + _HEADING * (row.heading != rows[number - 1].heading)
        places.append(at)
    return places


def _heading(rank: RankTimeline, replica: int, has_replicas: bool, has_stages: bool) -> str:
    """Return replica and stage, where there are several, and the GPU."""
    words = [f"replica {replica}"] * has_replicas + [f"stage {rank.stage}"] * has_stages
    return wrap(": ".join(filter(None, (", ".join(words), rank.device))), _LETTERS, 1)


def _rows(simulation: Simulation, panels: Sequence[_Panel], plan: Plan | None) -> list[_Row]:
    """Return a row for each unit; by replica and stage where the plan is given."""
    units = grouped(((rank.stage, rank.unit), rank) for rank in simulation.ranks)
    replica_of = replicas_of_units(plan)
    stages: dict[int, set[int]] = {}
    if plan is not None:
        for stage, unit in units:
            stages.setdefault(replica_of[unit], set()).add(stage)
        units = dict(sorted(units.items(), key=lambda item: (replica_of[item[0][1]], item[0][0])))
    by_rank = grouped((span.rank, span) for span in simulation.spans)

    def inside(first: RankTimeline) -> tuple[tuple[Span, ...], ...]:
        spans = by_rank.get(first.rank, [])
        shown = (windows[first.section] for _, _, windows in panels)
        return tuple(tuple(s for s in spans if s.end_s > begin and s.start_s < end) for begin, end in shown)

    unit_spans = [(ranks, inside(ranks[0])) for ranks in units.values()]

    def look(item: tuple[int, tuple[list[RankTimeline], tuple[tuple[Span, ...], ...]]]) -> object:
        number, ((first, *_), inside) = item
        if len(unit_spans) <= _MOST_ROWS:
            return number
        end = max((span.end_s for spans in inside for span in spans), default=0.0) or 1.0
        marks = [
            (s.lane, s.name, round(s.start_s / end, 3), round(s.end_s / end, 3)) for p in inside for s in p
        ]
        node = first.name.rpartition("/")[0]
        return node, first.section, replica_of.get(first.unit), first.stage, tuple(marks)

    rows = []
    for _, alike in itertools.groupby(enumerate(unit_spans), key=look):
        items = [item for _, item in alike]
        ranks = [rank for item in items for rank in item[0]]
        heading = ""
        if plan is not None:
            replica = replica_of[ranks[0].unit]
            heading = _heading(ranks[0], replica, len(plan.replicas) > 1, len(stages[replica]) > 1)
        rows.append(_Row(_label(ranks), heading, ranks[0].section, items[0][1]))
    return rows


def _label(ranks: Sequence[RankTimeline]) -> str:
    numbers, _, names = rank_cells(ranks)
    return wrap(f"{numbers}: {names}", lines=1)


def _draw_row(
    axes: Axes,
    spans: Sequence[Span],
    place: float,
    window: tuple[float, float],
    unit_s: float,
    layer: tuple[tuple[str, int], ...],
) -> set[str]:
    """Draw the bars of a row; return the names of what they show."""
    bars: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}
    for span in spans:
        start, end = max(span.start_s, window[0]), min(span.end_s, window[1])
        key = (span.lane, _legend_name(span), (span.way, span.layer) in layer)
        bars.setdefault(key, []).append(((start - window[0]) / unit_s, (end - start) / unit_s))
    for (lane, name, is_shown_layer), ranges in bars.items():
        top, height = _LANES[lane]
        axes.broken_barh(
            ranges,
            (place + top, height),
            facecolor=_COLOURS[name],
            edgecolor="white",
            linewidth=0.3 if lane == "compute" else 0,
            alpha=1.0 if is_shown_layer else _FAINT,
        )
    return {name for _, name, _ in bars}


def _legend_name(span: Span) -> str:
    """Return the name of a span in the legend."""
    if span.kind == "token":
        return "token work"
    if span.kind == "attention":
        return "own block" if span.name.endswith("own block") else "other groups' blocks"
    if span.kind == "exchange":
        return "keys" if span.name.startswith("keys") else "gradients"
    names = {
        "all_to_all": "all-to-all",
        "expert_all_to_all": "tokens of experts",
        "tensor_parallel": "sums in a unit",
    }
    return names.get(span.kind, span.kind)
