"""A plan and every baseline as a picture: tokens/s, and the phases of an iteration."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from megatron_hexi.report.comparison import OURS, Comparison, LayoutResult, alone_text
from megatron_hexi.report.estimate import spell_phase
from megatron_hexi.report.labels import set_title, wrap
from megatron_hexi.spelling import spell_time, time_unit

_BAR = 0.62  # height of a bar, where rows are one apart
_OURS, _OTHERS = "#c0392b", "#9fb4c7"
#: Letters of a reason that fit on a line of the left panel, and lines of it that are shown.
_WIDTH, _LINES = 88, 2
#: Part of the ceiling above which a bar has room for its number.
_INSIDE = 0.4
#: Work in warm colours, communication in cold ones, waiting in grey.
_COLOURS = {
    "token": "#e08214",
    "encoder": "#8c510a",
    "attention": "#fdb863",
    "logits": "#b35806",
    "optimizer": "#fee0b6",
    "all_to_all": "#2166ac",
    "exchange": "#67a9cf",
    "tensor_parallel": "#1b7837",
    "pipeline": "#7fbf7b",
    "gradients": "#762a83",
    "offload": "#c2a5cf",
    "bubble": "#999999",
    "spread": "#cccccc",
}


def draw_comparison(comparison: Comparison, title: str) -> Figure:
    """Draw tokens/s on the left, seconds of an iteration by phase on the right; the fastest at the top.

    The ceiling and the lower bound are lines; a baseline without a layout shows the reason.
    """
    results = comparison.results
    figure = Figure(figsize=(15, 2.6 + 0.62 * len(results)), layout="constrained")
    speeds, times = figure.subplots(1, 2, sharey=True, width_ratios=[5, 4])
    set_title(figure, title)
    _draw_speeds(speeds, comparison)
    _draw_times(times, comparison)
    speeds.set_yticks(range(len(results)), [_label(comparison, result) for result in results])
    for label, result in zip(speeds.get_yticklabels(), results, strict=True):
        label.set_fontweight("bold" if result.name == OURS else "normal")
    speeds.set_ylim(len(results) - 0.4, -0.6)
    for axes in (speeds, times):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    return figure


def _draw_speeds(axes: Axes, comparison: Comparison) -> None:
    ceiling = comparison.ceiling_tokens_per_s
    ours = comparison.ours
    # Tokens of an iteration over the least seconds that one can take.
    bound = (ours.tokens_per_s or 0.0) * (ours.iteration_s or 0.0) / comparison.lower_bound_s
    for row, result in enumerate(comparison.results):
        if result.tokens_per_s is None:
            lines = textwrap.wrap(result.why_not, _WIDTH, max_lines=_LINES, placeholder=" …")
            axes.text(
                0.005 * ceiling, row, "\n".join(lines), va="center", fontsize=8, style="italic", color="0.35"
            )
            continue
        axes.barh(row, result.tokens_per_s, _BAR, color=_OURS if result.name == OURS else _OTHERS)
        share = comparison.share_of_ceiling(result) or 0.0
        inside = share > _INSIDE
        axes.text(
            result.tokens_per_s + (-0.008 if inside else 0.008) * ceiling,
            row,
            f"{result.tokens_per_s:,.0f}  ({share:.0%} of the ceiling)",
            ha="right" if inside else "left",
            va="center",
            fontsize=9,
            color="white" if result.name == OURS and inside else "black",
        )
    axes.axvline(ceiling, color="black", linestyle="--", linewidth=1.2)
    axes.axvline(bound, color="black", linestyle=":", linewidth=1.2)
    axes.set_xlim(0, 1.03 * max(ceiling, bound))
    best = comparison.best_uniform
    label = "tokens/s, predicted" + (f"; 1.00x: {best.name}, the fastest uniform layout" if best else "")
    if alone := alone_text(comparison):
        label += f"; {OURS}: {alone}"
    axes.set_xlabel(wrap(label, _WIDTH, _LINES))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    handles = [
        Line2D([], [], color="black", linestyle="--", label=f"ceiling {ceiling:,.0f}"),
        Line2D(
            [], [], color="black", linestyle=":", label=f"lower bound {spell_time(comparison.lower_bound_s)}"
        ),
    ]
    _add_legend(axes, handles, ncols=2)


def _draw_times(axes: Axes, comparison: Comparison) -> None:
    shown: set[str] = set()
    longest = max(result.iteration_s or 0.0 for result in comparison.results)
    unit = time_unit(longest)
    for row, result in enumerate(comparison.results):
        if result.phases is None:
            continue
        start = 0.0
        seconds = result.phases.by_name
        for name, colour in _COLOURS.items():
            if seconds[name] > 0:
                axes.barh(row, seconds[name] / unit.seconds, _BAR, left=start, color=colour)
                shown.add(name)
                start += seconds[name] / unit.seconds
        axes.text(start, row, f" {spell_time(start * unit.seconds, unit)}", va="center", fontsize=9)
    axes.axvline(comparison.lower_bound_s / unit.seconds, color="black", linestyle=":", linewidth=1.2)
    axes.set_xlim(0, 1.15 * longest / unit.seconds)
    axes.set_xlabel(f"{unit.word} of an iteration, along its slowest way")
    handles = [Patch(color=_COLOURS[name], label=spell_phase(name)) for name in _COLOURS if name in shown]
    _add_legend(axes, handles, ncols=5, handlelength=1)


def _add_legend(axes: Axes, handles: Sequence[Artist], **style: Any) -> None:
    """Write a legend above a panel."""
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=9, **style)


def _label(comparison: Comparison, result: LayoutResult) -> str:
    speed_up, name = comparison.speed_up(result), wrap(result.name, lines=2)
    return name if speed_up is None else f"{name}\n{speed_up:.2f}x"
