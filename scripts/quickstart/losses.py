"""Losses of training runs of one job as a picture, with their relative differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

#: Smallest drawn difference, for equal values: fp32 resolves nothing smaller, and a logarithm has no zero.
_EQUAL = 1e-8

# The first line is broad and lies below, so that the others do not hide it.
_STYLES: tuple[dict[str, str | float], ...] = (
    {"color": "tab:blue", "linewidth": 5.0, "alpha": 0.35},
    {"color": "tab:red", "linewidth": 1.2},
    {"color": "black", "linewidth": 1.2, "linestyle": ":"},
)


def relative_differences(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the distance of each value from its reference, relative to the reference."""
    return [abs(value - exact) / abs(exact) for value, exact in zip(values, reference, strict=True)]


def draw_losses(losses: Mapping[str, Sequence[float]], limit: float | None = None) -> Figure:
    """Draw the losses of training runs over the iterations, and below them their relative differences.

    Args:
        losses: a name and a loss for each iteration, of the reference and then of up to two runs that
            are compared with it; they may be shorter.
    """
    reference, *compared = losses.values()
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for (name, values), style in zip(losses.items(), _STYLES, strict=False):
        above.plot(range(1, len(values) + 1), values, label=name, **style)
    above.set_ylabel("loss")
    above.legend(frameon=False)
    most = limit or 0.0
    for values, style in zip(compared, _STYLES[1:], strict=False):
        apart = relative_differences(values, reference[: len(values)])
        below.plot(
            range(1, len(values) + 1), [max(value, _EQUAL) for value in apart], ".", color=style["color"]
        )
        most = max(most, *apart)
    below.set_yscale("log")
    below.set_ylim(_EQUAL / 2, 5 * max(most, _EQUAL))
    below.set_ylabel("relative difference")
    below.set_xlabel(f"iteration (equal losses are drawn at {_EQUAL:g})")
    if limit is not None:
        below.axhline(limit, color="black", linestyle="--", linewidth=1)
        below.text(1, limit * 0.8, f"limit {limit:g}", va="top", fontsize=9)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
