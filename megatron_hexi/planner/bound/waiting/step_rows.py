"""What follows from the order of groups, as rows of a linear program (together.py).

When the keys of each step are there, and what is done from there on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_hexi.planner.bound.waiting.arrivals import Arrivals
from megatron_hexi.planner.bound.waiting.blocks import Blocks
from megatron_hexi.planner.bound.waiting.group_lines import GroupLines
from megatron_hexi.planner.bound.waiting.key_times import KeyTimes
from megatron_hexi.planner.bound.waiting.pass_end import PassEnd
from megatron_hexi.planner.bound.waiting.rows import Rows, Start, scaled
from megatron_hexi.planner.bound.waiting.setting import Setting


class StepRows:
    """The rows of a pass.

    Args:
        program: where they go.
        setting: what groups have in common.
        groups: the groups.
        keys: what these take.
        order: numbers of the groups, the outermost first, as far as they are known.
        end: of the pass.
        way: 0 forward, 1 backward.
        parts: in which the keys of the first step travel at most.
    """

    def __init__(
        self,
        program: Rows,
        setting: Setting,
        groups: Sequence[GroupLines],
        keys: KeyTimes,
        order: Sequence[int],
        end: PassEnd,
        way: int,
        parts: int,
    ) -> None:
        self._program, self._groups, self._keys, self._order = program, groups, keys, order
        self._end, self._way, self._parts = end, way, parts
        self._blocks = Blocks(program.tokens, groups, keys, order, setting.causal, way)
        self._arrivals = Arrivals(program, groups, keys, self._blocks, order, end, setting.window == 1)
        for turn, number in enumerate(order):
            # Of other sources it is not known when their keys come.
            sources = self._blocks.sources(turn)
            for place in range(len(groups[number].shape)):
                self._following(number, place, self._arrivals.first(turn), {})
                for step in range(1, min(len(sources) + 1, len(groups) - 1) + 1):
                    self._step(turn, place, step, sources)
                # Gradients of keys go home over the same wire.
                takes = self._arrivals.takes[number, place]
                end.after(number, place, end.posted[number], scaled(1 + way, takes))

    def _step(self, turn: int, place: int, step: int, sources: Sequence[int]) -> None:
        """What follows when the keys of a step are there: attention, and gradients home.

        Of the very first step, a part is left; and its gradients are, where it is the last one too.
        """
        number, arrived = self._order[turn], self._arrivals.at[self._order[turn], place, step]
        left = dict.fromkeys(sources[: step - 1], 0.0)
        if step == 1 and self._parts > 1:
            if not sources:  # it is not known whose keys are left
                return
            left[sources[0]] = 1 / self._parts
        self._following(number, place, arrived, left)
        last = self._blocks.at(turn + 1)
        if self._way == 1 and last is not None:
            (start, begins), (leaves, ends) = arrived, self._end.left[last]
            work, at_zero = self._end.lasts(number, place, self._blocks.work(number, place, left))
            more, beyond = self._blocks.beyond(number, place, left)
            back = scaled(left.get(last, 1.0), self._keys.needed(number, place, last))
            terms = [*start, work, *more, *back, *leaves]
            self._program.above(self._end.time, terms, begins + at_zero + beyond + ends)

    def _following(self, number: int, place: int, start: Start, left: Mapping[int, float]) -> None:
        """What a group computes from some time on, with parts of the others' keys."""
        (before, begins), (more, beyond) = start, self._blocks.beyond(number, place, left)
        seconds = self._blocks.work(number, place, left)
        self._end.after(number, place, ([*before, *more], begins + beyond), (), seconds)
