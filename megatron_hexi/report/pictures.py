"""Plans as pictures: layers of stages, positions of the sequence, and heads.

One colour a rank; where the GPUs are known, one hue a kind of GPU, in shades that tell neighbours apart.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from megatron_hexi.errors import HexiError, printable
from megatron_hexi.plan import Plan
from megatron_hexi.plan.model import Range
from megatron_hexi.regular_file import write_atomically
from megatron_hexi.report.labels import (
    BarLabel,
    add_legend,
    every_nth,
    legend_height,
    lines_of,
    set_title,
    wrap,
)
from megatron_hexi.report.tables import spell_range
from megatron_hexi.report.unit_summary import UnitSummary

#: Red, green, blue, opacity; each from 0 to 1.
Colour = tuple[float, float, float, float]

_BAR = 0.8  # height of a bar, where rows are one apart
_WIDTH = 11.0  # inches
_ROW_HEIGHT, _LINE = 0.5, 0.17  # of a row, and of a line of its label, in inches
_LEAST_LABELLED = 0.004  # part of an axis that a bar takes, if any label fits into it
_MAX_HEIGHT = 60.0  # inches; beyond it rows get thinner instead


#: `tab20c` has four shades of each of five hues; the lightest is too near to white.
_SHADES, _HUES = 4, 5
_TICKS = (8, 4, 2)  # of the sequence, where that many parts are whole K
_POSITION = "position in the sequence"
#: Suffixes of `hexi plan` on a node's name: number, GPU, further nodes.
_NODE_NUMBER = re.compile(r"(-\d+)?(/\d+)?( and \d+ more nodes)?$")


def draw_plan(plan: Plan, rows: Sequence[UnitSummary], gpus: Sequence[str] = ()) -> Figure:
    """Draw layers of each replica's stages, tokens of each domain, and heads of each group.

    Layers are drawn where the plan has them. Domains of one unit (the whole sequence) and groups of one unit
    (all heads) have no row where others do.

    Args:
        plan: the plan.
        rows: its units.
        gpus: the model of GPU of each rank, if known; else kinds are taken from the names of nodes.
    """
    paint = _Paint.of(rows, gpus or _node_kinds(plan, rows))
    panels = _panels(plan, sorted(rows, key=lambda row: row.place), paint)
    around = 0.8 + 0.7 * len(panels) + legend_height(paint.kinds, _WIDTH)
    heights = _heights([panel.height for panel in panels], _MAX_HEIGHT - around)
    figure = Figure(figsize=(_WIDTH, around + sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, panel, height in zip(all_axes, panels, heights, strict=True):
        _draw_panel(axes, panel, height)
    set_title(figure, plan_title(plan))
    if paint.kinds:
        shades = enumerate(paint.kinds)
        add_legend(figure, [Patch(color=_shade(kind, 0), label=name) for kind, name in shades])
    return figure


class _Bar(NamedTuple):
    """Ranges of one colour in a row of a `_Panel`, and texts of which the first that fits labels each."""

    row: tuple[int, ...]
    ranges: Sequence[Range]
    colour: Colour
    texts: Sequence[str]


@dataclass(frozen=True)
class _Panel:
    """A panel with rows of bars.

    Args:
        title: title of the panel.
        unit: unit of its axis.
        end: end of its axis.
        rows: names of the rows by place, from the top.
        bars: all bars.
    """

    title: str
    unit: str
    end: int
    rows: Mapping[tuple[int, ...], str]
    bars: Sequence[_Bar]

    @property
    def height(self) -> float:
        """Height of the rows and their labels, in inches."""
        return (len(self.rows) + 0.5) * max(_ROW_HEIGHT, _LINE * lines_of([*self.rows.values()]))


def _panels(plan: Plan, rows: Sequence[UnitSummary], paint: _Paint) -> list[_Panel]:
    """Return the panels of a plan; a domain or a group of one unit has no row where others do."""
    panels = []
    if rows[0].layers is not None:
        stages = {row.place[:2]: row for row in reversed(rows)}  # the first unit of each stands for it
        bars = [
            _Bar(row.place[:1], _parts(row), paint.of_stage(row), _stage_texts(row))
            for row in stages.values()
        ]
        replicas: dict[tuple[int, ...], str] = {row.place[:1]: wrap(_replica_name(plan, row)) for row in rows}
        layers = max(stop for row in rows for _, stop in _parts(row))
        panels.append(_Panel("Layers of each pipeline stage.", "layer", layers, replicas, bars))
    domains = _divided(rows, 3, _domain_name, all_if_none=not panels)
    if domains:
        bars = [_Bar(row.place[:3], row.segments, paint.units[row.rank], [_ranks(row)]) for row in rows]
        title = "Outside attention: tokens. Numbers are ranks."
        panels.append(_Panel(title, _POSITION, plan.workload.seq_length, domains, bars))
    groups = _divided(rows, 4, lambda row: _group_name(plan, row), all_if_none=False)
    if groups:
        bars = [_Bar(row.place, [_heads(plan, row)], paint.units[row.rank], [_ranks(row)]) for row in rows]
        title = "In attention: query heads of the groups that divide them."
        panels.append(_Panel(title, "query head", max(_heads(plan, row)[1] for row in rows), groups, bars))
    return panels


def _divided(
    rows: Sequence[UnitSummary], depth: int, name: Callable[[UnitSummary], str], *, all_if_none: bool
) -> dict[tuple[int, ...], str]:
    """Return the names of domains (depth 3) or groups (depth 4) with several units, by place."""
    units = Counter(row.place[:depth] for row in rows)
    named = {row.place[:depth]: wrap(name(row)) for row in rows}
    several = {place: text for place, text in named.items() if units[place] > 1}
    return several or (named if all_if_none else {})


def _heights(desired: Sequence[float], room: float) -> list[float]:
    """Return heights of panels, in inches: small ones as wanted, the others equal parts of the rest."""
    heights = list(desired)
    for done, number in enumerate(sorted(range(len(desired)), key=desired.__getitem__)):
        heights[number] = min(desired[number], room / (len(desired) - done))
        room -= heights[number]
    return heights


def _draw_panel(axes: Axes, panel: _Panel, height: float) -> None:
    """Draw a panel whose rows have a height, in inches."""
    names, places = list(panel.rows.values()), {place: row for row, place in enumerate(panel.rows)}
    step = every_nth(len(names), height, _LINE * lines_of(names))
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlim(0, panel.end)
    axes.set_xlabel(panel.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.unit == _POSITION:
        _number_positions(axes, panel.end)
    axes.set_yticks(range(0, len(names), step), names[::step], fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for bar in panel.bars:
        if bar.row in places:
            _add_bars(axes, bar.ranges, places[bar.row], bar.colour, bar.texts)


@dataclass(frozen=True)
class _Paint:
    """The colours of a plan.

    Args:
        kinds: kinds of GPUs, in rank order; empty where unknown.
        units: colour of each unit, by its number.
        kind_of: number of each unit's kind, by its number.
    """

    kinds: list[str]
    units: dict[int, Colour]
    kind_of: dict[int, int]

    @classmethod
    def of(cls, rows: Sequence[UnitSummary], gpus: Sequence[str]) -> _Paint:
        """Return a colour for each unit; where GPUs are known, shades of one hue for each kind."""
        if not gpus:
            return cls([], {row.rank: _colour(row.rank, len(rows)) for row in rows}, {})
        kinds = list(dict.fromkeys(_kind(row, gpus) for row in rows))
        kind_of = {row.rank: kinds.index(_kind(row, gpus)) for row in rows}
        counts = [0] * len(kinds)
        units = {}
        for rank, kind in kind_of.items():
            units[rank] = _shade(kind, counts[kind])
            counts[kind] += 1
        return cls(kinds, units, kind_of)

    def of_stage(self, row: UnitSummary) -> Colour:
        """Return the colour of a unit's stage."""
        return _shade(self.kind_of[row.rank], row.stage) if self.kinds else _colour(row.stage % 20, 20)


