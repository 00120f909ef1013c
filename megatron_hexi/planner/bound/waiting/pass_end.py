"""When a pass of a layer ends, by what its groups still do: rows of a linear program (together.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.bound.waiting.group_lines import GroupLines
from megatron_hexi.planner.bound.waiting.lines import Line
from megatron_hexi.planner.bound.waiting.rows import Rows, Start, Term
from megatron_hexi.planner.bound.waiting.setting import Pass, Setting


class PassEnd:
    """The end of a pass, and what groups do before attention and after it.

    Args:
        program: where rows go.
        setting: what groups have in common.
        groups: the groups.
        one: the pass.
    """

    def __init__(self, program: Rows, setting: Setting, groups: Sequence[GroupLines], one: Pass) -> None:
        self._program, self._all, self._groups, self._one = program, setting, groups, one
        #: When all groups are done.
        self.time = program.time(one.times * setting.weight)
        #: X of each group, and its all-to-alls where it is on several sites.
        self.begins = [program.time() for _ in groups]
        self.moves = [program.time() for _ in groups]
        #: What shows of the all-to-all of groups on one site after attention, [pieces].
        self._leaving = [group.leaves(one.way) if group.on_one_site else np.zeros(1) for group in groups]
        #: When keys of each group may leave, and what shows of its all-to-all after attention.
        self.posted = [self._posts(number) for number in range(len(groups))]
        self.left = [self._leaves(number) for number in range(len(groups))]

    def after(
        self,
        number: int,
        place: int,
        start: Start,
        terms: Sequence[Term] = (),
        seconds: Floats | float = 0.0,
    ) -> None:
        """What a group does from some time on, up to the end of the pass.

        Args:
            number: the group.
            place: one of its sites.
            start: the time.
            terms: what it waits for besides.
            seconds: what follows, of the site if that had all heads; [pieces] or a number.
        """
        group, (before, at_zero) = self._groups[number], start
        if group.on_one_site:
            term, lasts = self.lasts(number, place, seconds + self._leaving[number])
            self._program.above(self.time, [*before, *terms, term], at_zero + lasts)
        else:
            term, lasts = self.lasts(number, place, seconds)
            leaves = self.moves[number], self._all.after[self._one.way]
            self._program.above(self.time, [*before, *terms, leaves, term], at_zero + lasts)

    def lasts(self, number: int, place: int, seconds: Floats | float) -> tuple[Term, float]:
        """What a site takes that takes so long with all heads, [pieces] or a number."""
        if self._groups[number].on_one_site:
            line = self._groups[number].line(seconds)
            return self.of(number, line), line.at_zero
        return (self._program.parts[number][place], float(np.min(seconds))), 0.0

    def of(self, number: int, line: Line) -> Term:
        """A line in a group's tokens, without what it is at zero."""
        return self._program.tokens[number], line.slope

    def _posts(self, number: int) -> Start:
        group = self._groups[number]
        if group.on_one_site:
            line = group.posts(self._one)
            return [self.of(number, line)], line.at_zero
        return [(self.begins[number], 1.0), (self.moves[number], self._all.before[self._one.way])], 0.0

    def _leaves(self, number: int) -> Start:
        group = self._groups[number]
        if group.on_one_site:
            line = group.line(self._leaving[number])
            return [self.of(number, line)], line.at_zero
        return [(self.moves[number], self._all.after[self._one.way])], 0.0
