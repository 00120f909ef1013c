"""The drawing of a pipeline's orders: 1F1B, interleaved ministages, and ministages one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_hexi.cost import Phases
from megatron_hexi.cost.lanes import Lane, Passing
from megatron_hexi.cost.pipeline import PassSpan, Pipeline

_STAGES, _MICRO_BATCHES = 3, 6
#: Time of a stage's layers on a micro-batch, forward and backward.
_SECONDS = {"forward": 1.0, "backward": 2.0}
#: By way and ministage; ColorBrewer's paired blues and oranges.
_COLOURS = {"forward": ("#a6cee3", "#1f78b4"), "backward": ("#fdbf6f", "#ff7f00")}


def draw_schedules() -> Figure:
    """A panel for each order, on one time axis; a row a stage, micro-batches by their numbers."""
    panels = (
        ("1F1B", spans(1)),
        ("order: interleaved, 2 ministages in each stage: less time to fill and drain", spans(2)),
        (
            "ministages: 2, one after the other: only inputs are kept, so all but the last run forward twice",
            spans(2, in_turn=True),
        ),
    )
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    last = max(span.end_s for _, found in panels for span in found)
    for axes, (title, found) in zip(figure.subplots(len(panels), 1), panels, strict=True):
        _draw(axes, title, found, last)
    figure.axes[-1].set_xlabel("time")
    handles = [
        Patch(color=_COLOURS[way][number], label=f"{way}, ministage {number}")
        for way in _COLOURS
        for number in range(2)
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def spans(ministages: int, *, in_turn: bool = False) -> list[PassSpan]:
    """When each pass runs, with borders and transfers that take no time.

    Args:
        in_turn: whether a backward pass first repeats its forward pass, but for the model's last ministage.
    """
    takes, forward = tuple(range(_MICRO_BATCHES)), _SECONDS["forward"]
    lanes = []
    for stage in range(_STAGES):
        again = (1 - (stage == _STAGES - 1) / ministages) * in_turn
        lanes.append((Lane(takes, Phases(token=sum(_SECONDS.values()) + again * forward), forward),))
    none, parts = np.zeros((_STAGES, _MICRO_BATCHES)), np.full((_STAGES, ministages), 1 / ministages)
    passing = (Passing.nothing(ministages),) * _STAGES if in_turn else None
    return Pipeline(tuple(lanes), none, none, parts, passing).spans()


def _draw(axes: Axes, title: str, found: Sequence[PassSpan], last: float) -> None:
    for span in found:
        colour, middle = _COLOURS[span.way][span.chunk], (span.start_s + span.end_s) / 2
        axes.barh(
            span.stage,
            span.end_s - span.start_s,
            0.8,
            span.start_s,
            color=colour,
            edgecolor="white",
            linewidth=0.6,
        )
        axes.text(middle, span.stage, str(span.micro_batch), ha="center", va="center", fontsize=7)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlim(0, last)
    axes.set_xticks([])
    axes.set_yticks(range(_STAGES), [f"stage {stage}" for stage in range(_STAGES)])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
