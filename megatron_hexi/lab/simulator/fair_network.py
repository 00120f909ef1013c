"""Transfers in flight: shared links, rates and arrivals.

Only transfers that are joined by links, directly or through others, change each other's rates. Such a part of
the network is recomputed when one of its transfers begins or ends.
"""

from __future__ import annotations

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.lab.simulator.routes import RouteTable

#: Times and rates that differ by less are equal.
CLOSE = 1e-12
#: Relative difference below which shares are equal, so that rounding does not add rounds.
_CLOSE = 1e-9


class FairNetwork:
    """A network of links with fair shares.

    Args:
        route: number of each transfer's route.
        size: bytes of each transfer.
    """

    def __init__(self, table: RouteTable, route: Ints, size: Floats) -> None:
        self._table = table
        self._route = route
        count = len(table.capacity)
        self._of: list[tuple[int, ...]] = [table.own[number] for number in route.tolist()]
        self._on: list[set[int]] = [set() for _ in range(count)]
        # The load of one transfer on each link: 1, or the tensor-parallel size.
        loads = np.ones(count, dtype=np.int64)
        np.maximum.at(loads, table.links, table.weights.astype(np.int64))
        self._lanes: list[int] = loads.tolist()
        self._local = np.zeros(count, dtype=np.int64)
        self._left = size.astype(float)
        self._rate = np.zeros(len(size))
        self._since = np.zeros(len(size))
        self._end = np.full(len(size), np.inf)
        self._part = np.full(len(size), -1, dtype=np.int64)
        self._parts: dict[int, Ints] = {}
        self._numbers = 0
        self._changed: set[int] = set()
        #: The most transfers on each link at a time.
        self.most_at_once = [0] * count

    def begin(self, transfer: int, now: float) -> None:
        """Let the bytes of a transfer flow."""
        self._since[transfer] = now
        for link in self._of[transfer]:
            self._on[link].add(transfer)
            self.most_at_once[link] = max(self.most_at_once[link], len(self._on[link]) * self._lanes[link])
            self._changed.add(link)

    def settle(self, now: float) -> list[tuple[float, int]]:
        """Compute rates on changed links; return each joined part's first end of a transfer, and number."""
        ends = []
        changed, self._changed = self._changed, set()
        while changed:
            link = changed.pop()
            if not self._on[link]:
                continue
            transfers, links = self._joined(link)
            changed -= links
            ends.append(self._share(sorted(transfers), sorted(links), now))
        return ends

    def arrived(self, part: int, now: float) -> list[int]:
        """Return the arrived transfers of a part; none if the part has changed."""
        members = self._parts.pop(part, None)
        if members is None:
            return []
        finished: list[int] = members[self._end[members] <= now * (1 + CLOSE)].tolist()
        for transfer in finished:
            for link in self._of[transfer]:
                self._on[link].discard(transfer)
                self._changed.add(link)
        return finished

    def _joined(self, link: int) -> tuple[set[int], set[int]]:
        """Return all transfers and links that are joined to a link."""
        transfers: set[int] = set()
        links = {link}
        front = {link}
        while front:
            reached: set[int] = set().union(*(self._on[number] for number in front)) - transfers
            transfers |= reached
            front = set().union(*(self._of[number] for number in reached)) - links
            links |= front
        return transfers, links

    def _share(self, transfers: list[int], links: list[int], now: float) -> tuple[float, int]:
        number = self._numbers
        self._numbers += 1
        if len(transfers) == 1:
            # Most transfers share no link and need no arrays.
            (only,) = transfers
            remaining = self._left[only] - self._rate[only] * (now - self._since[only])
            rate = self._table.alone[self._route[only]]
            end = now + max(0.0, remaining) / rate
            self._parts.pop(int(self._part[only]), None)
            self._left[only], self._rate[only], self._since[only] = remaining, rate, now
            self._end[only], self._part[only] = end, number
            self._parts[number] = np.array(transfers)
            return float(end), number
        members = np.array(transfers)
        for old in set(self._part[members].tolist()):
            self._parts.pop(old, None)
        remaining = self._left[members] - self._rate[members] * (now - self._since[members])
        self._local[links] = np.arange(len(links))
        self._local[-1] = len(links)
        routes = self._route[members]
        at, weights = self._local[self._table.links[routes]], self._table.weights[routes]
        capacity = self._table.capacity[[*links, -1]]
        rates = fair_rates(at, weights, capacity)
        ends = now + np.maximum(remaining, 0.0) / rates
        self._left[members], self._rate[members], self._since[members] = remaining, rates, now
        self._end[members], self._part[members] = ends, number
        self._parts[number] = members
        return float(ends.min()), number


def fair_rates(links: Ints, weights: Floats, capacity: Floats) -> Floats:
    """Return bytes/s of each transfer: max-min fair rates, by progressive filling.

    All rates rise together; where a link is full, the rates of its transfers stay and the others rise on
    (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2). Then no transfer can get more without taking
    from one that has no more.

    Links fill up in order of their shares, but not one by one: a link whose share is the least for all its
    transfers fills whatever happens elsewhere, so all such links are settled in one round.

    Args:
        links: links that each transfer crosses, [F, K]; shorter routes are padded with the last link.
        weights: load of each transfer on its links, [F, K]; 0 for padding.
        capacity: capacity of each link, bytes/s; infinite for the last link.
    """
    rates = np.zeros(len(links))
    waiting = np.arange(len(links))
    remaining = capacity.copy()
    while len(waiting):
        at, load = links[waiting], weights[waiting]
        places = at.ravel()
        total = np.bincount(places, load.ravel(), len(remaining))
        share = np.full(len(remaining), np.inf)
        np.divide(remaining, total, out=share, where=total > 0)
        shares = share[at]
        least = shares.min(axis=1)
        lowest = np.full(len(remaining), np.inf)
        np.minimum.at(lowest, places, np.repeat(least, at.shape[1]))
        full = lowest >= share * (1 - _CLOSE)
        settled = (full[at] & (shares <= least[:, None] * (1 + _CLOSE))).any(axis=1)
        rates_settled = least[settled]
        rates[waiting[settled]] = rates_settled
        used = (load[settled] * rates_settled[:, None]).ravel()
        remaining = np.maximum(remaining - np.bincount(at[settled].ravel(), used, len(remaining)), 0.0)
        waiting = waiting[~settled]
    return rates
