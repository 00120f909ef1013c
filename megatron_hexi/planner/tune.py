"""Small random changes of whole layouts: what balance and polish, kind by kind, leave.

Where keys bound a plan, an inner group and an outer one of the same units do not want the same: they see and
send different parts of the others' keys, and wait for each other's. So tokens of one group, tokens and heads
inside one, the order of groups, and who is in which are changed, one at a time: a change is kept, and made
again, if the cost model likes it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import exp
from random import Random

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.deal import deal_tokens
from megatron_hexi.planner.layout import Layout, Part
from megatron_hexi.planner.trial import Judge, Trial
from megatron_hexi.planner.units import Fleet

#: Logarithms of the factors by which tokens are changed.
_STEPS = (0.005, 0.02, 0.06, 0.2, 0.5)
#: How often what is changed where there are several groups: their order, tokens of one, two units exchanged;
#: and tokens inside a group. Else, it is heads.
_ORDER, _TOKENS, _UNITS, _INSIDE = 0.3, 0.3, 0.15, 0.2
#: What is less than this part faster is as fast.
_LEAST = 1e-6

_Parts = tuple[Part, ...]
_Change = Callable[[_Parts], _Parts]


def tune(judge: Judge, trial: Trial, most: int) -> Trial:
    """The best that is found with at most so many more layouts timed.

    Replicas that are alike are changed alike.

    Args:
        judge: times them.
        trial: where changes begin.
        most: layouts.
    """
    end, chance = judge.trials + most, Random(0)
    alike = _alike(trial)

    def keep(change: _Change, replicas: Sequence[int]) -> bool:
        nonlocal trial
        layouts = list(trial.layouts)
        for number in replicas:
            layouts[number] = replace(layouts[number], parts=change(layouts[number].parts))
        if tuple(layouts) == trial.layouts or judge.trials >= end:
            return False
        other = judge.try_out(trial.fleet, layouts, trial.window)
        better = (other.excess, other.iteration_s * (1 + _LEAST)) < trial.order
        trial = other if better else trial
        return better

    for _ in range(most):
        replicas = chance.choice(alike)
        change, again = _drawn(chance, trial.fleet, trial.layouts[replicas[0]])
        while keep(change, replicas) and again:
            pass
    return trial


def _alike(trial: Trial) -> list[list[int]]:
    """Replicas whose groups have the same kinds of units."""
    units, alike = trial.fleet.units, dict[Hashable, list[int]]()
    for number, layout in enumerate(trial.layouts):
        kinds = tuple(tuple(units[unit].kind for unit in part.units) for part in layout.parts)
        alike.setdefault((kinds, layout.micro_batches), []).append(number)
    return list(alike.values())


def _drawn(chance: Random, fleet: Fleet, layout: Layout) -> tuple[_Change, bool]:
    """A change, and whether it is worth making again."""
    parts, move = layout.parts, chance.random()
    if len(parts) == 1:
        move = chance.uniform(_ORDER + _TOKENS + _UNITS, 1)
    else:
        one, other = chance.sample(range(len(parts)), 2)
        if move < _ORDER:
            return (_exchanged(one, other) if chance.random() < 0.5 else _moved(one, other)), False
        if move < _ORDER + _TOKENS:
            return _scaled(one, _factor(chance)), True
        if move < _ORDER + _TOKENS + _UNITS:
            here, there = (chance.randrange(len(parts[group].units)) for group in (one, other))
            return _units_exchanged((one, here), (other, there)), False
    group = chance.randrange(len(parts))
    units = parts[group].units
    places = range(len(units))
    if move < _ORDER + _TOKENS + _UNITS + _INSIDE:
        some: Sequence[int] = chance.sample(places, chance.randint(1, max(1, len(places) - 1)))
        if chance.random() < 0.5:
            sites = [fleet.units[unit].site for unit in units]
            some = [place for place in places if sites[place] == sites[some[0]]]
        return _scaled_inside(group, some, _factor(chance)), True
    return _head_moved(group, chance.choice(places), chance.choice(places)), True


def _factor(chance: Random) -> float:
    return exp(chance.choice((-1, 1)) * chance.choice(_STEPS))


def _exchanged(one: int, other: int) -> _Change:
    def change(parts: _Parts) -> _Parts:
        order = list(parts)
        order[one], order[other] = order[other], order[one]
        return tuple(order)

    return change


def _moved(one: int, to: int) -> _Change:
    def change(parts: _Parts) -> _Parts:
        order = list(parts)
        order.insert(to, order.pop(one))
        return tuple(order)

    return change


def _scaled(group: int, factor: float) -> _Change:
    """More or fewer tokens in a group."""

    def change(parts: _Parts) -> _Parts:
        weights = np.array([float(part.total) for part in parts])
        weights[group] *= factor
        totals = deal_tokens(sum(part.total for part in parts), weights)
        return tuple(
            replace(part, tokens=deal_tokens(total, _weights(part)))
            for part, total in zip(parts, totals, strict=True)
        )

    return change


def _scaled_inside(group: int, members: Sequence[int], factor: float) -> _Change:
    """More or fewer tokens on some members of a group, in place of the others'."""

    def change(parts: _Parts) -> _Parts:
        weights = _weights(parts[group])
        weights[members] *= factor
        tokens = deal_tokens(parts[group].total, weights)
        return _with(parts, group, replace(parts[group], tokens=tokens))

    return change


def _weights(part: Part) -> Floats:
    # A group may have no tokens at all.
    return np.array(part.tokens, dtype=float) + 1e-9


def _units_exchanged(one: tuple[int, int], other: tuple[int, int]) -> _Change:
    """Two units, by group and place, do each other's part."""

    def change(parts: _Parts) -> _Parts:
        (here, place), (there, where) = one, other
        mine, theirs = parts[here], parts[there]
        changed = _with_unit(mine, place, theirs.units[where]), _with_unit(theirs, where, mine.units[place])
        return _with(_with(parts, here, changed[0]), there, changed[1])

    return change


def _with_unit(part: Part, place: int, unit: int) -> Part:
    return replace(part, units=(*part.units[:place], unit, *part.units[place + 1 :]))


def _head_moved(group: int, giver: int, taker: int) -> _Change:
    def change(parts: _Parts) -> _Parts:
        heads = list(parts[group].heads)
        count = min(1, heads[giver])
        heads[giver] -= count
        heads[taker] += count
        return _with(parts, group, replace(parts[group], heads=tuple(heads)))

    return change


def _with(parts: _Parts, group: int, part: Part) -> _Parts:
    return (*parts[:group], part, *parts[group + 1 :])
