"""Plans as pictures (layers of stages, positions of the sequence, heads, experts), and curves of GPUs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from megatron_hexi.cluster import Curve, Device
from megatron_hexi.errors import HexiError, printable
from megatron_hexi.plan import Plan
from megatron_hexi.plan.model import Range
from megatron_hexi.report.labels import BarLabel, add_legend, every_nth, legend_height, lines_of, set_title
from megatron_hexi.report.plan_panels import (
    LINE,
    POSITION,
    Colour,
    Paint,
    PlanPanel,
    colour_of,
    node_kinds,
    plan_panels,
    shade,
)
from megatron_hexi.report.unit_summary import UnitSummary
from megatron_hexi.text_file import write_atomically

#: Sizes drawn: rows or tokens.
LEAST, MOST = 16, 2**20


def draw_curves(devices: Sequence[Device]) -> Figure:
    """Draw rates of matrix products and of attention, forward and backward, on a logarithmic axis.

    One device shows every kernel, causal (solid) and full (dashed); several show their fastest kernel,
    causal, and logarithmic rates. Dots are the sizes that a source gives, hollow ones are estimates;
    lines below the first dot follow from the saturating rule.
    """
    figure = Figure(figsize=(15, 5.2 if len(devices) == 1 else 6.5), layout="constrained")
    panels = figure.subplots(1, 3)
    single = len(devices) == 1
    for number, device in enumerate(devices):
        (_draw_device if single else _draw_summary)(panels, device, colour_of(number, len(devices), "tab10"))
    mask = "" if single else ", causal, fastest kernel"
    for axes, title, size in zip(
        panels,
        ("matrix product", f"attention forward{mask}", f"attention backward{mask}"),
        ("rows", "tokens", "tokens"),
        strict=True,
    ):
        _finish(axes, title, size)
        if single:
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=7, loc="upper left")
        else:
            axes.set_yscale("log")
    if not single:
        figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside right center")
    name = devices[0].name if single else "GPUs of the catalogue"
    figure.suptitle(f"{name}: achieved TFLOP/s (hollow: estimates)")
    return figure


def _draw_device(panels: Sequence[Axes], device: Device, colour: Colour) -> None:
    _draw(panels[0], device.matmul, colour, "-", device.name)
    for k, attention in enumerate(device.attentions):
        for name, passes, style in (("causal", attention.causal, "-"), ("full", attention.full, "--")):
            for axes, curve in zip(panels[1:], (passes.forward, passes.backward), strict=True):
                hue = colour_of(k, len(device.attentions), "tab10")
                _draw(axes, curve, hue, style, f"{attention.kernel}, {name}")


def _draw_summary(panels: Sequence[Axes], device: Device, colour: Colour) -> None:
    passes = device.attention().causal
    for axes, curve in zip(panels, (device.matmul, passes.forward, passes.backward), strict=True):
        _draw(axes, curve, colour, "-", device.name)


def _draw(axes: Axes, curve: Curve, colour: Colour, style: str, label: str) -> None:
    # Between its sizes a curve is linear in the logarithm of the size.
    sizes = [LEAST, *(size for size in curve.sizes if LEAST < size < MOST), MOST]
    axes.plot(sizes, [curve.rate(size) for size in sizes], style, color=colour, label=label, linewidth=1.3)
    measured = [size for size in curve.sizes if size >= curve.given_from]
    face = "white" if curve.estimate else colour
    axes.plot(
        measured,
        [curve.rate(size) for size in measured],
        "o",
        color=colour,
        markerfacecolor=face,
        markersize=4.5,
    )


def _finish(axes: Axes, title: str, size: str) -> None:
    axes.set_title(title)
    axes.set_xscale("log", base=2)
    axes.set_xlim(LEAST, MOST)
    ticks = [16, 128, 1024, 8192, 65536, 2**20]
    axes.set_xticks(ticks, ["16", "128", "1k", "8k", "64k", "1M"])
    axes.set_xlabel(size)
    axes.set_ylabel("TFLOP/s")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


_BAR = 0.8  # height of a bar, where rows are one apart
_WIDTH = 11.0  # inches
_LEAST_LABELLED = 0.004  # part of an axis that a bar takes, if any label fits into it
_MAX_HEIGHT = 60.0  # inches; beyond it rows get thinner instead

_TICKS = (8, 4, 2)  # of the sequence, where that many parts are whole K


def draw_plan(plan: Plan, rows: Sequence[UnitSummary], gpus: Sequence[str] = ()) -> Figure:
    """Draw layers of each replica's stages, tokens of each domain, heads of each group, and experts.

    Layers, and experts of ranks, are drawn where the plan has them. Domains of one unit (the whole sequence)
    and groups of one unit (all heads) have no row where others do.

    Args:
        gpus: the model of GPU of each rank, if known; else kinds are taken from the names of nodes.
    """
    paint = Paint.of(rows, gpus or node_kinds(plan, rows))
    panels = plan_panels(plan, sorted(rows, key=lambda row: row.place), paint)
    around = 0.8 + 0.7 * len(panels) + legend_height(paint.kinds, _WIDTH)
    heights = _heights([panel.height for panel in panels], _MAX_HEIGHT - around)
    figure = Figure(figsize=(_WIDTH, around + sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, panel, height in zip(all_axes, panels, heights, strict=True):
        _draw_panel(axes, panel, height)
    set_title(figure, plan_title(plan))
    if paint.kinds:
        shades = enumerate(paint.kinds)
        add_legend(figure, [Patch(color=shade(kind, 0), label=name) for kind, name in shades])
    return figure


def _heights(desired: Sequence[float], room: float) -> list[float]:
    """Return heights of panels, in inches: small ones as wanted, the others equal parts of the rest."""
    heights = list(desired)
    for done, number in enumerate(sorted(range(len(desired)), key=desired.__getitem__)):
        heights[number] = min(desired[number], room / (len(desired) - done))
        room -= heights[number]
    return heights


def _draw_panel(axes: Axes, panel: PlanPanel, height: float) -> None:
    """Draw a panel whose rows have a height, in inches."""
    names, places = list(panel.rows.values()), {place: row for row, place in enumerate(panel.rows)}
    step = every_nth(len(names), height, LINE * lines_of(names))
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlim(0, panel.end)
    axes.set_xlabel(panel.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.unit == POSITION:
        _number_positions(axes, panel.end)
    axes.set_yticks(range(0, len(names), step), names[::step], fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for bar in panel.bars:
        if bar.row in places:
            _add_bars(axes, bar.ranges, places[bar.row], bar.colour, bar.texts)


def plan_title(plan: Plan) -> str:
    """Return a title from what the plan states: model, sequence, cluster, and predicted speed."""
    made, estimate = plan.provenance, plan.estimate
    words = [f"{_spell_tokens(plan.workload.seq_length)} tokens", f"{plan.ranks} ranks"]
    if made and made.model:
        words.insert(0, printable(Path(made.model).name))
    if made and made.cluster:
        words[-1] += f" of {made.cluster}"
    if estimate and estimate.tokens_per_s:
        words.append(f"predicted {estimate.tokens_per_s:,.0f} tokens/s")
    return ", ".join(words)


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format of the file's suffix."""
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
    """Draw dollar signs in names as they are: matplotlib reads text between two as mathematics.

    Powers of ten on logarithmic axes stay mathematics.
    """
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    for axes in figure.axes:
        for axis in (a for a in (axes.xaxis, axes.yaxis) if a.get_scale() == "log"):
            for text in axis.findobj(Text):
                text.set_parse_math(text is not axis.label)


def _number_positions(axes: Axes, end: int) -> None:
    """Label positions at equal parts of the sequence, if these are multiples of 1,024; else whole numbers."""
    parts = next((parts for parts in _TICKS if end % (parts * 1024) == 0), None)
    axes.xaxis.set_major_locator(MultipleLocator(end // parts) if parts else MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _spell_tokens(int(value))))


def _spell_tokens(count: int) -> str:
    """Return a number of tokens as text: 131072 as 128K, 5000 as 5,000."""
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
