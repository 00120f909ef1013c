"""Trainings of one job as a picture: their losses over each other, and how far they are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

#: Nothing smaller is told apart in fp32, and a logarithm has no zero: equal values are drawn here.
_EQUAL = 1e-8

# The first lies below and is broad, so that the others do not hide it.
_STYLES: tuple[dict[str, str | float], ...] = (
    {"color": "tab:blue", "linewidth": 5.0, "alpha": 0.35},
    {"color": "tab:red", "linewidth": 1.2},
    {"color": "black", "linewidth": 1.2, "linestyle": ":"},
)


def relative_differences(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """How far each value is from its reference, as a part of that."""
    return [abs(value - exact) / abs(exact) for value, exact in zip(values, reference, strict=True)]


def draw_losses(losses: Mapping[str, Sequence[float]], limit: float | None = None) -> Figure:
    """Trainings' losses over the iterations, and below them their relative differences.

    Args:
        losses: a name and one loss an iteration, of the reference and then of up to two that are held against
            it; they may be shorter.
        limit: of the relative differences, drawn as a line.
    """
    reference, *others = losses.values()
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for (name, values), style in zip(losses.items(), _STYLES, strict=False):
        above.plot(range(1, len(values) + 1), values, label=name, **style)
    above.set_ylabel("loss")
    above.legend(frameon=False)
    most = limit or 0.0
    for values, style in zip(others, _STYLES[1:], strict=False):
        apart = relative_differences(values, reference[: len(values)])
        below.plot(range(1, len(values) + 1), [max(one, _EQUAL) for one in apart], ".", color=style["color"])
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
