"""What groups wait for in a pass of a layer, as rows of a linear program: part of the bound (together.py).

A wire carries one step of the exchange after the other; what keys take is in key_times.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.bound.groups.site_times import first_part, in_steps
from megatron_hexi.planner.bound.waiting.group_lines import GroupLines
from megatron_hexi.planner.bound.waiting.key_times import KeyTimes
from megatron_hexi.planner.bound.waiting.pass_end import PassEnd
from megatron_hexi.planner.bound.waiting.rows import Rows, Term, scaled
from megatron_hexi.planner.bound.waiting.setting import Pass, Rings, Setting
from megatron_hexi.planner.bound.waiting.step_rows import StepRows

#: How much longer attention takes than keys, as multiples of what it does at least, where a line is laid.
_RATIOS, _STEP = (0.6, 1.0, 1.6), 1e-4


class PassRows:
    """The rows of a pass.

    Args:
        program: where they go.
        setting: what groups have in common.
        groups: the groups.
        keys: what these take.
        order: numbers of the groups, the outermost first, as far as they are known.
        one: the pass.
        roughly: leave out what follows from when each group's keys are posted: fewer rows.
    """

    def __init__(
        self,
        program: Rows,
        setting: Setting,
        groups: Sequence[GroupLines],
        keys: KeyTimes,
        order: Sequence[int],
        one: Pass,
        roughly: bool,
    ) -> None:
        self._program, self._all, self._groups, self._keys = program, setting, groups, keys
        self._one, self._way = one, one.way
        # Keys go out again in the backward pass, and their gradients come home.
        self._times = 1 + one.way
        self._parts = min(group.parts for group in groups)
        self._end = PassEnd(program, setting, groups, one)
        for number in range(len(groups)):
            self._alone(number)
            self._received(number)
            self._sent(number)
        if setting.rings and one.tokens:
            for seconds in (seconds for way, seconds in setting.rings.behind if way == one.way):
                self._hides(setting.rings, seconds)
        if roughly:
            return
        for number in range(len(groups)):
            self._taking_turns(number)
            for other in self._others(number):
                # Of groups whose order is known, it follows from when keys arrive.
                in_order = number in order and other in order
                if not (in_order and keys.is_between_counterparts(number, other)):
                    self._late(number, other)
        if len(groups) > 1:
            StepRows(program, setting, groups, keys, order, self._end, one.way, self._parts)

    def _alone(self, number: int) -> None:
        """X + A + Y; sites of a group have heads and tokens each."""
        group, above = self._groups[number], self._program.above
        begins, moves = self._end.begins[number], self._end.moves[number]
        if group.on_one_site:
            line = group.by_itself(self._one)
            above(self._end.time, [self._end.of(number, line), *self._merging(number, 0)], line.at_zero)
            return
        line = group.line(group.begins(self._one))
        above(begins, [self._end.of(number, line)], line.at_zero)
        above(self._end.time, [(begins, 1.0), (moves, 1.0)], group.busiest(self._way))
        for site, (part, held) in enumerate(
            zip(self._program.parts[number], self._program.held[number], strict=True)
        ):
            for line in group.site_begins(site, self._one):
                above(begins, [(held, line.slope)], line.at_zero)
            for line in group.moved(site):
                above(moves, [(part, line.slope)], line.at_zero)
            line = group.moved_inside(site)
            above(moves, [(held, line.slope)], line.at_zero)
            self._border(number, site)
            more, merging = group.attention_beyond(site, self._way), self._merging(number, site)
            for line in group.attention(site, self._way):
                terms = [(begins, 1.0), (moves, 1.0), (part, line.slope), *merging]
                above(self._end.time, terms, line.at_zero)
                above(self._end.time, [*terms, self._end.of(number, more)], line.at_zero + more.at_zero)

    def _merging(self, number: int, site: int) -> list[Term]:
        """What a site merges besides half of all queries and keys in each step.

        A group that is known to be outside of another one sees all of its keys, and that one sees it with all
        of its queries.
        """
        half = 0.5 if self._all.causal else 1.0
        queries, keys = self._groups[number].merging(site, self._way)
        inside = sum(self._keys.seen(of, number) - half for of in self._others(number))
        return [
            (self._program.tokens[number], queries * inside),
            *(
                (self._program.tokens[of], keys * (self._keys.seen(number, of) - half))
                for of in self._others(number)
            ),
        ]

    def _border(self, number: int, site: int) -> None:
        """A site that holds T of G tokens and has a part f of the heads sends (1 - f) T, and gets f (G - T).

        Of a product, planes are below it (McCormick 1976): x y is no less than x' y + x y' - x' y' where x'
        and y' are both the least, or both the most.
        """
        group, each = self._groups[number], self._groups[number].moves(site)
        part, held = self._program.parts[number][site], self._program.held[number][site]
        tokens = self._program.tokens[number]
        fewest, most = group.heads[site][[0, -1]] / self._all.heads
        least, largest = group.holds(site)
        for one, of in ((1 - most, least), (1 - fewest, largest)):
            terms = [(held, each * one), (part, -each * of)]
            self._program.above(self._end.moves[number], terms, each * of * (1 - one))
        rest = max(0.0, group.least - largest), group.most - least
        for one, of in ((fewest, rest[0]), (most, rest[1])):
            terms = [(tokens, each * one), (held, -each * one), (part, each * of)]
            self._program.above(self._end.moves[number], terms, -each * one * of)

    def _received(self, number: int) -> None:
        """Keys of all other groups; and those that each site gets from other sites."""
        group, others = self._groups[number], self._others(number)
        for place in range(len(group.shape)):
            keys = [term for of in others for term in self._keys.needed(number, place, of)]
            self._end.after(number, place, self._end.posted[number], scaled(self._times, keys))
            if not group.on_one_site:  # else what comes from other sites is among them
                away = [term for of in others for term in self._keys.crossed(number, place, of)]
                self._end.after(number, place, self._end.posted[number], scaled(self._times, away))

    def _sent(self, number: int) -> None:
        """Keys to all other groups, or from each site to others."""
        for place in range(len(self._groups[number].shape)):
            keys = self._keys.sends(number, place, self._others(number))
            self._end.after(number, place, self._end.posted[number], scaled(self._times, keys))

    def _hides(self, rings: Rings, seconds: float) -> None:
        """Gradients or weights hide in what all-to-alls and keys leave of the wire, on the busiest units.

        Of a layer's t seconds show the longer of its own last part and t - (pass - wire), once in all
        micro-batches (cost/stage.py).
        """
        above, shows = self._program.above, self._program.time(1 / rings.turns)
        moves, keys = self._program.time(), self._program.time()
        for number, group in enumerate(self._groups):
            others = self._others(number)
            for place in range(len(group.shape)):
                needed = [term for of in others for term in self._keys.needed(number, place, of)]
                for terms in (needed, self._keys.sends(number, place, others)):
                    above(keys, scaled(self._times, terms))
            if group.on_one_site:
                line = group.wire_inside()
                above(moves, [self._end.of(number, line)], line.at_zero)
            else:
                above(moves, [(self._end.moves[number], self._all.whole_ratio)])
        above(shows, (), seconds / rings.layers)
        above(shows, [(moves, 1.0), (keys, 1.0), (self._end.time, -1.0)], seconds)

    def _late(self, number: int, of: int) -> None:
        """Another group's keys, that are posted late, and the attention to them."""
        group, keys = self._groups[number], self._groups[of].least
        for place in range(len(group.shape)):
            wire = self._keys.between(number, place, of) * keys
            late = group.late(place, self._way, keys, wire, self._parts)
            self._end.after(number, place, self._end.posted[of], (), late)
            if not (group.on_one_site and self._groups[of].on_one_site):
                away = self._keys.crossed(number, place, of)
                self._end.after(number, place, self._end.posted[of], scaled(self._times, away))

    def _taking_turns(self, number: int) -> None:
        """Keys from other sites and the attention to them, in so many steps."""
        group = self._groups[number]
        others = [of for of in self._others(number) if self._groups[of].on_one_site]
        for place, units in enumerate(group.shape):
            away = [of for of in others if not self._all.may_meet(units, self._groups[of].shape[0])]
            keys = sum(self._groups[of].least for of in away)
            each = min((self._keys.between(number, place, of) for of in away), default=0.0)
            # Gradients of a step go home after it: then an empty last step is best.
            steps, work = len(away) - 1 + self._parts - self._way, group.work(place, self._way, keys)
            if steps < 1 or not each * keys:
                continue
            if group.on_one_site:
                self._turns_of(number, away, each, work, steps)
            else:
                turns = in_steps(np.array(each * keys), np.array(work.min()), steps)
                self._end.after(number, place, self._end.posted[number], (), turns)

    def _turns_of(self, number: int, away: Sequence[int], each: float, work: Floats, steps: int) -> None:
        """Lines below `in_steps`, of a group on one site.

        Args:
            number: of the group.
            away: the groups on other sites.
            each: seconds for each of their tokens' keys.
            work: attention to these, [pieces].
            steps: in which they travel.
        """
        wire = each * sum(self._groups[of].least for of in away)
        for times in _RATIOS:
            by_wire, by_work = _slopes(times * float(work.min()) / wire, steps)
            arriving = [(self._program.tokens[of], by_wire * each) for of in away]
            self._end.after(number, 0, self._end.posted[number], arriving, by_work * work)

    def _others(self, number: int) -> list[int]:
        return [other for other in range(len(self._groups)) if other != number]


def _slopes(ratio: float, steps: int) -> tuple[float, float]:
    """How fast `in_steps` grows with the wire's time and with attention's, where they are in a ratio.

    It is convex, and twice as long for twice of both: the plane with these slopes is nowhere above it.
    """

    def at(wire: float, compute: float) -> float:
        return compute + wire * first_part(compute / max(wire, 1e-300), steps)

    step = _STEP * max(1.0, ratio)
    by_work = (at(1, ratio + step) - at(1, max(0.0, ratio - step))) / (ratio + step - max(0.0, ratio - step))
    return at(1, ratio) - ratio * by_work, by_work
