"""Effects in a replay that the cost model ignores: shared links, early groups, unready members."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hexi.grouping import grouped
from megatron_hexi.lab.simulator.replay import Replay, SectionReplay, last_laps
from megatron_hexi.lab.simulator.simulation import Findings, Meeting, Scattering
from megatron_hexi.lab.simulator.unit_program import FINISH, READY

#: Most meetings that are kept, those with most time.
_MOST_MEETINGS = 10


def find(replays: Sequence[SectionReplay]) -> Findings:
    """Return the findings in the replays of all sections."""
    whole = list({id(replay.whole): replay.whole for replay in replays}.values())
    return Findings(
        meetings=_meetings(whole),
        scatterings=_scatterings(whole),
        lead=max(_spread(replay, FINISH, inside=False) for replay in replays),
        unready=max(_spread(replay, READY, inside=True) for replay in replays),
        unsteady=max(_unsteady(replay) for replay in replays),
    )


def _meetings(replays: Sequence[Replay]) -> tuple[Meeting, ...]:
    meetings = [
        Meeting(replay.table.names[link], kinds, seconds / replay.log.end)
        for replay in replays
        for (link, kinds), seconds in replay.log.meetings.foreign_s.items()
        if seconds > 0
    ]
    return tuple(sorted(meetings, key=lambda meeting: -meeting.share)[:_MOST_MEETINGS])


def _scatterings(replays: Sequence[Replay]) -> tuple[Scattering, ...]:
    best: dict[str, Scattering] = {}
    for replay in replays:
        program, table = replay.program, replay.table
        count = len(table.capacity)
        keys = (program.sets[:, None] * count + table.links[program.route]).ravel()
        loads = (table.weights[program.route] * program.size[:, None]).ravel()
        places, back, counted = np.unique(keys, return_inverse=True, return_counts=True)
        seconds = np.bincount(back, loads) / table.capacity[places % count]
        for key, several, link_seconds in zip(
            places.tolist(), counted.tolist(), seconds.tolist(), strict=True
        ):
            number, link = divmod(key, count)
            met = replay.log.meetings.together.get((number, link), 1)
            spared = link_seconds * (1 - met / several)
            kind = program.set_kinds[number]
            if link < count - 1 and spared > (best[kind].spared_s if kind in best else 0.0):
                best[kind] = Scattering(kind, table.names[link], several, met, spared)
    return tuple(best.values())


def _spread(replay: SectionReplay, point: int, inside: bool) -> float:
    """Return how far apart units pass a point of a layer (`Mark`), as a part of the layer pass's duration.

    The largest over layer passes: between members of a group if `inside`, else between groups of a replica.
    """
    plan, durations = replay.plan, replay.durations()
    parts = grouped(
        (group if inside else int(plan.replica[group]), np.flatnonzero(plan.group == group))
        for group in np.flatnonzero(plan.group_tokens).tolist()
    )
    largest = 0.0
    for number in last_laps(replay.laps, "forward") + last_laps(replay.laps, "backward"):
        marks = replay.marks[number, point]
        for part, groups in parts.items():
            times = marks[groups[0]] if inside else np.array([marks[units].max() for units in groups])
            seconds = durations[number, plan.replica[part] if inside else part]
            largest = max(largest, float(np.ptp(times) / seconds) if seconds > 0 else 0.0)
    return largest


def _unsteady(replay: SectionReplay) -> float:
    durations = replay.durations()
    largest = 0.0
    for way in ("forward", "again", "backward"):
        last = last_laps(replay.laps, way)
        if len(last) > 1:
            before, after = durations[last]
            largest = max(largest, float((np.abs(after - before) / np.maximum(before, 1e-30)).max()))
    return largest
