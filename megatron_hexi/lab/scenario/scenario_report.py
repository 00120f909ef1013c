"""A simulated scenario as tables for a terminal and as plain values for --json."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_hexi.lab.scenario import Event, PlayedScenario
from megatron_hexi.spelling import spell_time

_CAPTION = (
    "tokens/s: of iterations that are kept, over all of the time; undisturbed: as a part of what the plan "
    "does without events; lost: iterations done since the last checkpoint; stopped: nothing is trained"
)
#: Most events that are shown; --json has all.
_EVENTS = 12
_UNITS = (("d", 86400), ("h", 3600), ("m", 60))


def scenario_report(played: PlayedScenario) -> RenderableType:
    """Return the scenario for a terminal: its events, and the result of each policy."""
    return Group(
        Text(scenario_line(played)),
        Text(
            f"undisturbed: {played.undisturbed_tokens_per_s:,.0f} tokens/s, "
            f"{spell_time(played.undisturbed_s)} an iteration"
        ),
        *(Text(f"  {spell_event(event)}") for event in played.events[:_EVENTS]),
        *([Text(f"  … and {len(played.events) - _EVENTS} more")] if len(played.events) > _EVENTS else []),
        policies_table(played),
    )


def policies_table(played: PlayedScenario) -> Table:
    """Return a table with a line for each policy."""
    table = Table(caption=_CAPTION, caption_justify="left")
    for name in ("policy", "tokens/s", "undisturbed", "iterations", "lost", "stopped", "restarts", "swaps"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for course in played.courses:
        goodput = played.goodput(course)
        table.add_row(
            course.policy,
            f"{goodput:,.0f}",
            f"{goodput / played.undisturbed_tokens_per_s:.1%}",
            f"{course.iterations:,.1f}",
            f"{course.lost_iterations:,.1f}",
            spell_duration(course.stopped_s),
            str(course.restarts),
            str(course.swaps),
        )
    return table


def scenario_dict(played: PlayedScenario) -> dict[str, Any]:
    """Return the scenario and its results as plain values: seconds since the start, tokens/s."""
    return {
        "lasts_s": played.lasts_s,
        "tokens_per_iteration": played.tokens,
        "undisturbed_s": played.undisturbed_s,
        "undisturbed_tokens_per_s": played.undisturbed_tokens_per_s,
        "events": [dataclasses.asdict(event) for event in played.events],
        "policies": [
            {
                "goodput_tokens_per_s": played.goodput(course),
                "of_undisturbed": played.goodput(course) / played.undisturbed_tokens_per_s,
                "stopped_s": course.stopped_s,
            }
            | dataclasses.asdict(course)
            for course in played.courses
        ],
    }


def scenario_line(played: PlayedScenario) -> str:
    """Return a line with the duration, and the number of events of each kind."""
    counts = Counter(event.what for event in played.events)
    named = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{spell_duration(played.lasts_s)}, {len(played.events)} events" + (f": {named}" if named else "")


def spell_event(event: Event) -> str:
    """Return an event as text: ``a100-0/3 throttled to 50 % from 10m to 40m``."""
    how = event.what if event.what == "lost" else f"{event.what} to {event.factor:.4g}"
    return f"{event.name} {how} from {spell_duration(event.begin_s)} to {spell_duration(event.end_s)}"


def spell_duration(seconds: float) -> str:
    """Return seconds as in a scenario file, in two units at most: ``1d4h``, ``10m``, ``0.2s``."""
    if seconds < 60:
        return f"{seconds:.3g}s"
    size = next(size for _, size in _UNITS if seconds >= size)
    least = max(1, {86400: 3600, 3600: 60, 60: 1}[size])
    remaining = round(seconds / least) * least
    words = []
    for unit, unit_s in (*_UNITS, ("s", 1)):
        count, remaining = divmod(remaining, unit_s)
        if count:
            words.append(f"{count}{unit}")
    return "".join(words)
