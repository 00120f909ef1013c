"""Small random changes of a layout's groups: tokens, heads, order, and who is in which (tune.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp
from random import Random

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.deal import deal_tokens
from megatron_hexi.planner.layouts.layout import Layout, Part

#: How often what is changed where there are several groups: their order, tokens of one, two units exchanged;
#: and tokens inside a group. Else, it is heads.
_ORDER, _TOKENS, _UNITS, _INSIDE = 0.3, 0.3, 0.15, 0.2

Parts = tuple[Part, ...]
Change = Callable[[Parts], Parts]


@dataclass(frozen=True)
class Move:
    """A change of a layout's groups.

    Args:
        change: makes it.
        further: the same, twice as far; ``None``: there is no further.
    """

    change: Change
    further: Callable[[], Move] | None = None


def drawn(chance: Random, fleet: Fleet, layout: Layout, steps: Sequence[float]) -> Move:
    """A change of a layout's groups.

    Args:
        chance: decides.
        fleet: the units.
        layout: what is changed.
        steps: logarithms of the factors by which tokens may be changed.
    """
    parts, draw = layout.parts, chance.random()
    if len(parts) == 1:
        draw = chance.uniform(_ORDER + _TOKENS + _UNITS, 1)
    else:
        one, other = chance.sample(range(len(parts)), 2)
        if draw < _ORDER:
            return Move(_exchanged(one, other) if chance.random() < 0.5 else _moved(one, other))
        if draw < _ORDER + _TOKENS:
            return _scaled(one, _step(chance, steps))
        if draw < _ORDER + _TOKENS + _UNITS:
            here, there = (chance.randrange(len(parts[group].units)) for group in (one, other))
            return Move(_units_exchanged((one, here), (other, there)))
    group = chance.randrange(len(parts))
    units = parts[group].units
    places = range(len(units))
    if draw < _ORDER + _TOKENS + _UNITS + _INSIDE:
        some: Sequence[int] = chance.sample(places, chance.randint(1, max(1, len(places) - 1)))
        if chance.random() < 0.5:
            sites = [fleet.units[unit].site for unit in units]
            some = [place for place in places if sites[place] == sites[some[0]]]
        return _scaled_inside(group, some, _step(chance, steps))
    return _heads_moved(group, chance.choice(places), chance.choice(places), 1)


def _step(chance: Random, steps: Sequence[float]) -> float:
    return chance.choice((-1, 1)) * chance.choice(steps)


def _exchanged(one: int, other: int) -> Change:
    def change(parts: Parts) -> Parts:
        order = list(parts)
        order[one], order[other] = order[other], order[one]
        return tuple(order)

    return change


def _moved(one: int, to: int) -> Change:
    def change(parts: Parts) -> Parts:
        order = list(parts)
        order.insert(to, order.pop(one))
        return tuple(order)

    return change


def _scaled(group: int, step: float) -> Move:
    """More or fewer tokens in a group."""

    def change(parts: Parts) -> Parts:
        weights = np.array([float(part.total) for part in parts])
        weights[group] *= exp(step)
        return shared(parts, weights)

    return Move(change, lambda: _scaled(group, 2 * step))


def shared(parts: Parts, weights: Floats) -> Parts:
    """The same tokens dealt to groups by weights, and to their members as before."""
    totals = deal_tokens(sum(part.total for part in parts), weights)
    return tuple(
        replace(part, tokens=deal_tokens(total, _weights(part)))
        for part, total in zip(parts, totals, strict=True)
    )


def _scaled_inside(group: int, members: Sequence[int], step: float) -> Move:
    """More or fewer tokens on some members of a group, in place of the others'."""

    def change(parts: Parts) -> Parts:
        weights = _weights(parts[group])
        weights[members] *= exp(step)
        tokens = deal_tokens(parts[group].total, weights)
        return _with(parts, group, replace(parts[group], tokens=tokens))

    return Move(change, lambda: _scaled_inside(group, members, 2 * step))


def _weights(part: Part) -> Floats:
    # A group may have no tokens at all.
    return np.array(part.tokens, dtype=float) + 1e-9


def _units_exchanged(one: tuple[int, int], other: tuple[int, int]) -> Change:
    """Two units, by group and place, do each other's part."""

    def change(parts: Parts) -> Parts:
        (here, place), (there, where) = one, other
        mine, theirs = parts[here], parts[there]
        changed = _with_unit(mine, place, theirs.units[where]), _with_unit(theirs, where, mine.units[place])
        return _with(_with(parts, here, changed[0]), there, changed[1])

    return change


def _with_unit(part: Part, place: int, unit: int) -> Part:
    return replace(part, units=(*part.units[:place], unit, *part.units[place + 1 :]))


def _heads_moved(group: int, giver: int, taker: int, most: int) -> Move:
    def change(parts: Parts) -> Parts:
        heads = list(parts[group].heads)
        count = min(most, heads[giver])
        heads[giver] -= count
        heads[taker] += count
        return _with(parts, group, replace(parts[group], heads=tuple(heads)))

    return Move(change, lambda: _heads_moved(group, giver, taker, 2 * most))


def _with(parts: Parts, group: int, part: Part) -> Parts:
    return (*parts[:group], part, *parts[group + 1 :])
