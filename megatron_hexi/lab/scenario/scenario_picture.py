"""A scenario as a picture: tokens/s of each policy over time, and below it the events of the cluster."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.lab.scenario import Course, Event, PlayedScenario
from megatron_hexi.lab.scenario.scenario_report import scenario_line
from megatron_hexi.report.labels import set_title, wrap

_POLICIES = {"static": "#b2182b", "re-planning": "#4878a8", "oracle": "#777777"}
_EVENTS = {"throttled": "#e08214", "congested": "#8073ac", "lost": "#333333"}
_MOST_ROWS = 24
_UNITS = ((2 * 86400, 86400, "days"), (2 * 3600, 3600, "hours"), (0, 60, "minutes"))
#: Points in time; tokens/s between two are a mean, so that a swap is no spike down to zero.
_POINTS = 600


def draw_scenario(played: PlayedScenario) -> Figure:
    """Draw a panel for each policy, and below a row for each name with events, up to a limit."""
    names = sorted({event.name for event in played.events})
    rows = min(len(names), _MOST_ROWS)
    heights = [1.5] * len(played.courses) + ([0.3 + 0.2 * rows] if rows else [])
    figure = Figure(figsize=(10, 1.0 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    unit_s, unit = next((size, word) for least, size, word in _UNITS if played.lasts_s >= least)
    top = 1.08 * max(piece.tokens_per_s for course in played.courses for piece in course.pieces)
    for axes, course in zip(panels, played.courses, strict=False):
        _draw_course(axes, course, played, unit_s)
        axes.set_ylim(0, max(top, 1.08 * played.undisturbed_tokens_per_s))
    if rows:
        _draw_events(panels[-1], played.events, names[:rows], unit_s)
        figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    panels[-1].set_xlim(0, played.lasts_s / unit_s)
    panels[-1].set_xlabel(unit if len(names) == rows else f"{unit}; {rows} of {len(names)} rows of events")
    set_title(figure, scenario_line(played))
    return figure


def _draw_course(axes: Axes, course: Course, played: PlayedScenario, unit_s: float) -> None:
    edges, paces = _means(course, played.lasts_s)
    axes.stairs(paces, edges / unit_s, fill=True, color=_POLICIES[course.policy], alpha=0.75)
    axes.axhline(played.undisturbed_tokens_per_s, color="#444444", linestyle=":", linewidth=1)
    share = played.goodput(course) / played.undisturbed_tokens_per_s
    axes.set_title(f"{course.policy}: goodput {share:.1%} of undisturbed", fontsize=9, loc="left")
    axes.set_ylabel("tokens/s", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _means(course: Course, lasts_s: float) -> tuple[Floats, Floats]:
    """Return points in time, and the mean tokens/s between neighbouring ones.

    Returns:
        seconds since the start, [n + 1], equidistant from 0 to `lasts_s`; tokens/s, [n].
    """
    edges = np.linspace(0, lasts_s, _POINTS + 1)
    ends = np.array([0.0, *(piece.end_s for piece in course.pieces)])
    spans = np.diff(ends)
    tokens = np.cumsum([0.0, *(span * p.tokens_per_s for span, p in zip(spans, course.pieces, strict=True))])
    return edges, np.diff(np.interp(edges, ends, tokens)) / np.diff(edges)


def _draw_events(axes: Axes, events: tuple[Event, ...], names: list[str], unit_s: float) -> None:
    rows = {name: row for row, name in enumerate(names)}
    for kind in dict.fromkeys(event.what for event in events):
        shown = [event for event in events if event.what == kind and event.name in rows]
        axes.barh(
            [rows[event.name] for event in shown],
            [(event.end_s - event.begin_s) / unit_s for event in shown],
            0.8,
            [event.begin_s / unit_s for event in shown],
            color=_EVENTS[kind],
            label=kind,
        )
    axes.set_yticks(range(len(names)), [wrap(name, lines=1) for name in names], fontsize=7)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
