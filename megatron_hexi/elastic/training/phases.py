"""Where the seconds between a loss and the end of the next iteration go, as rank 0 sees them, for the log."""

from __future__ import annotations

import json
import os
import time

from megatron_hexi.elastic.store import TIMES_VARIABLE

#: Phases of a restart in their order: the agent sees the loss, has ended its ranks, has met the other agents;
#: the rank runs, has its plan, and has built and loaded all that it trains.
_AGENTS = ("seen", "ended", "met")
_marks: list[tuple[str, float]] = []


def begin_phases() -> None:
    """Begin with the times that this node's agent has seen; called where a rank begins."""
    seen = json.loads(os.environ[TIMES_VARIABLE])
    _marks[:] = [*zip(_AGENTS, seen, strict=True), ("started", time.time())]


def mark(phase: str) -> None:
    """Note that a phase has ended."""
    _marks.append((phase, time.time()))


def phase_words(since: float) -> str:
    """Return the phases with their seconds, the first from `since` (s since the epoch) on."""
    found = []
    for name, end in _marks:
        found.append(f"{name} {max(0.0, end - since):.1f}")
        since = max(since, end)
    return ", ".join(found)
