"""Plans as pictures: who holds which part of the sequence, and which heads.

One colour a rank; where the GPUs are known, one hue a kind of GPU, in shades that tell neighbours apart.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

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
from megatron_hexi.report.tables import spell_layers, spell_range

#: Red, green, blue, opacity; each from 0 to 1.
Colour = tuple[float, float, float, float]

_ROW = 0.8  # height of a bar, where rows are one apart
_MAX_HEIGHT = 60.0  # inches; beyond it rows get thinner instead
_LABEL_SHARE = 0.01  # part of the axis that a bar must take for its label to fit


#: `tab20c` has four shades of each of five hues; the lightest is too near to white.
_SHADES, _HUES = 4, 5
_TICKS = (8, 4, 2)  # of the sequence, where that many parts are whole K
#: What `hexi plan` adds to a node's name, and the GPU behind it.
_NODE_NUMBER = re.compile(r"(-\d+)?(/\d+)?( and \d+ more nodes)?$")


def draw_plan(plan: Plan, rows: Sequence[Holding], gpus: Sequence[str] = ()) -> Figure:
    """The sequence above, one row a domain; the heads below, one row a group.

    Args:
        plan: the plan.
        rows: its holdings.
        gpus: the model of GPU of each rank, if they are known; else the names of nodes tell kinds apart.
    """
    gpus = gpus or _node_kinds(plan, rows)
    kinds = list(dict.fromkeys(_kind(row, gpus) for row in rows)) if gpus else []
    domains = {row.place[:3]: _domain_name(row) for row in sorted(rows, key=lambda row: row.place)}
    groups = {row.place: _group_name(plan, row) for row in sorted(rows, key=lambda row: row.place)}
    height = min(3.4 + 0.5 * (len(domains) + len(groups)), _MAX_HEIGHT)
    figure = Figure(figsize=(11, height), layout="constrained")
    sequence, heads = figure.subplots(2, 1, height_ratios=[len(domains) + 0.5, len(groups) + 0.5])
    _set_up(sequence, "position in the sequence", plan.workload.seq_length, list(domains.values()))
    _set_up(heads, "query head", max(_heads(plan, row)[1] for row in rows), list(groups.values()))
    _number_positions(sequence, plan.workload.seq_length)
    heads.xaxis.set_major_locator(MaxNLocator(integer=True))
    seen = [0] * len(kinds)
    for row in rows:
        if gpus:
            kind = kinds.index(_kind(row, gpus))
            colour = _shade(kind, seen[kind])
            seen[kind] += 1
        else:
            colour = _colour(row.rank, len(rows))
        label = spell_range((row.ranks[0], row.ranks[-1] + 1))
        _add_bars(sequence, row.segments, list(domains).index(row.place[:3]), colour, label)
        _add_bars(heads, [_heads(plan, row)], list(groups).index(row.place), colour, label)
    sequence.set_title("Outside attention: tokens. Numbers are ranks.", fontsize=10, loc="left")
    heads.set_title("In attention: query heads.", fontsize=10, loc="left")
    figure.suptitle(plan_title(plan))
    if kinds:
        handles = [Patch(color=_shade(kind, 0), label=name) for kind, name in enumerate(kinds)]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


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
    ranks = 1 if plan.is_repeated else len(row.ranks)
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


def _add_bars(axes: Axes, ranges: Sequence[Range], row: int, colour: Colour, label: str) -> None:
    axes.broken_barh(
        [(start, stop - start) for start, stop in ranges],
        (row - _ROW / 2, _ROW),
        facecolor=colour,
        edgecolor="white",
        linewidth=0.5,
    )
    red, green, blue, _ = colour
    ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.45 else "white"
    for start, stop in ranges:
        if stop - start > _LABEL_SHARE * axes.get_xlim()[1]:
            axes.text((start + stop) / 2, row, label, ha="center", va="center", fontsize=7, color=ink)


def _set_up(axes: Axes, what: str, end: int, rows: list[str]) -> None:
    axes.set_xlim(0, end)
    axes.set_xlabel(what)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _domain_name(row: Holding) -> str:
    """Replica, stage with its layers, and samples, where there is more than one."""
    words = [f"replica {row.replica}"]
    if row.layers is not None:
        words.append(f"stage {row.stage} (layers {spell_layers(row)})")
    if row.ministages is not None:
        words.append(f"{len(row.ministages)} ministages")
    if row.offload is not None:
        words.append(f"offloads {', '.join(row.offload)}")
    if row.samples is not None:
        words.append(f"{row.samples} samples")
    if row.micro_batches is not None:
        words.append(f"{row.micro_batches} micro-batches")
    return ", ".join(words)


def _group_name(plan: Plan, row: Holding) -> str:
    several = len(plan.replicas) > 1 or not plan.is_repeated
    name = row.group_name or f"group {row.group}"
    if len(row.ranks) > 1:  # a unit of several GPUs is named after its first
        name = name.partition("/")[0]
    return (f"{_domain_name(row)}: " if several else "") + name
