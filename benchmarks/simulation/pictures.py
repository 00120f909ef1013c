"""Pictures of the results: speed-ups and shares of the ceiling by context, and one cluster in full."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.simulation.cells import (
    SIMULATION_CONTEXTS,
    SIMULATIONS,
    TESTBED_CONTEXTS,
    TESTBEDS,
    Cell,
    spell_length,
)
from benchmarks.simulation.results import Result, Rival
from benchmarks.simulation.summary import cells_of
from benchmarks.simulation.words import shorten, spell_gpus

#: One colour a model, the same in all pictures.
_COLOURS = {"gpt-3b": "#1b7837", "gpt-7b": "#2166ac", "gpt-13b": "#c0392b", "gpt-70b": "#762a83"}
_OURS, _UNIFORM, _OTHERS = "#c0392b", "#9fb4c7", "#d9c7a0"
#: The cell that is drawn in full.
SHOWN = "simulation/sim-64/gpt-13b/256K/dp1"

_Value = Callable[[Result], float | None]


def draw_all(results: Mapping[str, Result], folder: Path) -> list[str]:
    """Write the pictures that the results suffice for.

    Args:
        results: all.
        folder: where to.

    Returns:
        Their files' names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"speed-up.png": draw_speed_ups(results), "ceiling.png": draw_ceilings(results)}
    if SHOWN in results and results[SHOWN].ours is not None:
        figures["one-cluster.png"] = draw_one(results[SHOWN])
    for name, figure in figures.items():
        # Without the writer's name and version the same picture has the same bytes.
        figure.savefig(folder / name, dpi=110, metadata={"Software": None})
    return list(figures)


def draw_speed_ups(results: Mapping[str, Result]) -> Figure:
    """Over the strongest uniform baseline (full lines) and over the strongest of all (dotted)."""
    figure, panels = _panels("times the strongest baseline's tokens/s")
    for cluster, axes in panels.items():
        _lines(axes, results, cluster, lambda one: one.speed_up, "o-")
        _lines(axes, results, cluster, lambda one: one.speed_up_over_all, ".:")
        axes.axhline(1, color="black", linewidth=0.8)
    for axes in panels.values():  # not before all are drawn: panels of a row share their scale
        axes.set_ylim(bottom=0.9)
    _legend(
        figure,
        [
            Line2D([], [], color="0.3", marker="o", label="over the strongest uniform baseline"),
            Line2D(
                [], [], color="0.3", linestyle=":", marker=".", label="over the strongest of all baselines"
            ),
        ],
    )
    return figure


def draw_ceilings(results: Mapping[str, Result]) -> Figure:
    """The plan's part of the ceiling, the bound's as a mark above it, the best uniform baseline's below."""
    figure, panels = _panels("part of the ceiling")
    for cluster, axes in panels.items():
        _lines(axes, results, cluster, lambda one: one.share, "o-")
        _lines(axes, results, cluster, lambda one: one.bound_share, "_", size=16)
        _lines(axes, results, cluster, _uniform_share, ".:")
        axes.axhline(1, color="black", linestyle="--", linewidth=0.8)
        axes.set_ylim(0, 1.06)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _legend(
        figure,
        [
            Line2D([], [], color="0.3", marker="o", label="plan"),
            Line2D(
                [], [], color="0.3", linestyle="", marker="_", markersize=12, label="bound: no plan has more"
            ),
            Line2D([], [], color="0.3", linestyle=":", marker=".", label="strongest uniform baseline"),
        ],
    )
    return figure


def draw_one(result: Result) -> Figure:
    """Tokens/s of the plan and of every baseline on one cluster, with ceiling and bound."""
    assert result.ours is not None
    ours = Rival("this plan", False, result.ours.tokens_per_s, result.ours.layout, "")
    rows = [ours, *sorted(result.rivals, key=lambda rival: -(rival.tokens_per_s or 0.0))]
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    ceiling, bound = result.ceiling_tokens_per_s, result.ours.bound_tokens_per_s
    for row, one in enumerate(rows):
        if one.tokens_per_s is None:
            text, colour = _short(one.why_not), "0.4"
            axes.text(0.006 * ceiling, row, text, va="center", fontsize=9, color=colour, style="italic")
            continue
        colour = _OURS if one is ours else _UNIFORM if one.uniform else _OTHERS
        axes.barh(row, one.tokens_per_s, 0.66, color=colour)
        words = f" {one.tokens_per_s:,.0f}" + (f"  {_short(one.layout)}" if one.layout else "")
        axes.text(
            0.006 * ceiling, row, words, va="center", fontsize=9, color="white" if one is ours else "black"
        )
    axes.axvline(ceiling, color="black", linestyle="--", linewidth=1.2, label=f"ceiling {ceiling:,.0f}")
    axes.axvline(bound, color="black", linestyle=":", linewidth=1.4, label=f"bound {bound:,.0f}")
    axes.set_yticks(range(len(rows)), [one.name for one in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.02 * ceiling)
    axes.set_xlabel("tokens/s, predicted")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=9)
    _, cluster, model, length, _ = result.cell.split("/")
    axes.set_title(
        f"{model}, {length} tokens, on {cluster}: {spell_gpus(result.gpus)}", fontsize=11, loc="left"
    )
    return figure


def _panels(what: str) -> tuple[Figure, dict[str, Axes]]:
    figure = Figure(figsize=(12, 6.6), layout="constrained")
    grid = figure.subplots(2, 3, sharey="row")
    panels: dict[str, Axes] = {}
    for row, (clusters, contexts) in zip(
        grid, ((TESTBEDS, TESTBED_CONTEXTS), (SIMULATIONS, SIMULATION_CONTEXTS)), strict=True
    ):
        for axes, cluster in zip(row, clusters, strict=True):
            panels[cluster] = axes
            axes.set_title(cluster, fontsize=10)
            axes.set_xscale("log", base=2)
            axes.set_xlim(contexts[0] / 1.15, contexts[-1] * 1.15)
            axes.set_xticks(contexts, [spell_length(tokens) for tokens in contexts])
            axes.grid(axis="y", color="0.92")
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(what)
    return figure, panels


def _lines(
    axes: Axes, results: Mapping[str, Result], cluster: str, value: _Value, style: str, size: float = 6
) -> None:
    found: dict[str, list[tuple[Cell, Result]]] = {}
    for cell, one in cells_of(results, cluster=cluster, data_parallel=1, kernel=None):
        found.setdefault(cell.model, []).append((cell, one))
    for model, cells in found.items():
        points = [(cell.seq_length, value(one)) for cell, one in cells]
        axes.plot(
            [tokens for tokens, _ in points],
            [float("nan") if part is None else part for _, part in points],
            style,
            color=_COLOURS[model],
            markersize=size,
            linewidth=1.4,
        )


def _legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    models = [Line2D([], [], color=colour, linewidth=3, label=model) for model, colour in _COLOURS.items()]
    figure.legend(handles=[*models, *handles], loc="outside lower center", ncols=7, frameon=False, fontsize=9)


def _uniform_share(one: Result) -> float | None:
    rival = one.uniform
    return (
        None if rival is None or rival.tokens_per_s is None else rival.tokens_per_s / one.ceiling_tokens_per_s
    )


def _short(words: str, most: int = 105) -> str:
    words = shorten(words)
    return words if len(words) <= most else words[: most - 2].rsplit(" ", 1)[0] + " …"
