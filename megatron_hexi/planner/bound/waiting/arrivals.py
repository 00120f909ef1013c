"""When groups have each other's keys, step by step, in an order of groups: part of the bound (together.py).

In step s a group uses the keys of the group s places before it, and its own are used s places on. A wire
carries one step after the other, there and back at once, and a transfer begins when both ends have done
with the step before (cost/overlap.py). That holds of the units that have a head, so on average of all heads.
Where only the outermost groups are known, it is said of what these have of each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hexi.planner.bound.waiting.blocks import Blocks
from megatron_hexi.planner.bound.waiting.group_lines import GroupLines
from megatron_hexi.planner.bound.waiting.key_times import KeyTimes
from megatron_hexi.planner.bound.waiting.pass_end import PassEnd
from megatron_hexi.planner.bound.waiting.rows import Rows, Start, Term

#: A group, one of its sites, and a step.
_Step = tuple[int, int, int]


class Arrivals:
    """The transfers of one pass, keys only.

    Args:
        program: where rows go.
        groups: the groups.
        keys: what these take.
        blocks: of the pass.
        order: numbers of the groups, the outermost first, as far as they are known.
        end: of the pass.
        in_turn: whether keys of a step are asked for only when the block before it begins (a window of one
            step), the first ones when they are posted; else as early as one likes.
    """

    def __init__(
        self,
        program: Rows,
        groups: Sequence[GroupLines],
        keys: KeyTimes,
        blocks: Blocks,
        order: Sequence[int],
        end: PassEnd,
        in_turn: bool = False,
    ) -> None:
        self._program, self._groups, self._keys, self._blocks = program, groups, keys, blocks
        self._order, self._end, self._in_turn = order, end, in_turn
        #: When a group has the keys of a step on one of its sites.
        self.at: dict[_Step, Start] = {}
        #: When it asks for those of the next step at the earliest: when the block of this one begins.
        self._asks: dict[_Step, Start] = {}
        #: What its transfers take there, all steps; by group and site.
        self.takes: dict[tuple[int, int], list[Term]] = {}
        for number in order:
            for place in range(len(groups[number].shape)):
                self.at[number, place, 0] = self._asks[number, place, 0] = end.posted[number]
                self.takes[number, place] = []
        for step in range(1, len(groups)):
            for turn in range(len(order)):
                self._transfer(turn, step)

    def first(self, turn: int) -> Start:
        """When a group may have the first part of the first step's keys: both ends have posted theirs.

        Nothing is said of how long it travels, since parts differ in their heads.
        """
        number, source, user = self._order[turn], self._blocks.at(turn - 1), self._blocks.at(turn + 1)
        beside = [number, source]
        if user is not None and self._is_one_unit(number) and self._is_one_unit(user):
            beside.append(user)  # the same transfer carries what the unit sends
        start = self._program.time()
        for other in beside:
            if other is not None:
                self._program.above(start, *self._end.posted[other])
        return [(start, 1.0)], 0.0

    def _is_one_unit(self, number: int) -> bool:
        shape = self._groups[number].shape
        return len(shape) == 1 and shape[0][1] == 1

    def _transfer(self, turn: int, step: int) -> None:
        number, source, user = self._order[turn], self._blocks.at(turn - step), self._blocks.at(turn + step)
        for place in range(len(self._groups[number].shape)):
            before = number, place, step - 1
            if source is None and user is None:
                # Nothing more is known of it.
                self.at[number, place, step] = self.at[before]
                self._asks[number, place, step] = self._asks[before]
                continue
            gets = [] if source is None else self._keys.needed(number, place, source)
            sends = [] if user is None else self._keys.sends(number, place, [user])
            takes, here = self._program.time(), self._program.time()
            self._program.above(takes, gets)
            self._program.above(takes, sends)
            for start in self._ready(before):
                self._after(here, start, [(takes, 1.0)])
            for other, delta, terms in ((source, -step, gets), (user, step, sends)):
                if other is None:
                    continue
                if terms and self._keys.is_between_counterparts(number, other):
                    for start in self._ready((other, 0, step - 1)):
                        self._after(here, start, terms)
                elif other == source or self._keys.knows_owners(number):
                    # Some unit of the other group has done with the steps before.
                    self._after(here, self._any_ready(turn + delta, step - 1), ())
            self.at[number, place, step] = [(here, 1.0)], 0.0
            self.takes[number, place].append((takes, 1.0))
            self._begins(turn, place, step)

    def _begins(self, turn: int, place: int, step: int) -> None:
        """When the block of a step begins: its first keys are there, and the one before it is done."""
        number, begins = self._order[turn], self._program.time()
        self._asks[number, place, step] = [(begins, 1.0)], 0.0
        if self._in_turn:
            self._after(begins, self.first(turn) if step == 1 else self.at[number, place, step], ())
            block = self._blocks.of_step(turn, place, step - 1)
            term, lasts = self._end.lasts(number, place, block)
            (terms, at_zero) = self._asks[number, place, step - 1]
            self._program.above(begins, [*terms, term], at_zero + lasts)

    def _ready(self, step: _Step) -> list[Start]:
        """When a site may begin with the transfers that come after those of a step."""
        return [self.at[step], self._asks[step]] if self._in_turn else [self.at[step]]

    def _any_ready(self, turn: int, step: int) -> Start:
        """The same of any unit of a group that has heads."""
        turn %= len(self._groups)
        terms, at_zero = self._end.posted[self._order[turn]]
        blocks = (self._blocks.of_any(turn, before) for before in range(step if self._in_turn else 0))
        return terms, at_zero + sum(blocks)

    def _after(self, time: int, start: Start, terms: Sequence[Term]) -> None:
        before, at_zero = start
        self._program.above(time, [*before, *terms], at_zero)
