"""The least time in which given groups hold the sequence: a linear program, part of the bound (together.py).

Each pass of a layer ends with its slowest group. For every group g, with a part f of its heads on a site, and
every other group a, it takes at least

    X_g + all-to-alls + attention of the part, or of a member with heads enough for two halves        (alone)
    X_g + keys of all other groups, one after another, or what of them comes from other sites      (received)
    X_g + its keys to all other groups, or what of them goes to other sites                            (sent)
    X_a + a's keys, and the attention to them, in so many steps                                        (late)
    what is known of when the keys of a step are there, and the attention from there on      (steps, in order)

A site has room for its tokens, for what its part of the heads needs of the group's, and for the keys that
are there at once (memory_rows.py). Once in all micro-batches, gradients and weights show in what all-to-alls
and keys leave of a pass's wire.

X: until all members are done with their tokens; nobody sends keys before that. How many of a group's keys
another one sees follows from which of them is outside of the other. All of that are lines in the groups'
tokens and in f, or above one between the least and the most tokens that groups may have. In a pipeline,
stages that differ have passes of their own, which count by what they are of a layer's time on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from ortools.linear_solver import pywraplp

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.bound.waiting.group_lines import GroupLines
from megatron_hexi.planner.bound.waiting.key_times import KeyTimes
from megatron_hexi.planner.bound.waiting.memory_rows import MemoryRows
from megatron_hexi.planner.bound.waiting.pass_rows import PassRows
from megatron_hexi.planner.bound.waiting.rows import Term, scaled
from megatron_hexi.planner.bound.waiting.setting import Setting

#: What a sequence takes, in longest times, where there is no room for it.
_TOO_MUCH = 10_000
#: Pipeline stages that are less than this part of a layer's time have fewer rows.
_LIGHT = 0.25
#: What rounding may take away.
_ROUNDING, _NOTHING = 1e-6, 1e-10


class Stage(NamedTuple):
    """What groups take on pipeline stages that are alike."""

    setting: Setting
    groups: list[GroupLines]


def _heads(group: Sequence[GroupLines]) -> list[tuple[float, float]]:
    """The fewest and the most of each of several sites that all pipeline stages allow; none: 1 and 0."""
    return [
        (max(some[0] for some in heads), min(some[-1] for some in heads)) if all(map(len, heads)) else (1, 0)
        for heads in zip(*(stage.heads for stage in group), strict=True)
    ]


def _together(terms: Sequence[Term]) -> dict[int, float]:
    """How often each variable is taken in all."""
    each = dict[int, float]()
    for variable, factor in terms:
        each[variable] = each.get(variable, 0.0) + factor
    return each


class GroupProgram:
    """The linear program: the least time in which groups hold the sequence.

    It is solved in parts of the sequence and of the longest time, so that no number is far from 1.

    Args:
        stages: the groups, on pipeline stages that differ.
        order: their numbers, the outermost first, as far as they are known.
        roughly: with fewer rows.
    """

    def __init__(self, stages: Sequence[Stage], order: Sequence[int], roughly: bool = False) -> None:
        setting, groups = stages[0]
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._variables: list[pywraplp.Variable] = []
        #: What each is a number of, tokens or seconds; and how often it counts.
        self._units: list[float] = []
        self._counts: list[float] = []
        self._longest_s, self._length, self._heads = setting.average_s, setting.length, setting.heads
        #: Longest times that there are, where what shows of gradients and weights counts too.
        self._limit = setting.rings.longest_s / setting.average_s if setting.rings else 1.0
        heads = [_heads([stage.groups[number] for stage in stages]) for number in range(len(groups))]
        self._possible = all(few <= many for sites in heads for few, many in sites)
        if not self._possible:
            return
        self.tokens = [self._tokens(group.least, group.most) for group in groups]
        self._sum(self.tokens, 1.0)
        self.parts, self.held = [], []
        for group, tokens, limits in zip(groups, self.tokens, heads, strict=True):
            parts = [self._variable(few / self._heads, many / self._heads, 1.0) for few, many in limits]
            held = [self._tokens(*group.holds(site)) for site in range(len(limits))]
            if limits:
                self._sum(parts, 1.0)
                self._sum([*held, tokens], 0.0, last=-1.0)
            self.parts.append(parts)
            self.held.append(held)
        self._vocabulary(groups)
        keys = [KeyTimes(self, *stage, order) for stage in stages]
        MemoryRows(self, *stages[0], keys[0])
        for stage, of_stage in zip(stages, keys, strict=True):
            for one in stage.setting.passes:
                PassRows(self, *stage, of_stage, order, one, roughly or stage.setting.weight < _LIGHT)

    def time(self, count: float = 0.0) -> int:
        """A time, that counts so often."""
        return self._variable(0.0, inf, self._longest_s, count)

    def above(self, time: int, terms: Sequence[Term], at_least: float = 0.0) -> None:
        """The time is no less than this sum."""
        each = _together([(time, 1.0), *scaled(-1.0, terms)])
        units, longest_s = self._units, self._longest_s
        row = self._solver.Constraint(at_least / longest_s, inf)
        for variable, factor in each.items():
            often = factor * units[variable] / longest_s
            if abs(often) > _NOTHING:  # less of it is noise, which the solver does not bear
                row.SetCoefficient(self._variables[variable], often)

    def fits(self, room: float, terms: Sequence[Term]) -> None:
        """So many tokens have room: no less than this sum; what is too much is no answer in time."""
        each = _together(terms)
        most = sum(max(factor * end for end in self.bounds(variable)) for variable, factor in each.items())
        if most <= room:
            return
        row = self._solver.Constraint(-inf, room / self._length + _ROUNDING)
        for variable, factor in each.items():
            row.SetCoefficient(self._variables[variable], factor * self._units[variable] / self._length)
        row.SetCoefficient(self._variables[self._variable(0.0, inf, 1.0, _TOO_MUCH)], -1.0)

    def bounds(self, variable: int) -> tuple[float, float]:
        """The least and the most that a variable may be."""
        one, unit = self._variables[variable], self._units[variable]
        return one.lb() * unit, one.ub() * unit

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
        return not solved or bool(goal.Value() <= self._limit + _ROUNDING)

    def most(self) -> Floats:
        """Tokens that each group holds at most in the longest time; the program is of no use after this."""
        limit = self._solver.Constraint(-inf, self._limit + _ROUNDING)
        goal = self._solver.Objective()
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

    def _variable(self, least: float, most: float, unit: float, count: float = 0.0) -> int:
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

    def _vocabulary(self, groups: Sequence[GroupLines]) -> None:
        longest = self.time(count=1.0)
        for group, tokens in zip(groups, self.tokens, strict=True):
            line = group.line(group.until_done(2))
            self.above(longest, [(tokens, line.slope)], line.at_zero)