def plan_title(plan: Plan) -> str:
    """Return a title from what the plan states: model, sequence, cluster, and predicted speed."""
    made, estimate = plan.provenance, plan.estimate
    words = [f"{_spell_tokens(plan.workload.seq_length)} tokens", f"{plan.ranks} ranks"]
    if made and made.model:
        words.insert(0, printable(Path(made.model).name))
    if made and made.cluster:
        words[-1] += f" of {made.cluster}"
    if estimate and estimate.tokens_per_s:
        words.append(f"predicted {estimate.tokens_per_s:,.0f} tokens/s")
    return ", ".join(words)


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format of the file's suffix.

    Raises:
        HexiError: the format is unknown, or the file cannot be written.
    """
    known = figure.canvas.get_supported_filetypes()
    kind = path.suffix.lstrip(".").lower()
    if kind not in known:
        raise HexiError(
            f"{path}: a picture in an unknown format; end its name in .{', .'.join(sorted(known))}"
        )
    out = io.BytesIO()
    read_as_written(figure)
    figure.savefig(out, format=kind, dpi=150)
    write_atomically(path, out.getvalue())


def read_as_written(figure: Figure) -> None:
    """Draw dollar signs in names as they are: matplotlib reads text between two as mathematics.

    Powers of ten on logarithmic axes stay mathematics.
    """
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    for axes in figure.axes:
        for axis in (a for a in (axes.xaxis, axes.yaxis) if a.get_scale() == "log"):
            for text in axis.findobj(Text):
                text.set_parse_math(text is not axis.label)


def _colour(rank: int, ranks: int) -> Colour:
    """Return a colour that differs from the neighbours', and from all others up to a number of ranks."""
    return colormaps["tab20"](rank) if ranks <= 20 else colormaps["turbo"]((rank + 0.5) / ranks)


