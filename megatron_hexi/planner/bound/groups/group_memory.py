"""Memory that the heads and the tokens of a group share, site by site: part of the bound (group_times.py).

A head takes the room of as many tokens wherever it is: of what its group's tokens need inside attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.fleet.room import Room


class Taken(NamedTuple):
    """Memory that a token takes, by what holding it does.

    Args:
        attended: inside attention.
        received: where its keys and values are received in a step of the exchange.
        sent: where they are sent.
    """

    attended: float
    received: float
    sent: float

    @classmethod
    def of(cls, room: Room, groups: int, window: int = 1) -> Taken:
        """In a replica of so many groups at least, with so many steps under way."""
        each = room.each_attended(groups), room.each_received(window), room.each_sent(window)
        return cls(*(taken / room.each_held for taken in each))


class GroupMemory:
    """What a group's sites have room for; J sizes of the group at once.

    Args:
        rooms: tokens that each site has room for without heads, on each pipeline stage, [stages][sites].
        each: tokens that a head takes the room of, on each stage, [stages][J].
        heads: H, of the group.
        low: tokens of the group, at least, [J].
        high: at most, [J].
    """

    def __init__(
        self, rooms: Sequence[Sequence[float]], each: Sequence[Floats], heads: int, low: Floats, high: Floats
    ) -> None:
        self._stages = list(zip(rooms, each, strict=True))
        self._heads, self._low, self._high = heads, low, high
        #: Whether every site has room for everything.
        self._plenty = all((min(free) - heads * one >= high).all() for free, one in self._stages)
        if self._plenty:
            return
        sites = range(len(rooms[0]))
        self._least_room = [min(free[site] for free in rooms) for site in sites]
        counts = np.arange(heads + 1)[:, None]
        #: Of a site with so many heads, and of the others with the rest of them, [H + 1, J].
        self._here, self._elsewhere = (
            [
                np.maximum(0.0, np.minimum.reduce([free[site] - counts * one for free, one in self._stages]))
                for site in sites
            ],
            [
                np.maximum(
                    0.0,
                    np.minimum.reduce(
                        [sum(free) - free[site] - (heads - counts) * one for free, one in self._stages]
                    ),
                )
                for site in sites
            ],
        )

    def capacities(self, site: int, held: Sequence[Floats]) -> tuple[Floats, Floats]:
        """Tokens at most on a site that has so many heads, and on all others, [H + 1, J] or [J].

        Args:
            site: its place.
            held: what each site can hold otherwise, [J].
        """
        if self._plenty:
            return held[site], sum(held) - held[site]
        both = [np.minimum(most, room) for most, room in zip(held, self._least_room, strict=True)]
        elsewhere = np.minimum(sum(both) - both[site], self._elsewhere[site])
        return np.minimum(held[site], self._here[site]), elsewhere

    def dealt(self, found: Floats, costs: Sequence[Floats], held: Sequence[Floats]) -> Floats:
        """Seconds in which all heads can be dealt beside the tokens; infinite where there is no room, [J].

        Args:
            found: seconds in which they can be dealt if memory is large enough, [J].
            costs: of each site, seconds with so many heads or more, [H + 1, J].
            held: what each site can hold otherwise, [J].
        """
        for rooms, each in [] if self._plenty else self._stages:
            wanted = [np.minimum(tokens, self._high) for tokens in held]
            spare = sum(np.minimum(want, most) for want, most in zip(wanted, rooms, strict=True)) - self._low
            free = [
                np.ceil(np.maximum(0.0, most - want) / each) for want, most in zip(wanted, rooms, strict=True)
            ]
            # Heads that must go where they take no token's room.
            needed = np.clip(np.ceil(self._heads - spare / each - 1e-9), 0, self._heads)
            numbers = np.arange(1, self._heads + 1)[:, None]
            without = [
                np.where(numbers <= most, cost[1:], np.inf) for cost, most in zip(costs, free, strict=True)
            ]
            ordered = np.sort(np.concatenate(without), axis=0)
            last = np.take_along_axis(ordered, np.maximum(needed.astype(int) - 1, 0)[None], axis=0)[0]
            found = np.where(spare < 0, np.inf, np.where(needed > 0, np.maximum(found, last), found))
        return found
