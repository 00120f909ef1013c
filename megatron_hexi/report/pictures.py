"""Plans as pictures: who holds which part of the sequence, and which heads, in one colour a rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_hexi.errors import HexiError
from megatron_hexi.plan import Plan
from megatron_hexi.report.holdings import Holding

_ROW = 0.8  # height of a bar, where rows are one apart


def draw_plan(plan: Plan, rows: Sequence[Holding]) -> Figure:
    """The sequence above, one row a replica; the heads below, one row a group.

    Args:
        plan: the plan.
        rows: its holdings.
    """
    groups = list(dict.fromkeys((row.replica, row.group) for row in rows))
    figure = Figure(figsize=(11, 2.6 + 0.5 * (len(plan.replicas) + len(groups))), layout="constrained")
    sequence, heads = figure.subplots(2, 1, height_ratios=[len(plan.replicas) + 0.5, len(groups) + 0.5])
    for row in rows:
        colour = _colour(row.rank, len(rows))
        shard = [(start, stop - start) for start, stop in row.segments]
        _add_bar(sequence, shard, row.replica, colour, f"{row.rank}")
        first, last = row.heads
        _add_bar(
            heads, [(first, last - first)], groups.index((row.replica, row.group)), colour, f"{row.rank}"
        )
    several = len(plan.replicas) > 1
    names = {(row.replica, row.group): row.group_name or f"group {row.group}" for row in rows}
    _finish(sequence, "position in the sequence", plan.workload.seq_length, _replica_names(plan))
    _finish(
        heads,
        "query head",
        plan.workload.local_heads,
        [f"replica {key[0]}: {names[key]}" if several else names[key] for key in groups],
    )
    sequence.set_title("Numbers are ranks. Above: tokens outside attention. Below: heads in attention.")
    return figure


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the file's name asks for.

    Raises:
        HexiError: the format is unknown, or the file cannot be written.
    """
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise HexiError(
            f"{path}: a picture in an unknown format; end its name in .{', .'.join(sorted(known))}"
        )
    try:
        figure.savefig(path, dpi=150)
    except OSError as problem:
        raise HexiError(f"{path}: cannot be written ({problem.strerror}); check the folder") from None


def _colour(rank: int, ranks: int) -> tuple[float, float, float, float]:
    """Colours that neighbours can be told apart by, and that all differ in larger plans too."""
    return colormaps["tab20"](rank) if ranks <= 20 else colormaps["turbo"]((rank + 0.5) / ranks)


def _add_bar(
    axes: Axes, spans: list[tuple[int, int]], row: int, colour: tuple[float, float, float, float], label: str
) -> None:
    spans = [(start, size) for start, size in spans if size]
    axes.broken_barh(spans, (row - _ROW / 2, _ROW), facecolor=colour, edgecolor="white", linewidth=0.5)
    for start, size in spans:
        axes.text(start + size / 2, row, label, ha="center", va="center", fontsize=7, clip_on=True)


def _finish(axes: Axes, what: str, end: int, rows: list[str]) -> None:
    axes.set_xlim(0, end)
    axes.set_xlabel(what)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _replica_names(plan: Plan) -> list[str]:
    return [f"replica {number}" for number in range(len(plan.replicas))]
