"""Plans as pictures: who holds which part of the sequence, and which heads.

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
from megatron_hexi.report.holdings import Holding
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
#: What `hexi plan` adds to a node's name, and the GPU behind it.
_NODE_NUMBER = re.compile(r"(-\d+)?(/\d+)?( and \d+ more nodes)?$")


def draw_plan(plan: Plan, rows: Sequence[Holding], gpus: Sequence[str] = ()) -> Figure:
    """Who holds what: layers of each replica's stages, tokens of each domain, heads of each group.

    Layers are drawn where the plan says them. Domains of one unit hold the whole sequence, and groups of one
    unit all heads: they have no row where others do.

    Args:
        plan: the plan.
        rows: its holdings.
        gpus: the model of GPU of each rank, if they are known; else the names of nodes tell kinds apart.
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
    """Ranges of one colour in a row (as `_Panel.rows` names it), and the texts of which each gets one."""

    row: tuple[int, ...]
    ranges: Sequence[Range]
    colour: Colour
    texts: Sequence[str]


@dataclass(frozen=True)
class _Panel:
    """Rows of bars.

    Args:
        title: above them.
        unit: what is counted along them.
        end: of the count.
        rows: their names by place, from the top.
        bars: all bars.
    """

    title: str
    unit: str
    end: int
    rows: Mapping[tuple[int, ...], str]
    bars: Sequence[_Bar]

    @property
    def height(self) -> float:
        """Inches that the rows and their labels want."""
        return (len(self.rows) + 0.5) * max(_ROW_HEIGHT, _LINE * lines_of([*self.rows.values()]))


def _panels(plan: Plan, rows: Sequence[Holding], paint: _Paint) -> list[_Panel]:
    """What is drawn of a plan; a domain or a group of one unit has no row where others do."""
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
    rows: Sequence[Holding], depth: int, name: Callable[[Holding], str], *, all_if_none: bool
) -> dict[tuple[int, ...], str]:
    """The domains (depth 3) or groups (depth 4) of several units by place, with their names."""
    units = Counter(row.place[:depth] for row in rows)
    named = {row.place[:depth]: wrap(name(row)) for row in rows}
    several = {place: text for place, text in named.items() if units[place] > 1}
    return several or (named if all_if_none else {})


def _heights(wanted: Sequence[float], room: float) -> list[float]:
    """What each panel gets of the room, in inches: the low ones what they want, the others equally much."""
    found = list(wanted)
    for left, number in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        found[number] = min(wanted[number], room / (len(wanted) - left))
        room -= found[number]
    return found


def _draw_panel(axes: Axes, panel: _Panel, height: float) -> None:
    """Draw a panel; `height` of its rows, in inches."""
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
        kinds: of GPUs, in rank order; none where they are not known.
        units: the colour of each unit, by its number.
        kind_of: the number of each unit's kind, by its number.
    """

    kinds: list[str]
    units: dict[int, Colour]
    kind_of: dict[int, int]

    @classmethod
    def of(cls, rows: Sequence[Holding], gpus: Sequence[str]) -> _Paint:
        """One colour a unit; where the GPUs are known, shades of one hue a kind."""
        if not gpus:
            return cls([], {row.rank: _colour(row.rank, len(rows)) for row in rows}, {})
        kinds = list(dict.fromkeys(_kind(row, gpus) for row in rows))
        kind_of = {row.rank: kinds.index(_kind(row, gpus)) for row in rows}
        seen = [0] * len(kinds)
        units = {}
        for rank, kind in kind_of.items():
            units[rank] = _shade(kind, seen[kind])
            seen[kind] += 1
        return cls(kinds, units, kind_of)

    def of_stage(self, row: Holding) -> Colour:
        """The colour of the stage of a unit."""
        return _shade(self.kind_of[row.rank], row.stage) if self.kinds else _colour(row.stage % 20, 20)


def plan_title(plan: Plan) -> str:
    """As much as the plan says of: model, sequence, cluster, and how fast it is predicted to be."""
    made, told = plan.provenance, plan.estimate
    words = [f"{_spell_tokens(plan.workload.seq_length)} tokens", f"{plan.ranks} ranks"]
    if made and made.model:
        words.insert(0, printable(Path(made.model).name))
    if made and made.cluster:
        words[-1] += f" of {made.cluster}"
    if told and told.tokens_per_s:
        words.append(f"predicted {told.tokens_per_s:,.0f} tokens/s")
    return ", ".join(words)


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the file's name asks for, whole or not at all.

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
    """Let a dollar sign in a name be one: matplotlib reads what two enclose as mathematics.

    Powers of ten on logarithmic axes stay mathematics.
    """
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    for axes in figure.axes:
        for axis in (one for one in (axes.xaxis, axes.yaxis) if one.get_scale() == "log"):
            for text in axis.findobj(Text):
                text.set_parse_math(text is not axis.label)


def _colour(rank: int, ranks: int) -> Colour:
    """Colours that neighbours can be told apart by, and that all differ in larger plans too."""
    return colormaps["tab20"](rank) if ranks <= 20 else colormaps["turbo"]((rank + 0.5) / ranks)


def _shade(kind: int, number: int) -> Colour:
    """For the unit of that number among those on one kind of GPU; the darkest first."""
    return colormaps["tab20c"](_SHADES * (kind % _HUES) + number % (_SHADES - 1))


def _heads(plan: Plan, row: Holding) -> Range:
    """The heads of all tensor-parallel ranks of a unit: stages may differ in how many these are."""
    ranks = 1 if row.layers is None else len(row.ranks)
    return row.heads[0] * ranks, row.heads[1] * ranks


def _node_kinds(plan: Plan, rows: Sequence[Holding]) -> list[str]:
    """Of each rank, what its group's nodes are called without their numbers; empty where it is not known."""
    if plan.provenance is None or not plan.provenance.cluster:
        return []
    kinds = [""] * plan.ranks
    for row in rows:
        stems = [_NODE_NUMBER.sub("", name) for name in row.group_name.split(" + ")]
        for rank in row.ranks:
            kinds[rank] = " + ".join(dict.fromkeys(stems))
    return kinds if all(kinds) else []


