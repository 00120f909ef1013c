"""What a cluster is like between two events."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hexi.cluster import Cluster
from megatron_hexi.lab.scenario.events import Event


@dataclass(frozen=True)
class Conditions:
    """How a cluster differs from what its file says; as is, not at all.

    Args:
        speeds: factor on the curves of each rank that has one.
        links: factor on bandwidths, as `Cluster.at_bandwidths` names them.
        lost: nodes that are away.
    """

    speeds: tuple[tuple[int, float], ...] = ()
    links: tuple[tuple[tuple[int, int], float], ...] = ()
    lost: frozenset[int] = frozenset()

    def apply(self, cluster: Cluster) -> Cluster:
        """The cluster at these rates; lost nodes stay in it."""
        slower = cluster.at_speeds(dict(self.speeds)) if self.speeds else cluster
        return slower.at_bandwidths(dict(self.links)) if self.links else slower


@dataclass(frozen=True)
class Stretch:
    """Conditions from one time to another, seconds since the start."""

    begin_s: float
    end_s: float
    conditions: Conditions


def find_stretches(events: Sequence[Event], lasts_s: float) -> list[Stretch]:
    """The time from 0 to its end, cut where an event begins or ends."""
    edges = sorted({0.0, lasts_s, *(time for event in events for time in (event.begin_s, event.end_s))})
    stretches: list[Stretch] = []
    beginning = iter(events)  # by their beginning
    following = next(beginning, None)
    active: list[Event] = []
    for begin, end in itertools.pairwise(edges):
        active = [event for event in active if event.end_s > begin]
        while following is not None and following.begin_s <= begin:
            active.append(following)
            following = next(beginning, None)
        conditions = _together(active)
        if stretches and stretches[-1].conditions == conditions:
            begin = stretches.pop().begin_s
        stretches.append(Stretch(begin, end, conditions))
    return stretches


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
