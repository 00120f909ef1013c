"""Whether groups may hold the sequence one inside the other: part of the lower bound (packing.py).

A group merges all of its queries with each group outside of it, and half of them with each inside; it sees
half the keys of those outside, and all of those inside. So what it holds at most follows from how many are
outside of it and how many tokens these hold; and the most that the k outermost groups hold, of units that are
left, from the most of the k - 1 outermost ones: a dynamic program. What is left is priced by the linear
program (program.py): groups that could not hold the rest by these prices are not followed.

Each pass ends with its slowest group. Inner groups have more to do forward, outer ones backward. So plans are
told apart by which part of the time a forward pass takes, in intervals: no group takes longer forward than at
the upper end, none longer backward than at the lower.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.planner.bound.packings.nested_worth import DEPTHS, MET, Caps, Limits, NestedWorth, Place
from megatron_hexi.planner.bound.packings.program import Program, kinds_of
from megatron_hexi.planner.bound.packings.worth import Way, Worth
from megatron_hexi.planner.bound.pieces.demand import Span

#: Up to so many numbers of units that are left are looked at.
_MOST_STATES = 20_000
#: A forward pass's part of the time is told apart up to this.
_NARROW = 4e-4
#: Numbers of groups that have times of shapes in common: the fewest of each.
_TOGETHER = (2, 3, 4, 6, 9)
#: Groups that are looked at at once; and so many that it costs as much as working out a shape on one site.
_AT_ONCE, _AS_MUCH = 50_000, 10_000
#: Where much is left, groups are found soon: so many states, and kinds of groups for each, are tried first.
_BEAM, _BROAD = 40, 60
#: What rounding may take away.
_ROUNDING = 1e-6

#: Parts of the time, at least and at most.
_Parts = tuple[float, float]
#: Groups, the outermost first.
_Chain = list[Place]
#: Of each number of units that are left: how many there were before, and the kind and the depth of the group
#: that took them.
_Came = Ints


class Nested:
    """Groups of one replica.

    Args:
        job: the job.
        worth: shapes of groups and what they hold wherever they are.
        units: of each class.
        left: what it may cost (nested_worth.py).
    """

    def __init__(self, job: Job, worth: Worth, units: Sequence[int], left: int) -> None:
        self._worth, self._units, self._length = worth, units, float(job.seq_length)
        self._forward_passes = 2 if job.recompute == "full" else 1
        #: Of each other group inside, how much it is met.
        self._shown = 0.5 if job.workload().causal else 1.0
        self._used, self._kinds = kinds_of(worth.used)
        self.left = float(left)
        self._times: dict[Way, NestedWorth] = {}
        # Of the numbers of units of each class that are left: all of them, in one row.
        sizes = [count + 1 for count in units]
        steps = np.array([prod(sizes[place + 1 :]) for place in range(len(sizes))])
        self._states = prod(sizes)
        self._takes = (self._used @ steps).astype(np.int64)
        self._left = np.stack(np.unravel_index(np.arange(self._states), sizes), axis=1).astype(float)
        #: The forward pass's part of the time with which groups sufficed last, by their number.
        self._last: dict[tuple[Span, bool | None], _Parts] = {}
        self._programs: dict[Span, Program] = {}

    @staticmethod
    def is_small(units: Sequence[int]) -> bool:
        """Whether there are few enough numbers of units to look at."""
        return prod(count + 1 for count in units) <= _MOST_STATES

    @staticmethod
    def cut(span: Span) -> Span | None:
        """The first of these numbers of groups, where they must be looked at apart."""
        first = next((few for few in _TOGETHER if span[0] < few <= span[1]), None)
        return None if first is None else (span[0], first - 1)

    def suffices(self, iteration_s: float, span: Span, way: Way) -> bool:
        """Whether groups may hold the sequence in a time.

        Args:
            iteration_s: the time.
            span: how many there are, which need not be cut.
            way: how they are used, at least.
        """
        open_: list[_Parts] = [(0.0, 1 / self._forward_passes)]
        if (span, way[2]) in self._last:
            open_.append(self._last.pop((span, way[2])))
        most = self._worth.of_all(iteration_s, span, [way])[0][0] / way[0]
        fewest = max(few for few in _TOGETHER if few <= span[0])
        largest = min((few - 1 for few in _TOGETHER if few > fewest), default=sum(self._units))
        closer = way[0], (fewest, largest), way[2]
        if closer not in self._times:
            self._times[closer] = NestedWorth(self._worth, closer, self._kinds)
        layer_s = self._worth.layer_s(iteration_s, way[0])
        while open_:
            low, high = open_.pop()
            limits = Limits(layer_s, high * layer_s, (1 - self._forward_passes * low) * layer_s)
            if self._may(most, limits, span, self._times[closer]):
                if high - low <= _NARROW:
                    self._last[span, way[2]] = low, high
                    return True
                middle = (low + high) / 2
                open_ += [(low, middle), (middle, high)]
        return False

    def _may(self, most: Floats, limits: Limits, span: Span, times: NestedWorth) -> bool:
        """The same where passes take no longer than that, and groups hold no more, [shapes]."""
        few, many = span
        met = self._shown * (few - 1) + (1 - self._shown) * np.arange(many)
        places, outside = np.unique(np.searchsorted(MET, met, side="right") - 1, return_inverse=True)
        while True:
            caps = times.caps(most, limits, places.tolist())
            chain = self._chain(caps, span, outside, _BEAM) or self._chain(caps, span, outside)
            if chain is None:
                return False
            if self.left <= 0:
                return True
            done = times.work_out([(shape, int(places[place])) for shape, place in chain], self.left)
            if not done:
                return True
            self.left -= done

    def _chain(self, caps: Caps, span: Span, outside: Ints, beam: int | None = None) -> _Chain | None:
        """Groups that hold the sequence; ``None``: there are none.

        Args:
            caps: what they hold.
            span: how many there are.
            outside: the place among `caps` of one with so many groups outside.
            beam: states that are followed at most, those that may hold most; ``None``: all.
        """
        needed, (few, many) = self._length * (1 - _ROUNDING), span
        most = caps.tokens.max(axis=(0, 1))
        if span not in self._programs:
            self._programs[span] = Program(self._used, self._units, span)
        program = self._programs[span]
        if program.solve(most)[0] < needed:
            return None
        of_unit, of_group = program.prices()
        rest = self._left @ of_unit
        loses = np.where(most > 0, self._used @ of_unit + of_group - most, inf)
        held = np.full(self._states, -inf)
        held[-1] = 0.0
        before = list[_Came]()
        for number, place in enumerate(outside.tolist()):
            # Groups that may follow this one, and what they cost.
            following = of_group * (many - number - 1 if of_group > 0 else max(0, few - number - 1))
            still = needed - rest - following
            held, came = self._add(held, caps.tokens[place], loses, still, of_group, beam)
            before.append(came)
            if number + 1 >= few and held.max() >= needed:
                return self._back(int(held.argmax()), before, caps, outside.tolist())
        return None

    def _add(
        self,
        held: Floats,
        caps: Floats,
        loses: Floats,
        still: Floats,
        of_group: float,
        beam: int | None,
    ) -> tuple[Floats, _Came]:
        """Tokens that groups hold at most, with one more inside them, by the units that are left; and how.

        Args:
            held: without it, [states].
            caps: what it holds at most, [depths, kinds].
            loses: what it costs more than that.
            still: what groups must hold by then, [states].
            of_group: what a group costs.
            beam: states that are followed at most; ``None``: all.
        """
        after = np.full(self._states, -inf)
        came = np.full((3, self._states), -1)
        order = np.argsort(loses, kind="stable")
        states = np.flatnonzero(held > -inf)
        # Kinds of groups that each state can afford: those that lose least.
        if beam is not None:
            states = states[np.argsort(still[states] - held[states], kind="stable")[:beam]]
        many = np.searchsorted(loses[order], held[states] + of_group - still[states], side="right")
        many = many if beam is None else np.minimum(many, _BROAD)
        for chunk in np.array_split(np.arange(len(states)), 1 + int(many.sum()) // _AT_ONCE):
            state = np.repeat(states[chunk], many[chunk])
            kind = order[np.arange(len(state)) - np.repeat(np.cumsum(many[chunk]) - many[chunk], many[chunk])]
            self.left -= len(state) / _AS_MUCH
            fits = (self._used[kind] <= self._left[state]).all(axis=1)
            state, kind = state[fits], kind[fits]
            hold, depth = self._hold(caps[:, kind], held[state])
            together, new = held[state] + hold, state - self._takes[kind]
            better = (together >= still[new]) & (together > after[new])
            # Ascending: of groups that leave the same units, the last one counts.
            best = np.flatnonzero(better)[np.argsort(together[better], kind="stable")]
            after[new[best]] = together[best]
            came[:, new[best]] = state[best], kind[best], depth[best]
        return after, came

    def _hold(self, caps: Floats, outer: Floats) -> tuple[Floats, Ints]:
        """Tokens of groups at most, and the numbers of their depths.

        A group's middle is as deep as the tokens outside of it and half of its own are: in each interval of
        depths it holds so many that its middle lies there, and no more than it can hold there.

        Args:
            caps: their tokens at most, [depths, groups].
            outer: tokens of the groups outside of them at most, [groups].
        """
        ends = 2 * (np.arange(1, DEPTHS + 1)[:, None] / DEPTHS * self._length - outer)
        ends[-1] = inf
        begins = np.concatenate([np.zeros((1, len(outer))), ends[:-1]])
        hold = np.where(caps > begins, np.minimum(caps, ends), 0.0)
        best = hold.argmax(axis=0)
        return hold[best, np.arange(len(best))], best

    @staticmethod
    def _back(state: int, before: Sequence[_Came], caps: Caps, outside: Sequence[int]) -> _Chain:
        """How groups came to leave so many units."""
        chain: _Chain = []
        for came, place in zip(reversed(before), outside[len(before) - 1 :: -1], strict=True):
            state, kind, depth = came[:, state].tolist()
            chain.append((int(caps.shapes[place, depth, kind]), place))
        return chain[::-1]