def _kind(row: Holding, gpus: Sequence[str]) -> str:
    """The GPUs of a unit; a pipeline that the job repeats may have several."""
    return " + ".join(dict.fromkeys(gpus[rank] for rank in row.ranks))


def _number_positions(axes: Axes, end: int) -> None:
    """Whole positions, at equal parts of a sequence that has them."""
    parts = next((parts for parts in _TICKS if end % (parts * 1024) == 0), None)
    axes.xaxis.set_major_locator(MultipleLocator(end // parts) if parts else MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _spell_tokens(int(value))))


def _spell_tokens(count: int) -> str:
    """131072 as 128K, 5000 as 5,000."""
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


def _ranks(row: Holding) -> str:
    return spell_range((row.ranks[0], row.ranks[-1] + 1))


def _parts(row: Holding) -> Sequence[Range]:
    """The layers of a unit's stage, those of each ministage apart."""
    return row.ministages or (row.layers or (0, 0),)


def _replica_name(plan: Plan, row: Holding) -> str:
    """A replica with what it takes of a batch, and with what all its stages do."""
    words = [f"replica {row.replica}"]
    stages = plan.replicas[row.replica].stages
    if plan.replicas[row.replica].micro_batches is not None:
        words.append(f"{plan.replicas[row.replica].micro_batches} micro-batches")
    if row.ministages is not None:
        words.append(f"{len(row.ministages)} ministages a stage")
    if row.offload is not None and all(stage.offload == row.offload for stage in stages):
        words.append(f"offloads {', '.join(row.offload)}")
    return ", ".join(words)


def _stage_texts(row: Holding) -> list[str]:
    """What a bar of a stage says, the longest first."""
    count = sum(stop - start for start, stop in _parts(row))
    name = f"stage {row.stage}"
    words = [f"{name}: {count} layer{'s' if count != 1 else ''}"]
    if row.offload is not None:
        words.insert(0, f"{words[0]}, offloads {', '.join(row.offload)}")
    return [*words, name, str(row.stage)]


def _domain_name(row: Holding) -> str:
    """Replica, stage, and samples or micro-batches where it takes a part of them."""
    words = [f"replica {row.replica}"]
    if row.layers is not None:
        words.append(f"stage {row.stage}")
    if row.samples is not None:
        words.append(f"{row.samples} samples")
    if row.micro_batches is not None:
        words.append(f"{row.micro_batches} micro-batches")
    return ", ".join(words)


def _group_name(plan: Plan, row: Holding) -> str:
    several = len(plan.replicas) > 1 or row.layers is not None
    name = row.group_name or f"group {row.group}"
    if len(row.ranks) > 1:  # a unit of several GPUs is named after its first
        name = name.partition("/")[0]
    place = f"replica {row.replica}" + (f", stage {row.stage}" if row.layers is not None else "")
    return (f"{place}: " if several else "") + name
