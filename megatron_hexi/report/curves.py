"""Device curves as a picture: achieved rate against size, a panel for each kind of work."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_hexi.cluster import Curve, Device

#: Red, green, blue, opacity; each from 0 to 1.
Colour = tuple[float, float, float, float]
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
        (_draw_device if single else _draw_summary)(panels, device, _colour(number, len(devices)))
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
                hue = _colour(k, len(device.attentions))
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


def _colour(number: int, count: int) -> Colour:
    return colormaps["tab10"](number) if count <= 10 else colormaps["turbo"]((number + 0.5) / count)
