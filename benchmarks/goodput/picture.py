"""The course of each trial: iterations that have ended over time, and the failures."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.goodput.results import Goodput

_COLOURS = {"undisturbed": "#555555", "elastic": "#c0392b", "restarted": "#3b6ea5"}
_TITLES = {
    "undisturbed": "undisturbed",
    "elastic": "megatron_hexi.elastic",
    "restarted": "torchrun, from checkpoints",
}


def draw_courses(goodput: Goodput) -> Figure:
    """Return one panel: the iteration of each trial over minutes, a mark where it was hurt."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
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
    return figure
