"""Data parallelism: which units make a replica, and how many micro-batches each replica takes.

Replicas that are alike (the same kinds on sites of the same shape) are searched once. Given the seconds of a
micro-batch on each, micro-batches are dealt so that the slowest replica is done first: exact, as for heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import Fleet, Unit
from megatron_hexi.planner.layouts.deal import deal_heads
from megatron_hexi.planner.layouts.layout import Layout, Part
from megatron_hexi.planner.layouts.trial import Judge, Trial
from megatron_hexi.planner.search.domain import DomainSearch
from megatron_hexi.planner.search.groupings import site_classes

#: Units of each replica.
Deal = tuple[tuple[int, ...], ...]


def equal_deals(fleet: Fleet, count: int) -> Iterator[Deal]:
    """Megatron's rectangle: `count` replicas of as many units each, the slowest units left out if need be.

    By kind, one after the other; whole sites to whoever is behind; and the same mix for all.
    """
    size = len(fleet.units) // count
    used = list(range(size * count))
    yield _sorted([used[first : first + size] for first in range(0, len(used), size)])
    yield _sorted(_by_speed(fleet, used, count, size))
    yield _sorted([used[place::count] for place in range(count)])


def free_deals(fleet: Fleet, most: int) -> Iterator[Deal]:
    """Replicas of any size, at most `most` of them.

    Each part of every fast domain; sites of a class merged or cut, all alike, beside the others whole; single
    kinds; equal mixes.
    """
    number = {gpu: unit for unit, one in enumerate(fleet.units) for gpu in one.gpus[0]}
    deals: list[Deal] = [(tuple(range(len(fleet.units))),), tuple(fleet.sites)]
    for partition in fleet.cluster.fast_domains():
        parts = [tuple(sorted({number[gpu] for gpu in part if gpu in number})) for part in partition.parts]
        deals.append(tuple(part for part in parts if part))
    classes = list(site_classes(fleet).values())
    deals.append(tuple(tuple(unit for site in sites for unit in site) for sites in classes))
    for cut in (2, 4, 8):
        deals.append(tuple(part for site in fleet.sites for part in _cut(site, cut)))
        deals.append(tuple(part for sites in classes for part in _merged(sites, cut)))
    for sites in classes:
        rest = tuple(site for other in classes if other is not sites for site in other)
        deals += [
            _sorted([*(part for site in sites for part in _cut(site, cut)), *rest]) for cut in (2, 4, 8)
        ]
        deals += [_sorted([*_merged(sites, count), *rest]) for count in (2, 4)]
        joined = tuple(unit for site in rest for unit in site)
        deals.append(_sorted([*sites, *([joined] if joined else [])]))
    for count in range(2, min(most, len(fleet.units)) + 1):
        if len(fleet.units) % count == 0:
            deals += list(equal_deals(fleet, count))
    yield from (deal for deal in dict.fromkeys(map(_sorted, deals)) if len(deal) <= most)


class ReplicaSearch:
    """Puts replicas together from domains that are searched once each.

    Args:
        judge: times whole plans.
        fleet: the units.
        micro_batches: of an iteration.
    """

    def __init__(self, judge: Judge, fleet: Fleet, micro_batches: int) -> None:
        self._judge = judge
        self._fleet = fleet
        self._micro_batches = micro_batches
        self._rates = Rates(fleet)
        self._domains: dict[tuple[object, ...], Trial] = {}

    def equal(self, deal: Deal) -> Trial:
        """Replicas with the same number of micro-batches each."""
        share = self._micro_batches // len(deal)
        return self._together(deal, [share] * len(deal))

    def free(self, deal: Deal, slowest_s: float) -> Trial | None:
        """Replicas with the micro-batches that they are good for; those good for none are left out.

        Args:
            deal: units of each.
            slowest_s: seconds of an iteration that the replicas' best rates must be able to beat.
        """
        rates = [1 / self._best_case(units) for units in deal]
        counts = deal_heads(self._micro_batches, rates)
        if max(count * rate for count, rate in zip(counts, rates, strict=True)) >= slowest_s:
            return None
        shards = sum(map(len, deal))
        trials = [self._domain(units, shards) for units in deal]
        fitting = [number for number, trial in enumerate(trials) if trial.fits]
        if not fitting:
            return None
        best = self._shared(deal, trials, fitting)
        # A slow replica may cost more, in the ring of gradients, than its share of the batch brings.
        while len(fitting) > 1:
            slowest = max(fitting, key=lambda number: trials[number].micro_batch_s)
            fitting = [number for number in fitting if number != slowest]
            fewer = self._shared(deal, trials, fitting)
            if fewer.order >= best.order:
                break
            best = fewer
        return best

    def _shared(self, deal: Deal, trials: Sequence[Trial], numbers: Sequence[int]) -> Trial:
        """Some replicas of a deal, with as many micro-batches each as keeps the slowest from being late."""
        dealt = deal_heads(self._micro_batches, [trials[number].micro_batch_s for number in numbers])
        used = [(deal[number], count) for number, count in zip(numbers, dealt, strict=True) if count]
        return self._together([units for units, _ in used], [count for _, count in used])

    def _best_case(self, units: Sequence[int]) -> float:
        """Micro-batches a second that units cannot pass."""
        job, chosen = self._fleet.job, list(units)
        tokens = job.micro_batch_size * job.seq_length
        token = 1 / float(self._rates.token[chosen].sum())
        attention = self._rates.local_heads / float(self._rates.attention[chosen].sum())
        return 1 / (tokens * (token + attention))

    def _together(self, deal: Sequence[tuple[int, ...]], counts: Sequence[int]) -> Trial:
        shards = sum(map(len, deal))
        trials = [self._domain(units, shards) for units in deal]
        layouts = [
            Layout(tuple(_moved(part, units) for part in trial.layouts[0].parts), count)
            for trial, units, count in zip(trials, deal, counts, strict=True)
        ]
        windows = sorted({trial.window for trial in trials})
        tried = [self._judge.try_out(self._fleet, layouts, window) for window in windows]
        return min(tried, key=lambda trial: trial.order)

    def _domain(self, units: tuple[int, ...], shards: int) -> Trial:
        fleet = self._fleet.subset(units)
        order = {site: number for number, site in enumerate(dict.fromkeys(u.site for u in fleet.units))}
        name = (shards, tuple((unit.kind, order[unit.site], *_links(fleet, unit)) for unit in fleet.units))
        if name not in self._domains:
            judge = Judge(replace(fleet, job=replace(fleet.job, data_parallel=1)), shards)
            self._domains[name] = DomainSearch(judge, fleet, self._micro_batches).run()
            self._judge.trials += judge.trials
        return self._domains[name]


def _links(fleet: Fleet, unit: Unit) -> tuple[float, ...]:
    """Of the nodes that a unit is on."""
    nodes = [fleet.cluster.nodes[fleet.cluster.ranks[part[0]].node] for part in unit.gpus]
    return tuple(value for node in nodes for value in (node.bandwidth, node.latency_s))


def _moved(part: Part, units: Sequence[int]) -> Part:
    """A part of a subset's layout with the units' numbers in the whole fleet."""
    return replace(part, units=tuple(units[unit] for unit in part.units))


def _by_speed(fleet: Fleet, used: Sequence[int], count: int, size: int) -> list[list[int]]:
    """Whole sites, the fastest first, to the slowest replica with room; cut where none has room for all."""
    dealt: list[list[int]] = [[] for _ in range(count)]
    speed = np.zeros(count)
    for site in fleet.sites:
        left = [unit for unit in site if unit in set(used)]
        while left:
            room = np.array([size - len(units) for units in dealt])
            whole = room >= len(left)
            open_ = whole if whole.any() else room > 0
            place = int(np.argmin(np.where(open_, speed, np.inf)))
            moved, left = left[: room[place]], left[room[place] :]
            dealt[place] += moved
            speed[place] += sum(fleet.kinds[fleet.units[unit].kind].tokens_per_s for unit in moved)
    return dealt


def _cut(site: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    if len(site) % parts:
        return [site]
    size = len(site) // parts
    return [site[first : first + size] for first in range(0, len(site), size)]


def _merged(sites: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    return [
        tuple(unit for site in sites[first : first + count] for unit in site)
        for first in range(0, len(sites), count)
    ]


def _sorted(deal: Sequence[Sequence[int]]) -> Deal:
    return tuple(sorted((tuple(sorted(units)) for units in deal), key=lambda units: units[0]))
