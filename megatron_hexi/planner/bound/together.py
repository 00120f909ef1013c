"""Whether given groups, which wait for each other, may hold the sequence: part of the lower bound (whole.py).

Each pass of a layer ends with its slowest group. For every group g, with a part f of its heads on a site, and
every other group a, it takes at least

    X_g + all-to-alls + attention of the part, or of a member with heads enough for two halves        (alone)
    X_g + keys of all other groups, one after another, or what of them comes from other sites      (received)
    X_g + its keys to all other groups, or what of them goes to other sites                            (sent)
    X_a + a's keys, and the attention to them, in so many steps                                        (late)
    X_g (or X_a) + keys received (sent) up to a step, and the attention from there on        (steps, in order)

X: until all members are done with their tokens; nobody sends keys before that. How many of a group's keys
another one sees follows from which of them is outside of the other. All of that are lines in the groups'
tokens and in f, or above one between the least and the most tokens that groups may have: the least time is a
linear program's. Heads are told apart by branch and bound. Most groups are ruled out by the first three
already: these come first, by themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from ortools.linear_solver import pywraplp

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.bound.group_lines import GroupLines, Limits
from megatron_hexi.planner.bound.key_times import KeyTimes
from megatron_hexi.planner.bound.pass_rows import PassRows
from megatron_hexi.planner.bound.rows import Term
from megatron_hexi.planner.bound.setting import Setting
from megatron_hexi.planner.bound.site_times import Shape

#: Of so many groups all orders are looked at.
_ORDERED = 4
#: Tokens that groups hold at most are found again so often, as long as that narrows them by this part of all.
_ROUNDS, _NARROWER = 4, 0.002
#: So many parts of the heads' possible numbers are looked at.
_BRANCHES = 60
#: What a sequence takes, in longest times, where there is no room for it.
_TOO_MUCH = 10_000
#: What rounding may take away.
_ROUNDING, _NOTHING = 1e-6, 1e-10

_Order = Sequence[int] | None


@dataclass
class Tries:
    """Linear programs that may still be solved.

    Args:
        left: how many.
    """

    left: int


def suffices(setting: Setting, shapes: Sequence[Shape], most: Floats, tries: Tries) -> bool:
    """Whether groups of these shapes may hold the sequence in the setting's longest time.

    Args:
        setting: what groups have in common.
        shapes: of the groups.
        most: tokens of each.
        tries: to find out; when there are none left, they may.
    """
    rough = _narrowed(setting, shapes, most, None, tries, roughly=True)
    narrowed = None if rough is None else _narrowed(setting, shapes, rough, None, tries)
    if narrowed is None or not _may(setting, shapes, narrowed, None, tries):
        return False
    if len(shapes) > _ORDERED:
        return True
    numbers = range(len(shapes))
    # Groups that are alike are in either order the same.
    named = list(zip(shapes, most.tolist(), strict=True))
    orders = {tuple(named[number] for number in order): order for order in itertools.permutations(numbers)}
    for order in orders.values():
        found = _narrowed(setting, shapes, narrowed, order, tries)
        if found is not None and _may(setting, shapes, found, order, tries):
            return True
    return False


def _narrowed(
    setting: Setting,
    shapes: Sequence[Shape],
    most: Floats,
    order: _Order,
    tries: Tries,
    roughly: bool = False,
) -> Floats | None:
    """What groups hold at most together, which is less than each by itself; ``None``: not the sequence.

    The closer that is known, the closer are the lines.
    """
    everywhere = [((0, setting.heads),) * len(shape) for shape in shapes]
    for _ in range(_ROUNDS):
        groups = _groups(setting, shapes, most, everywhere)
        if groups is None:
            return None
        if tries.left <= 0:
            break
        tries.left -= 1
        program = _Program(setting, groups, order, roughly)
        if not program.suffices():
            return None
        tries.left -= len(groups)
        before, most = most, program.most()
        if (before - most).max() < _NARROWER * setting.length:
            break
    return most


def _may(setting: Setting, shapes: Sequence[Shape], most: Floats, order: _Order, tries: Tries) -> bool:
    """Whether they may hold it with some numbers of heads on each site: branch and bound over these."""
    open_: list[list[Limits]] = [[((0, setting.heads),) * len(shape) for shape in shapes]]
    for _ in range(min(_BRANCHES, tries.left)):
        limits = open_.pop()
        tries.left -= 1
        groups = _groups(setting, shapes, most, limits)
        if groups is not None and _Program(setting, groups, order).suffices():
            halves = _halves(groups, limits)
            if not halves:
                return True
            open_ += halves
        if not open_:
            return False
    return True


def _groups(
    setting: Setting, shapes: Sequence[Shape], most: Floats, limits: Sequence[Limits]
) -> list[GroupLines] | None:
    """All groups with the tokens that the others leave them; ``None`` if that is too many."""
    least = np.maximum(0.0, setting.length - (most.sum() - most))
    if (least > most + _ROUNDING * setting.length).any():
        return None
    least = np.minimum(least, most)
    return [
        GroupLines(setting, shape, float(low), float(high), len(shapes), heads)
        for shape, low, high, heads in zip(shapes, least, most, limits, strict=True)
    ]


def _halves(groups: Sequence[GroupLines], limits: Sequence[Limits]) -> list[list[Limits]]:
    """The heads of the site for which they are known least, in two; none where all are known."""
    sites = [
        (len(heads), group, site)
        for group, lines in enumerate(groups)
        if not lines.on_one_site
        for site, heads in enumerate(lines.heads)
    ]
    many, group, site = max(sites, default=(1, 0, 0))
    if many < 2:
        return []
    heads, halves = groups[group].heads[site], []
    for some in (heads[: many // 2], heads[many // 2 :]):
        mine = list(limits[group])
        mine[site] = int(some[0]), int(some[-1])
        halves.append([*limits[:group], tuple(mine), *limits[group + 1 :]])
    return halves


class _Program:
    """The linear program: the least time in which groups hold the sequence.

    It is solved in parts of the sequence and of the longest time, so that no number is far from 1.

    Args:
        setting: what groups have in common.
        groups: the groups.
        order: their numbers, the outermost first; ``None``: any.
        roughly: with fewer rows.
    """

    def __init__(
        self, setting: Setting, groups: Sequence[GroupLines], order: _Order, roughly: bool = False
    ) -> None:
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._variables: list[pywraplp.Variable] = []
        #: What each is a number of, tokens or seconds; and how often it counts.
        self._units: list[float] = []
        self._counts: list[int] = []
        self._longest_s, self._length, self._heads = setting.longest_s, setting.length, setting.heads
        self._possible = all(len(heads) for group in groups for heads in group.heads)
        if not self._possible:
            return
        self.tokens = [self._tokens(group.least, group.most) for group in groups]
        self._sum(self.tokens, 1.0)
        self.parts, self.held = [], []
        for group, tokens in zip(groups, self.tokens, strict=True):
            sites = range(0 if group.on_one_site else len(group.shape))
            heads = [(group.heads[site][0], group.heads[site][-1]) for site in sites]
            parts = [self._variable(few / setting.heads, many / setting.heads, 1.0) for few, many in heads]
            held = [self._tokens(*group.holds(site)) for site in sites]
            if sites:
                self._sum(parts, 1.0)
                self._sum([*held, tokens], 0.0, last=-1.0)
            self.parts.append(parts)
            self.held.append(held)
        self._vocabulary(groups)
        keys = KeyTimes(self, setting, groups, order)
        for number in range(len(groups)):
            self._share_memory(groups, number, keys)
        for one in setting.passes:
            PassRows(self, setting, groups, keys, order, one, roughly)

    def time(self, count: int = 0) -> int:
        """A time, that counts so often."""
        return self._variable(0.0, inf, self._longest_s, count)

    def above(self, time: int, terms: Sequence[Term], at_least: float = 0.0) -> None:
        """The time is no less than this sum."""
        each = {time: 1.0}
        for variable, factor in terms:
            each[variable] = each.get(variable, 0.0) - factor
        row = self._solver.Constraint(at_least / self._longest_s, inf)
        for variable, factor in each.items():
            scaled = factor * self._units[variable] / self._longest_s
            if abs(scaled) > _NOTHING:  # less of it is noise, which the solver does not bear
                row.SetCoefficient(self._variables[variable], scaled)

    def suffices(self) -> bool:
        """Whether its least time is no more than the longest."""
        if not self._possible:
            return False
        goal = self._solver.Objective()
        goal.SetMinimization()
        for variable, count in zip(self._variables, self._counts, strict=True):
            if count:
                goal.SetCoefficient(variable, count)
        # There is always an answer: times may be as long as they like.
        solved = self._solver.Solve() == pywraplp.Solver.OPTIMAL
        return not solved or bool(goal.Value() <= 1 + _ROUNDING)

    def most(self) -> Floats:
        """Tokens that each group holds at most in the longest time; the program is of no use after this."""
        limit, goal = self._solver.Constraint(-inf, 1 + _ROUNDING), self._solver.Objective()
        for variable, count in zip(self._variables, self._counts, strict=True):
            if count:
                limit.SetCoefficient(variable, count)
        goal.SetMaximization()
        found = []
        for tokens in self.tokens:
            goal.Clear()
            goal.SetCoefficient(self._variables[tokens], 1)
            goal.SetMaximization()
            solved = self._solver.Solve() == pywraplp.Solver.OPTIMAL
            most = self._variables[tokens].ub()
            found.append(min(most, goal.Value() + _ROUNDING) if solved else most)
        return self._length * np.array(found)

    def _tokens(self, least: float, most: float) -> int:
        return self._variable(least / self._length, most / self._length, self._length)

    def _variable(self, least: float, most: float, unit: float, count: int = 0) -> int:
        bounds = (0.0 if end < _NOTHING else float(end) for end in (least, most))
        self._variables.append(self._solver.NumVar(*bounds, ""))
        self._units.append(unit)
        self._counts.append(count)
        return len(self._variables) - 1

    def _sum(self, variables: Sequence[int], total: float, last: float = 1.0) -> None:
        """All together, the last one so often, are so much."""
        row = self._solver.Constraint(total, total)
        for variable in variables[:-1]:
            row.SetCoefficient(self._variables[variable], 1.0)
        row.SetCoefficient(self._variables[variables[-1]], last)

    def _share_memory(self, groups: Sequence[GroupLines], number: int, keys: KeyTimes) -> None:
        """Heads and tokens of each of several sites share its memory; what is too much is no answer in time.

        With the keys of any one of the other groups: these are there at once.
        """
        group, others = groups[number], [of for of in range(len(groups)) if of != number]
        received = max((keys.seen(number, of) * groups[of].least for of in others), default=0.0)
        a_head = group.room_of_a_head(received)
        for site, (part, held) in enumerate(zip(self.parts[number], self.held[number], strict=True)):
            too_much = self._variable(0.0, inf, 1.0, _TOO_MUCH)
            row = self._solver.Constraint(-inf, group.room(site) / self._length + _ROUNDING)
            row.SetCoefficient(self._variables[held], 1.0)
            row.SetCoefficient(self._variables[part], self._heads * a_head / self._length)
            row.SetCoefficient(self._variables[too_much], -1.0)

    def _vocabulary(self, groups: Sequence[GroupLines]) -> None:
        longest = self.time(count=1)
        for group, tokens in zip(groups, self.tokens, strict=True):
            line = group.line(group.until_done(2))
            self.above(longest, [(tokens, line.slope)], line.at_zero)