def _shade(kind: int, number: int) -> Colour:
    """Return the shade of a unit by its number on one kind of GPU; the darkest first."""
    return colormaps["tab20c"](_SHADES * (kind % _HUES) + number % (_SHADES - 1))


def _heads(plan: Plan, row: UnitSummary) -> Range:
    """Return a unit's heads over all tensor-parallel ranks, whose number may differ between stages."""
    ranks = 1 if row.layers is None else len(row.ranks)
    return row.heads[0] * ranks, row.heads[1] * ranks


def _node_kinds(plan: Plan, rows: Sequence[UnitSummary]) -> list[str]:
    """Return for each rank the names of its group's nodes without numbers; empty where unknown."""
    if plan.provenance is None or not plan.provenance.cluster:
        return []
    kinds = [""] * plan.ranks
    for row in rows:
        stems = [_NODE_NUMBER.sub("", name) for name in row.group_name.split(" + ")]
        for rank in row.ranks:
            kinds[rank] = " + ".join(dict.fromkeys(stems))
    return kinds if all(kinds) else []


def _kind(row: UnitSummary, gpus: Sequence[str]) -> str:
    """Return the GPUs of a unit; a pipeline that the job repeats may have several kinds."""
    return " + ".join(dict.fromkeys(gpus[rank] for rank in row.ranks))


def _number_positions(axes: Axes, end: int) -> None:
    """Label whole positions, at equal parts of a sequence that has them."""
    parts = next((parts for parts in _TICKS if end % (parts * 1024) == 0), None)
    axes.xaxis.set_major_locator(MultipleLocator(end // parts) if parts else MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _spell_tokens(int(value))))


def _spell_tokens(count: int) -> str:
    """Return a number of tokens as text: 131072 as 128K, 5000 as 5,000."""
    return f"{count // 1024}K" if count and count % 1024 == 0 else f"{count:,}"


def _add_bars(axes: Axes, ranges: Sequence[Range], row: int, colour: Colour, texts: Sequence[str]) -> None:
    axes.broken_barh(
        [(start, stop - start) for start, stop in ranges],
        (row - _BAR / 2, _BAR),
        facecolor=colour,
        edgecolor="white",
        linewidth=0.5,
    )
    red, green, blue, _ = colour
    ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.45 else "white"
    for start, stop in ranges:
        if stop - start > _LEAST_LABELLED * axes.get_xlim()[1]:
            BarLabel(axes, (start, stop, row + _BAR / 2, row - _BAR / 2), texts, fontsize=7, color=ink)


def _ranks(row: UnitSummary) -> str:
    return spell_range((row.ranks[0], row.ranks[-1] + 1))


def _parts(row: UnitSummary) -> Sequence[Range]:
    """Return the layers of a unit's stage, by ministage."""
    return row.ministages or (row.layers or (0, 0),)


def _replica_name(plan: Plan, row: UnitSummary) -> str:
    """Return a replica's name with its micro-batches, ministages and offloading."""
    words = [f"replica {row.replica}"]
    stages = plan.replicas[row.replica].stages
    if plan.replicas[row.replica].micro_batches is not None:
        words.append(f"{plan.replicas[row.replica].micro_batches} micro-batches")
    if row.ministages is not None:
        words.append(f"{len(row.ministages)} ministages a stage")
    if row.offload is not None and all(stage.offload == row.offload for stage in stages):
        words.append(f"offloads {', '.join(row.offload)}")
    return ", ".join(words)


def _stage_texts(row: UnitSummary) -> list[str]:
    """Return labels for the bar of a stage, the longest first."""
    count = sum(stop - start for start, stop in _parts(row))
    name = f"stage {row.stage}"
    words = [f"{name}: {count} layer{'s' if count != 1 else ''}"]
    if row.offload is not None:
        words.insert(0, f"{words[0]}, offloads {', '.join(row.offload)}")
    return [*words, name, str(row.stage)]


def _domain_name(row: UnitSummary) -> str:
    """Return a domain's replica and stage, with its samples or micro-batches where it takes a part."""
    words = [f"replica {row.replica}"]
    if row.layers is not None:
        words.append(f"stage {row.stage}")
    if row.samples is not None:
        words.append(f"{row.samples} samples")
    if row.micro_batches is not None:
        words.append(f"{row.micro_batches} micro-batches")
    return ", ".join(words)


def _group_name(plan: Plan, row: UnitSummary) -> str:
    several = len(plan.replicas) > 1 or row.layers is not None
    name = row.group_name or f"group {row.group}"
    if len(row.ranks) > 1:  # a unit of several GPUs is named after its first
        name = name.partition("/")[0]
    place = f"replica {row.replica}" + (f", stage {row.stage}" if row.layers is not None else "")
    return (f"{place}: " if several else "") + name
