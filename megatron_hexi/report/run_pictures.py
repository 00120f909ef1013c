"""A run as pictures: each rank's time and memory beside the prediction, and the course of the training."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_hexi.report.run_summary import RankRun, Run

_WIDTH = 7.5  # inches
_ROW = 0.42
_MAX_HEIGHT = 60.0  # inches; beyond it rows get thinner instead
#: Top and height of the bars of a rank, where ranks are one apart: measured above, predicted thin below.
_MEASURED, _PREDICTED = (-0.4, 0.5), (0.14, 0.22)
_ALONE = (-0.25, 0.5)  # where nothing was predicted
_MOST_NAMED = 64
_PARTS = {
    "busy_s": ("busy", "#4878a8"),
    "attention_s": ("waiting in attention", "#c9a0dc"),
    "gradients_s": ("for gradients and weights", "#f2a7c3"),
    "pipeline_s": ("for other stages", "#c8c8c8"),
    "experts_s": ("for experts", "#a6d8a8"),
}
_PREDICTION = "#e08214"
_PREDICTED_WAIT = "#fde0b8"
_LIMIT = "#b2182b"


def draw_ranks(ranks: Sequence[RankRun]) -> Figure:
    """Draw each rank's mean iteration, and below it the prediction."""
    figure, axes = _rows(ranks)
    longest = max(rank.busy_s + rank.waited_s for rank in ranks)
    scale, unit = (1.0, "seconds") if longest >= 1 else (1e3, "milliseconds")
    bar = _ALONE if ranks[0].predicted_busy_s is None else _MEASURED
    starts = [0.0] * len(ranks)
    for field, (name, colour) in _PARTS.items():
        widths = [getattr(rank, field) * scale for rank in ranks]
        if any(widths):
            _bars(axes, bar, widths, starts, colour, name)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
    work = [rank.predicted_busy_s for rank in ranks if rank.predicted_busy_s is not None]
    waits = [rank.predicted_wait_s for rank in ranks if rank.predicted_wait_s is not None]
    if work:
        busy, waiting = [value * scale for value in work], [value * scale for value in waits]
        _bars(axes, _PREDICTED, busy, [0.0] * len(busy), _PREDICTION, "predicted: busy")
        _bars(axes, _PREDICTED, waiting, busy, _PREDICTED_WAIT, "predicted: waiting")
    axes.set_xlabel(f"{unit} of an iteration")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def draw_memory(ranks: Sequence[RankRun]) -> Figure:
    """Draw each rank's peak memory, its prediction, and the device's usable memory."""
    figure, axes = _rows(ranks)
    zero = [0.0] * len(ranks)
    bar = _ALONE if ranks[0].predicted_gib is None else _MEASURED
    _bars(axes, bar, [rank.peak_gib for rank in ranks], zero, _PARTS["busy_s"][1], "most memory")
    known = [rank.predicted_gib for rank in ranks if rank.predicted_gib is not None]
    if known:
        _bars(axes, _PREDICTED, known, zero, _PREDICTION, "predicted")
    for place, rank in enumerate(ranks):
        if rank.usable_gib is not None:
            label = "usable" if place == 0 else None
            axes.plot([rank.usable_gib] * 2, [place - 0.5, place + 0.5], color=_LIMIT, lw=2, label=label)
    axes.set_xlabel("GiB")
    axes.set_xlim(left=0)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def draw_course(run: Run) -> Figure:
    """Draw loss above and seconds below, over the iterations."""
    figure = Figure(figsize=(_WIDTH, 5.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    marker = "." if len(run.iterations) <= 100 else ""
    losses = [math.nan if loss is None else loss for loss in run.losses]
    above.plot(run.iterations, losses, marker=marker, color=_PARTS["busy_s"][1], linewidth=1.4)
    above.set_ylabel("loss")
    below.plot(run.iterations, run.seconds, marker=marker, color="#666666", linewidth=1.0, label="measured")
    if run.predicted is not None:
        below.axhline(run.predicted.iteration_s, color=_PREDICTION, linestyle="--", label="predicted")
    below.set_ylim(bottom=0)
    below.set_ylabel("seconds")
    below.set_xlabel("iteration")
    below.xaxis.get_major_locator().set_params(integer=True)
    below.legend(frameon=False, fontsize=9, loc="lower right")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def _rows(ranks: Sequence[RankRun]) -> tuple[Figure, Axes]:
    height = min(1.3 + _ROW * len(ranks), _MAX_HEIGHT)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    if len(ranks) <= _MOST_NAMED:
        axes.set_yticks(range(len(ranks)), [f"rank {rank.rank}" for rank in ranks])
    else:
        axes.set_ylabel("rank")
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    return figure, axes


def _bars(
    axes: Axes,
    bar: tuple[float, float],
    widths: Sequence[float],
    starts: Sequence[float],
    colour: str,
    name: str,
) -> None:
    top, height = bar
    places = [place + top for place in range(len(widths))]
    axes.barh(places, widths, height, starts, align="edge", color=colour, label=name)
