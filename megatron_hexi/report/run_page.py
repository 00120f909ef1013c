"""A run as one HTML page without network or scripts, with its pictures as SVG."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import megatron_hexi
from megatron_hexi.cost import IterationCost
from megatron_hexi.plan import Plan
from megatron_hexi.report.estimate import phases_line
from megatron_hexi.report.pictures import draw_plan, read_as_written
from megatron_hexi.report.run_summary import RankRun, Run
from megatron_hexi.report.unit_summary import UnitSummary, unit_summaries
from megatron_hexi.spelling import spell_range, spell_seconds

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


_TEMPLATE = "run.html.j2"
_TABLE = "The numbers are in the table below."
#: Names and references in an SVG.
_NAMES = re.compile(r'(\bid="|url\(#|href="#)')


@dataclass(frozen=True)
class Picture:
    """A drawing in the page."""

    svg: Markup
    alt: str


def run_page(
    run: Run,
    plan: Plan,
    title: str,
    cost: IterationCost | None = None,
    timeline: Figure | None = None,
    simulated_s: float | None = None,
) -> str:
    """Return the page."""
    rows = unit_summaries(plan)
    gpus = [rank.device for rank in cost.ranks] if cost else []
    pictures = {
        "plan": _picture("plan", draw_plan(plan, rows, gpus), _plan_alt(rows)),
        "ranks": _picture("ranks", draw_ranks(run.ranks), f"Busy and waiting time of each rank. {_TABLE}"),
        "memory": _picture("memory", draw_memory(run.ranks), f"Memory of each rank. {_TABLE}"),
        "course": _picture("course", draw_course(run), _course_alt(run)),
    }
    if timeline is not None:
        alt = (
            "A simulated iteration: micro-batches by stage, and what each rank computes and sends in a layer."
        )
        pictures["timeline"] = _picture("timeline", timeline, alt)
    page = Environment(
        loader=PackageLoader("megatron_hexi.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters |= {
        "seconds": spell_seconds,
        "share": lambda value: "–" if value is None else f"{value:.1%}",
        "gib": lambda value: "–" if value is None else f"{value:.2f}",
        "count": lambda value: f"{value:,.0f}",
        "heads": spell_range,
    }
    return page.get_template(_TEMPLATE).render(
        run=run,
        plan=plan,
        units=rows,
        title=title,
        pictures=pictures,
        last_loss=next((loss for loss in reversed(run.losses) if loss is not None), None),
        phases=None if cost is None else phases_line(cost),
        simulated_s=simulated_s,
        version=megatron_hexi.__version__,
    )


def _picture(name: str, figure: Figure, alt: str) -> Picture:
    out = io.StringIO()
    read_as_written(figure)
    # Text stays text: it can be read, found and copied, and takes a tenth of the space.
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    svg = _NAMES.sub(rf"\g<1>{name}-", text[text.index("<svg") :])  # a page's names must all differ
    return Picture(Markup(svg), alt)


def _plan_alt(rows: Sequence[UnitSummary]) -> str:
    tokens = ", ".join(f"rank {row.rank}: {row.tokens:,} tokens" for row in rows[:16])
    return f"Who holds which part of the sequence and which heads. {tokens}."


def _course_alt(run: Run) -> str:
    known = [loss for loss in run.losses if loss is not None]
    course = f"from {known[0]:.4g} to {known[-1]:.4g}" if known else "not finite"
    return f"Curves over {len(run.iterations)} iterations: the loss {course}, and the seconds of each."
