"""When groups have each other's keys, step by step, in an order of groups: part of the bound (together.py).

In step s a group uses the keys of the group s places before it, and its own are used s places on. A wire
carries one step after the other, there and back at once, and a transfer begins when both ends have done
with the step before (cost/overlap.py). That holds of the units that have a head, so on average of all heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hexi.planner.bound.group_lines import GroupLines
from megatron_hexi.planner.bound.key_times import KeyTimes
from megatron_hexi.planner.bound.rows import Rows, Term

#: Something to begin with: a sum, and what is added to it.
Start = tuple[list[Term], float]


class Arrivals:
    """The transfers of one pass, keys only.

    Args:
        program: where rows go.
        groups: the groups.
        keys: what these take.
        order: numbers of all groups, the outermost first.
        posted: when each group's keys may leave.
    """

    def __init__(
        self,
        program: Rows,
        groups: Sequence[GroupLines],
        keys: KeyTimes,
        order: Sequence[int],
        posted: Sequence[Start],
    ) -> None:
        self._program, self._groups, self._keys, self._order = program, groups, keys, order
        #: When a group has the keys of a step on one of its sites, by (group, site, step).
        self.at: dict[tuple[int, int, int], Start] = {}
        #: What its transfers take there, all steps; the same.
        self.takes: dict[tuple[int, int], list[Term]] = {}
        for number, group in enumerate(groups):
            for place in range(len(group.shape)):
                self.at[number, place, 0], self.takes[number, place] = posted[number], []
        for step in range(1, len(order)):
            for turn in range(len(order)):
                self._transfer(turn, step)

    def sources(self, turn: int) -> list[int]:
        """The groups whose keys the one at some place in the order uses, step by step."""
        return [self._order[(turn - step) % len(self._order)] for step in range(1, len(self._order))]

    def _transfer(self, turn: int, step: int) -> None:
        number = self._order[turn]
        source, user = (self._order[(turn + way * step) % len(self._order)] for way in (-1, 1))
        for place in range(len(self._groups[number].shape)):
            gets, sends = self._keys.needed(number, place, source), self._keys.sends(number, place, [user])
            takes, here = self._program.time(), self._program.time()
            self._program.above(takes, gets)
            self._program.above(takes, sends)
            self._after(here, (number, place, step - 1), [(takes, 1.0)])
            for other, terms in ((source, gets), (user, sends)):
                if terms and self._keys.is_between_counterparts(number, other):
                    self._after(here, (other, 0, step - 1), terms)
            self.at[number, place, step] = [(here, 1.0)], 0.0
            self.takes[number, place].append((takes, 1.0))

    def _after(self, time: int, before: tuple[int, int, int], terms: Sequence[Term]) -> None:
        start, at_zero = self.at[before]
        self._program.above(time, [*start, *terms], at_zero)
