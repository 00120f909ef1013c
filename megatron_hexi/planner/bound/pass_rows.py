"""What groups wait for in a pass of a layer, as rows of a linear program: part of the bound (together.py).

A wire carries one step of the exchange after the other, each as fast as the units of the one group can send
and those of the other receive: on average of all heads, whose owners and users are no less busy than if all
members had equally many. What is said of that average holds for one of the units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.bound.group_lines import GroupLines
from megatron_hexi.planner.bound.setting import Line, Pass, Setting
from megatron_hexi.planner.bound.site_times import in_steps

#: How much longer attention takes than keys, as multiples of what it does at least, where a line is laid.
_RATIOS, _STEP = (0.6, 1.0, 1.6), 1e-4

#: A variable, by its number, and how often it is taken.
Term = tuple[int, float]


class Rows(Protocol):
    """The linear program, as far as rows need it.

    Args:
        tokens: of each group.
        parts: of each of its sites, the part of the heads.
        held: likewise, tokens.
    """

    tokens: list[int]
    parts: list[list[int]]
    held: list[list[int]]

    def time(self, count: int = 0) -> int:
        """A time, that counts so often."""

    def above(self, time: int, terms: Sequence[Term], at_least: float = 0.0) -> None:
        """The time is no less than this sum."""


class PassRows:
    """The rows of a pass.

    Args:
        program: where they go.
        setting: what groups have in common.
        groups: the groups.
        order: their numbers, the outermost first; ``None``: any.
        one: the pass.
    """

    def __init__(
        self,
        program: Rows,
        setting: Setting,
        groups: Sequence[GroupLines],
        order: Sequence[int] | None,
        one: Pass,
    ) -> None:
        self._program, self._all, self._groups, self._order = program, setting, groups, order
        self._one, self._way = one, one.way
        # Keys go out again in the backward pass, and their gradients come home.
        self._times = 1 + one.way
        self._parts = min(group.parts for group in groups)
        self._end = program.time(one.times)
        #: X of each group, and its all-to-alls where it is on several sites.
        self._begins = [program.time() for _ in groups]
        self._moves = [program.time() for _ in groups]
        self._posted = [self._posts(number) for number in range(len(groups))]
        self._left = [self._leaves(number) for number in range(len(groups))]
        for number in range(len(groups)):
            self._alone(number)
        for number in range(len(groups)):
            self._received(number)
            self._sent(number)
            for other in self._others(number):
                self._late(number, other)
        if order is not None:
            self._in_order(order)

    def _alone(self, number: int) -> None:
        """X + A + Y; sites of a group have heads and tokens each."""
        group, above = self._groups[number], self._program.above
        begins, moves = self._begins[number], self._moves[number]
        if group.on_one_site:
            line = group.by_itself(self._one)
            above(self._end, [self._of(number, line)], line.at_zero)
            return
        line = group.line(group.begins(self._one))
        above(begins, [self._of(number, line)], line.at_zero)
        for site, (part, held) in enumerate(
            zip(self._program.parts[number], self._program.held[number], strict=True)
        ):
            for line in group.site_begins(site, self._one):
                above(begins, [(held, line.slope)], line.at_zero)
            for line in group.moved(site):
                above(moves, [(part, line.slope)], line.at_zero)
            self._border(number, site)
            for line in group.attention(site, self._way):
                above(self._end, [(begins, 1.0), (moves, 1.0), (part, line.slope)], line.at_zero)

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
            self._program.above(self._moves[number], terms, each * of * (1 - one))
        rest = max(0.0, group.least - largest), group.most - least
        for one, of in ((fewest, rest[0]), (most, rest[1])):
            terms = [(tokens, each * one), (held, -each * one), (part, each * of)]
            self._program.above(self._moves[number], terms, -each * one * of)

    def _received(self, number: int) -> None:
        """Keys of all other groups; and with the attention to those from other sites, in so many steps."""
        group, others = self._groups[number], self._others(number)
        if group.on_one_site:
            keys = [(self._program.tokens[of], self._times * self._key_s(number, 0, of)) for of in others]
            self._after_own(number, keys)
            self._after_own(number, [term for of in others for term in self._from_parts(number, of)])
        else:
            keys_s = [
                sum(self._key_s(number, place, of) * self._groups[of].least for of in others)
                for place in range(len(group.shape))
            ]
            self._after_own(number, seconds=[self._times * one for one in keys_s])
        self._taking_turns(number)

    def _sent(self, number: int) -> None:
        """Keys to all groups on one site, of which each KV head is sent by the same unit."""
        if self._all.ratio > 1:
            return
        group, users = self._groups[number], self._others(number)
        if group.on_one_site:
            tokens, each = self._sends(number, users)
            self._after_own(number, [(tokens, self._times * each)])
            return
        users = [user for user in users if self._groups[user].on_one_site]
        seconds = []
        for here, units in group.shape:
            seen = sum(self._seen(user, number) for user in users if self._groups[user].shape[0][0] != here)
            seconds.append(self._times * group.least * self._each_s(here, units) * seen)
        self._after_own(number, seconds=seconds)

    def _from_parts(self, number: int, other: int) -> list[Term]:
        """Keys of another group from other sites, on average of the units of a group on one site."""
        [(here, units)], far = self._groups[number].shape, self._groups[other]
        each = self._times * self._seen(number, other) * self._each_s(here, units)
        if far.on_one_site:
            return [(self._program.tokens[other], each)] if far.shape[0][0] != here else []
        sites = zip(far.shape, self._program.parts[other], strict=True)
        return [(part, each * far.least) for (there, _), part in sites if there != here]

    def _late(self, number: int, of: int) -> None:
        """Another group's keys, that are posted late, and the attention to them."""
        group, keys = self._groups[number], self._groups[of].least
        seconds = [
            group.late(place, self._way, keys, self._key_s(number, place, of) * keys, self._parts)
            for place in range(len(group.shape))
        ]
        self._after(number, of, (), seconds)
        if group.on_one_site and not self._groups[of].on_one_site:
            self._after(number, of, self._from_parts(number, of), [0.0])

    def _taking_turns(self, number: int) -> None:
        """Keys from other sites and the attention to them, in so many steps."""
        group, seconds = self._groups[number], list[Floats | float]()
        for place, (here, _) in enumerate(group.shape):
            others = [of for of in self._others(number) if self._groups[of].on_one_site]
            away = [of for of in others if self._groups[of].shape[0][0] != here]
            keys = sum(self._groups[of].least for of in away)
            each = min((self._key_s(number, place, of) for of in away), default=0.0)
            # Gradients of a step go home after it: then an empty last step is best.
            steps, work = len(away) - 1 + self._parts - self._way, group.work(place, self._way, keys)
            if steps < 1 or not each * keys:
                seconds.append(0.0)
            elif group.on_one_site:
                self._turns_of(number, away, each, work, steps)
                return
            else:
                seconds.append(float(in_steps(np.array(each * keys), np.array(work.min()), steps)))
        if not group.on_one_site:
            self._after_own(number, seconds=seconds)

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
            self._after_own(number, arriving, [by_work * work])

    def _in_order(self, order: Sequence[int]) -> None:
        """In step s a group uses the keys of the group s places before it, and its own are used s places on.

        Keys are received in the order of steps, and sent in that order; attention to them and to those of
        later steps follows.
        """
        count = len(order)
        for place, number in enumerate(order):
            sources = [order[(place - step) % count] for step in range(1, count)]
            for step, source in enumerate(sources, start=1):
                later = sources[step - 1 :]
                if self._groups[number].on_one_site:
                    self._step(number, number, [self._keys(number, of) for of in sources[:step]], later)
                users = [order[(place - step + on) % count] for on in range(1, step + 1)]
                self._step(number, source, [self._sends(source, users)], later)

    def _step(self, number: int, end: int, terms: Sequence[Term], sources: Sequence[int]) -> None:
        """What follows when the keys of the first of some sources are there: attention, and gradients home.

        Of the very first step, a part is left; and its gradients are, where it is the last one too.
        """
        group, last = self._groups[number], sources[-1]
        parts = self._parts if len(sources) == len(self._groups) - 1 else 1
        keys = sum(self._groups[source].least for source in sources[1:])
        keys += self._groups[sources[0]].least / parts
        seconds = [group.work(place, self._way, keys) for place in range(len(group.shape))]
        self._after(number, end, terms, seconds)
        if self._way == 1 and group.on_one_site:
            (posts, begins), (leaves, ends) = self._posted[end], self._left[last]
            line, (of_last, each) = group.line(seconds[0]), self._keys(number, last)
            back = of_last, each / (parts if len(sources) == 1 else 1)
            self._program.above(
                self._end,
                [*posts, *terms, self._of(number, line), back, *leaves],
                begins + line.at_zero + ends,
            )

    def _after_own(
        self, number: int, terms: Sequence[Term] = (), seconds: Sequence[Floats | float] = (0.0,)
    ) -> None:
        """As `_after`, from when the group's own keys are posted."""
        self._after(number, number, terms, seconds)

    def _after(
        self, number: int, posted: int, terms: Sequence[Term], seconds: Sequence[Floats | float]
    ) -> None:
        """What a group does from when keys of one are posted, up to the end of the pass.

        Args:
            number: the group.
            posted: the group whose keys are waited for.
            terms: what it waits for besides.
            seconds: what follows, of each of its sites if that had all heads; [pieces] or a number.
        """
        group, (start, at_zero) = self._groups[number], self._posted[posted]
        if group.on_one_site:
            line = group.line(seconds[0] + group.leaves(self._way))
            self._program.above(self._end, [*start, *terms, self._of(number, line)], at_zero + line.at_zero)
            return
        leaves = self._moves[number], self._all.after[self._way]
        for part, one in zip(self._program.parts[number], seconds, strict=True):
            self._program.above(self._end, [*start, *terms, leaves, (part, float(np.min(one)))], at_zero)

    def _posts(self, number: int) -> tuple[list[Term], float]:
        """When a group's keys may leave."""
        group = self._groups[number]
        if group.on_one_site:
            line = group.posts(self._one)
            return [self._of(number, line)], line.at_zero
        return [(self._begins[number], 1.0), (self._moves[number], self._all.before[self._way])], 0.0

    def _leaves(self, number: int) -> tuple[list[Term], float]:
        """What shows of its all-to-all after attention."""
        group = self._groups[number]
        if group.on_one_site:
            line = group.line(group.leaves(self._way))
            return [self._of(number, line)], line.at_zero
        return [(self._moves[number], self._all.after[self._way])], 0.0

    def _others(self, number: int) -> list[int]:
        return [other for other in range(len(self._groups)) if other != number]

    def _of(self, number: int, line: Line) -> Term:
        return self._program.tokens[number], line.slope

    def _keys(self, by: int, of: int) -> Term:
        """Keys of a group that one on one site needs."""
        return self._program.tokens[of], self._key_s(by, 0, of)

    def _sends(self, number: int, users: Sequence[int]) -> Term:
        """Keys of a group to others that are on one site; each KV head must be sent by the same unit."""
        known = [user for user in users if self._groups[user].on_one_site and self._all.ratio == 1]
        return self._program.tokens[number], sum(self._key_s(user, 0, number) for user in known)

    def _key_s(self, by: int, place: int, of: int) -> float:
        """Seconds a token of a group on one site whose keys another one needs for all heads on a site."""
        group, other = self._groups[by], self._groups[of]
        if not other.on_one_site:
            return 0.0
        (here, units), [(there, owners)] = group.shape[place], other.shape
        if group.on_one_site:
            # Of a KV head that several members share, it is not known who sends it.
            users, senders = group.members, other.members if self._all.ratio == 1 else float(owners)
        else:
            users, senders = float(units), float(owners)
        bandwidth = self._all.bandwidth(here, users, there, senders)
        return self._seen(by, of) * self._all.key_bytes / bandwidth

    def _each_s(self, here: int, units: int) -> float:
        """Seconds a token whose keys so many units of a class get from or send to other sites."""
        return self._all.key_bytes / self._all.lanes(here, units)

    def _seen(self, by: int, of: int) -> float:
        """The part of a group's keys that another one sees: half of those outside it, all inside it."""
        if not self._all.causal:
            return 1.0
        if self._order is None:
            return 0.5
        return 1.0 if self._order.index(by) < self._order.index(of) else 0.5


def _slopes(ratio: float, steps: int) -> tuple[float, float]:
    """How fast `in_steps` grows with the wire's time and with attention's, where they are in a ratio.

    It is convex, and twice as long for twice of both: the plane with these slopes is nowhere above it.
    """

    def at(wire: float, compute: float) -> float:
        return float(in_steps(np.array([wire]), np.array([compute]), steps)[0])

    step = _STEP * max(1.0, ratio)
    by_work = (at(1, ratio + step) - at(1, max(0.0, ratio - step))) / (ratio + step - max(0.0, ratio - step))
    return at(1, ratio) - ratio * by_work, by_work
