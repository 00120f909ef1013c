"""The drawing of a pipeline's orders: 1F1B, interleaved ministages, and ministages one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_hexi.mesh.pipeline_order import PipelineStep, pipeline_steps, step_source
from megatron_hexi.mesh.residence import ministage_passes

_STAGES, _MICRO_BATCHES = 3, 6
#: Time of a stage's layers on a micro-batch, forward and backward.
_SECONDS = {"forward": 1.0, "backward": 2.0}
#: By way and ministage; ColorBrewer's paired blues and oranges.
_COLOURS = {"forward": ("#a6cee3", "#1f78b4"), "backward": ("#fdbf6f", "#ff7f00")}

#: Of a pass: its stage, begin and end.
Spans = dict[tuple[int, PipelineStep], tuple[float, float]]


def draw_schedules() -> Figure:
    """A panel for each order, on one time axis; a row a stage, micro-batches by their numbers."""
    panels = (
        ("1F1B", spans([pipeline_steps(_STAGES, stage, _MICRO_BATCHES) for stage in range(_STAGES)], 1)),
        (
            "order: interleaved, 2 ministages in each stage: less time to fill and drain",
            spans([pipeline_steps(_STAGES, stage, _MICRO_BATCHES, 2) for stage in range(_STAGES)], 2),
        ),
        (
            "ministages: 2, one after the other: only inputs are kept, so all but the last run forward twice",
            spans([_one_after_the_other(stage) for stage in range(_STAGES)], 2, repeats=True),
        ),
    )
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    last = max(end for _, found in panels for _, end in found.values())
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


def _one_after_the_other(stage: int) -> list[PipelineStep]:
    """The passes of a stage whose ministages each take all micro-batches in turn."""
    steps = []
    for one in ministage_passes(2, gives_loss=stage == _STAGES - 1, forward_only=False):
        for micro_batch in range(_MICRO_BATCHES):
            if one.way != "backward":
                steps.append(PipelineStep("forward", micro_batch, one.ministage))
            if one.way != "forward":
                steps.append(PipelineStep("backward", micro_batch, one.ministage))
    return steps


def spans(orders: Sequence[Sequence[PipelineStep]], chunks: int, *, repeats: bool = False) -> Spans:
    """When each pass runs: in its stage's order, after the pass that its input comes from.

    Args:
        repeats: whether a backward pass first repeats its forward pass, but for the model's last ministage.
    """
    place, found = [0] * len(orders), Spans()
    while len(found) < sum(map(len, orders)):
        for stage, steps in enumerate(orders):
            while place[stage] < len(steps):
                step = steps[place[stage]]
                source = step_source(len(orders), stage, step, chunks)
                if source is not None and source not in found:
                    break
                before = found[stage, steps[place[stage] - 1]][1] if place[stage] else 0.0
                begin = max(before, found[source][1] if source is not None else 0.0)
                is_last = stage == len(orders) - 1 and step.chunk == chunks - 1
                again = _SECONDS["forward"] * (repeats and step.way == "backward" and not is_last)
                found[stage, step] = begin, begin + (_SECONDS[step.way] + again) / chunks
                place[stage] += 1
    return found


def _draw(axes: Axes, title: str, found: Spans, last: float) -> None:
    for (stage, step), (begin, end) in found.items():
        colour = _COLOURS[step.way][step.chunk]
        axes.barh(stage, end - begin, 0.8, begin, color=colour, edgecolor="white", linewidth=0.6)
        axes.text((begin + end) / 2, stage, str(step.micro_batch), ha="center", va="center", fontsize=7)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlim(0, last)
    axes.set_xticks([])
    axes.set_yticks(range(_STAGES), [f"stage {stage}" for stage in range(_STAGES)])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
