"""Scenario files, and their events on a cluster (stated or drawn) with the conditions between two events."""

from __future__ import annotations

import itertools
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from pydantic import TypeAdapter

from megatron_hexi.cluster import Cluster
from megatron_hexi.errors import HexiError
from megatron_hexi.lab.scenario.scenario_model import Scenario
from megatron_hexi.yaml_file import Place, YamlFile, read_yaml
from megatron_hexi.yaml_schema import parse_file, short

EventKind = Literal["throttled", "congested", "lost"]
#: Most events; more come from a mean time in the wrong unit.
_MOST = 20_000


@dataclass(frozen=True)
class Event:
    """A change of the cluster that holds from one time to another.

    Args:
        factor: factor on speed or bandwidth; 0 for lost nodes.
        links: links whose bandwidth it changes, as `Cluster.at_bandwidths` names them.
    """

    what: EventKind
    name: str
    begin_s: float
    end_s: float
    factor: float
    ranks: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    nodes: tuple[int, ...] = ()


def find_events(scenario: Scenario, cluster: Cluster, source: YamlFile) -> tuple[Event, ...]:
    """Return all events of a scenario, in the order in which they begin."""
    events = [*_stated(scenario, cluster, source)]
    for event in _drawn(scenario, cluster):
        events.append(event)
        if len(events) > _MOST:
            raise HexiError(
                f"{source.where(('random',))}: draws more than {_MOST:,} events; write a "
                "longer mean_time_between, or a shorter lasts"
            )
    return tuple(sorted(events, key=lambda event: (event.begin_s, event.end_s, event.what, event.name)))


def _stated(scenario: Scenario, cluster: Cluster, source: YamlFile) -> Iterator[Event]:
    known = _link_names(cluster)
    for i, slow in enumerate(scenario.throttled):
        times = _times(slow.at, slow.until, scenario, ("throttled", i), source)
        ranks = _find_ranks(cluster, slow.gpus)
        if not ranks:
            _refuse(source, ("throttled", i, "gpus"), slow.gpus, "GPU, node or kind", cluster.rank_name(0))
        yield Event("throttled", slow.gpus, *times, slow.speed_factor, ranks=ranks)
    for i, narrow in enumerate(scenario.congested):
        times = _times(narrow.at, narrow.until, scenario, ("congested", i), source)
        links = known.get(narrow.link, ())
        if not links:
            _refuse(source, ("congested", i, "link"), narrow.link, "link", " or ".join(list(known)[:2]))
        yield Event("congested", narrow.link, *times, narrow.bandwidth_factor, links=links)
    for i, lost in enumerate(scenario.lost):
        times = _times(lost.at, lost.until, scenario, ("lost", i), source)
        nodes = cluster.file.find_nodes(lost.nodes)
        if nodes is None:
            _refuse(source, ("lost", i, "nodes"), lost.nodes, "node", cluster.nodes[0].name)
        yield Event("lost", lost.nodes, *times, 0.0, nodes=tuple(nodes))


def _drawn(scenario: Scenario, cluster: Cluster) -> Iterator[Event]:
    """Yield drawn events; each GPU, link and node has a random stream of its own."""
    drawn, lasts_s = scenario.random, scenario.lasts
    seed, nodes = drawn.seed, [node.name for node in cluster.nodes]
    if (slow := drawn.throttles) is not None:
        for rank in range(len(cluster.ranks)):
            name = cluster.rank_name(rank)
            for times in _draw(f"{seed} {name}", slow.mean_time_between, slow.lasts, lasts_s):
                yield Event("throttled", name, *times, slow.speed_factor, ranks=(rank,))
    if (narrow := drawn.congestion) is not None and len(nodes) > 1:
        for number, name in enumerate(nodes):
            for times in _draw(f"{seed} link {name}", narrow.mean_time_between, narrow.lasts, lasts_s):
                yield Event("congested", name, *times, narrow.bandwidth_factor, links=((1, number),))
    if (failures := drawn.failures) is not None:
        for number, name in enumerate(nodes):
            for times in _draw(f"{seed} node {name}", failures.mean_time_between, failures.repair, lasts_s):
                yield Event("lost", name, *times, 0.0, nodes=(number,))


def _draw(stream: str, between: float, duration: float, lasts: float) -> Iterator[tuple[float, float]]:
    draw = random.Random(stream)  # a text seeds by its SHA-512, the same on any machine
    begin = draw.expovariate(1 / between)
    while begin < lasts:
        yield begin, min(begin + duration, lasts)
        begin += duration + draw.expovariate(1 / between)


def _times(
    at: float, until: float | None, scenario: Scenario, place: Place, source: YamlFile
) -> tuple[float, float]:
    end = scenario.lasts if until is None else until
    if at >= scenario.lasts:
        raise HexiError(
            f"{source.where((*place, 'at'))} = {at:g} s is not before the end, lasts = {scenario.lasts:g} s; "
            "write an earlier time, or a longer lasts"
        )
    if end <= at:
        raise HexiError(
            f"{source.where((*place, 'until'))} = {end:g} s is not after at = {at:g} s; write a later time, "
            "counted from the scenario's start as at is"
        )
    return at, min(end, scenario.lasts)


def _refuse(source: YamlFile, place: Place, text: str, kind: str, example: str) -> NoReturn:
    raise HexiError(
        f"{source.where(place)} = {short(text)} is not a {kind} of the cluster file; write one, as {example}"
    )


def _find_ranks(cluster: Cluster, text: str) -> tuple[int, ...]:
    nodes = cluster.file.find_nodes(text)
    if nodes is not None:
        return tuple(rank for node in nodes for rank in cluster.nodes[node].ranks)
    return tuple(
        rank.rank for rank in cluster.ranks if text in (cluster.rank_name(rank.rank), rank.device.name)
    )


def _link_names(cluster: Cluster) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return the links of `Cluster.at_bandwidths` for each name."""
    known: dict[str, tuple[tuple[int, int], ...]] = {}
    names: dict[str, Sequence[int]] = {node.name: (number,) for number, node in enumerate(cluster.nodes)}
    names |= cluster.file.node_numbers
    for name, numbers in names.items():
        if len(cluster.nodes) > 1:
            known[name] = tuple((1, number) for number in numbers)
        known[f"{name} inside"] = tuple((0, number) for number in numbers)
    for level, tier in enumerate(cluster.tiers[1:], start=2):
        groups = {str(group): (group,) for group in sorted(set(tier.group_of))}
        owners: Mapping[str, Sequence[int]] = groups if tier.per == "group" else names
        known |= {
            f"{tier.name} {name}": tuple((level, n) for n in numbers) for name, numbers in owners.items()
        }
    return known


@dataclass(frozen=True)
class Conditions:
    """Deviations of a cluster from its file; by default none.

    Args:
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
    """Cut the time from 0 to `lasts_s` where conditions change; return the periods between."""
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


_ADAPTER = TypeAdapter(Scenario)


def read_scenario(path: str | os.PathLike[str], cluster: Cluster) -> tuple[Scenario, tuple[Event, ...]]:
    """Read a scenario file, and find its events on a cluster.

    Raises:
        HexiError: the file cannot be read or is not YAML, a field or a rule is broken; one line with file,
            line, place, value and remedy.
    """
    source = read_yaml(path)
    shape = "a scenario is a mapping with lasts and events"
    scenario = parse_file(_ADAPTER, source, shape, HexiError)
    return scenario, find_events(scenario, cluster, source)
