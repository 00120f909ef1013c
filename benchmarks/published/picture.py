"""Predicted over published, a line a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.published.predict import Comparison

_TIME, _MEMORY = "#c0392b", "#2c6fad"


def draw(results: Mapping[str, Sequence[Comparison]]) -> Figure:
    """The error of each row; the grey band is a quarter either way."""
    figure = Figure(figsize=(8, 0.8 + 0.42 * len(results)), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(-0.25, 0.25, color="#eeeeee", zorder=0)
    axes.axvline(0, color="black", linewidth=0.8)
    for what, colour, marker, shift in (("time", _TIME, "o", 0.12), ("memory", _MEMORY, "s", -0.12)):
        points = [
            (row.error, place + shift)
            for place, rows in enumerate(results.values())
            for row in rows
            if row.what == what
        ]
        axes.plot(*zip(*points, strict=True), marker, color=colour, alpha=0.6, markersize=5, label=what)
    axes.set_yticks(range(len(results)), list(results))
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("predicted over published, less one")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure
