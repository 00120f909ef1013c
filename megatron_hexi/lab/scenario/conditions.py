"""Conditions of a cluster between two events."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hexi.cluster import Cluster
from megatron_hexi.lab.scenario.events import Event


@dataclass(frozen=True)
class Conditions:
    """Deviations of a cluster from its file; by default none.

    Args:
        speeds: ranks with a factor on their curves.
        links: links, as `Cluster.at_bandwidths` names them, with a factor on their bandwidth.
    """

    speeds: tuple[tuple[int, float], ...] = ()
    links: tuple[tuple[tuple[int, int], float], ...] = ()
    lost: frozenset[int] = frozenset()

    def apply(self, cluster: Cluster) -> Cluster:
        """Return the cluster at these rates; lost nodes stay in it."""
        slower = cluster.at_speeds(dict(self.speeds)) if self.speeds else cluster
        return slower.at_bandwidths(dict(self.links)) if self.links else slower


@dataclass(frozen=True)
class Period:
    """A period with constant conditions, in seconds since the start."""

    begin_s: float
    end_s: float
    conditions: Conditions


def find_periods(events: Sequence[Event], lasts_s: float) -> list[Period]:
    """Return the time from 0 to its end, cut where an event begins or ends."""
    edges = sorted({0.0, lasts_s, *(time for event in events for time in (event.begin_s, event.end_s))})
    periods: list[Period] = []
    beginning = iter(events)  # by their beginning
    following = next(beginning, None)
    active: list[Event] = []
    for begin, end in itertools.pairwise(edges):
        active = [event for event in active if event.end_s > begin]
        while following is not None and following.begin_s <= begin:
            active.append(following)
            following = next(beginning, None)
        conditions = _together(active)
        if periods and periods[-1].conditions == conditions:
            begin = periods.pop().begin_s
        periods.append(Period(begin, end, conditions))
    return periods


def _together(events: Sequence[Event]) -> Conditions:
    speeds: dict[int, float] = defaultdict(lambda: 1.0)
    links: dict[tuple[int, int], float] = defaultdict(lambda: 1.0)
    for event in events:
        for rank in event.ranks:
            speeds[rank] *= event.factor
        for link in event.links:
            links[link] *= event.factor
    lost = frozenset(node for event in events for node in event.nodes)
    return Conditions(
        tuple(sorted((rank, by) for rank, by in speeds.items() if by != 1)),
        tuple(sorted((link, by) for link, by in links.items() if by != 1)),
        lost,
    )
