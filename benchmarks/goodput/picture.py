"""The course of each trial: iterations that have ended over time, and the failures."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.goodput.results import Goodput

_COLOURS = {"undisturbed": "#555555", "elastic": "#c0392b", "restarted": "#3b6ea5"}
_TITLES = {
    "undisturbed": "undisturbed",
    "elastic": "megatron_hexi.elastic",
    "restarted": "torchrun, from checkpoints",
}


def draw_courses(jobs: Sequence[Goodput]) -> Figure:
    """Return a panel for each job: the iteration of each trial over minutes, a mark where it was hurt."""
    figure = Figure(figsize=(9, 3.6 * len(jobs)), layout="constrained")
    for axes, goodput in zip(figure.subplots(len(jobs), squeeze=False)[:, 0], jobs, strict=True):
        _draw_job(axes, goodput)
        axes.set_title(f"{goodput.settings.job} job", loc="left")
    return figure


def _draw_job(axes: Axes, goodput: Goodput) -> None:
    for name, colour in _COLOURS.items():
        trial = getattr(goodput, name)
        minutes = [seconds / 60 for seconds, _ in trial.done]
        axes.step(minutes, [i for _, i in trial.done], where="post", color=colour, label=_TITLES[name])
        axes.plot(
            [blow.at_s / 60 for blow in trial.blows],
            [blow.iteration for blow in trial.blows],
            "x",
            color=colour,
            markersize=8,
            markeredgewidth=2,
        )
    axes.set_xlabel("minutes since the start (cross: a failure)")
    axes.set_ylabel("iteration")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
