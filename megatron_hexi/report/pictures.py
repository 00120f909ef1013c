"""Plans as pictures: who holds which part of the sequence, and which heads, in one colour a rank."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_hexi.errors import HexiError
from megatron_hexi.plan import Plan
from megatron_hexi.plan.model import Range
from megatron_hexi.regular_file import write_atomically
from megatron_hexi.report.holdings import Holding
from megatron_hexi.report.tables import spell_range

#: Red, green, blue, opacity; each from 0 to 1.
Colour = tuple[float, float, float, float]

_ROW = 0.8  # height of a bar, where rows are one apart
_MAX_HEIGHT = 60.0  # inches; beyond it rows get thinner instead
_LABEL_SHARE = 0.01  # part of the axis that a bar must take for its label to fit


def draw_plan(plan: Plan, rows: Sequence[Holding]) -> Figure:
    """The sequence above, one row a domain; the heads below, one row a group.

    Args:
        plan: the plan.
        rows: its holdings.
    """
    domains = {row.place[:3]: _domain_name(row) for row in sorted(rows, key=lambda row: row.place)}
    groups = {row.place: _group_name(plan, row) for row in sorted(rows, key=lambda row: row.place)}
    height = min(2.6 + 0.5 * (len(domains) + len(groups)), _MAX_HEIGHT)
    figure = Figure(figsize=(11, height), layout="constrained")
    sequence, heads = figure.subplots(2, 1, height_ratios=[len(domains) + 0.5, len(groups) + 0.5])
    _set_up(sequence, "position in the sequence", plan.workload.seq_length, list(domains.values()))
    _set_up(heads, "query head", max(row.heads[1] for row in rows), list(groups.values()))
    for row in rows:
        colour, label = _colour(row.rank, len(rows)), spell_range((row.ranks[0], row.ranks[-1] + 1))
        _add_bars(sequence, row.segments, list(domains).index(row.place[:3]), colour, label)
        _add_bars(heads, [row.heads], list(groups).index(row.place), colour, label)
    sequence.set_title("Numbers are ranks. Above: tokens outside attention. Below: heads in attention.")
    return figure


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
    figure.savefig(out, format=kind, dpi=150)
    write_atomically(path, out.getvalue())


def _colour(rank: int, ranks: int) -> Colour:
    """Colours that neighbours can be told apart by, and that all differ in larger plans too."""
    return colormaps["tab20"](rank) if ranks <= 20 else colormaps["turbo"]((rank + 0.5) / ranks)


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
        words.append(f"layers {spell_range(row.layers)}")
    if row.samples is not None:
        words.append(f"{row.samples} samples")
    return ", ".join(words)


def _group_name(plan: Plan, row: Holding) -> str:
    several = len(plan.replicas) > 1 or not plan.is_repeated
    return (f"{_domain_name(row)}: " if several else "") + (row.group_name or f"group {row.group}")
