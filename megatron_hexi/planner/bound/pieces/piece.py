"""How many tokens a unit can hold at most, by the piece of a group that it belongs to: see bound.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.bound.pieces.filling import Filling
from megatron_hexi.planner.bound.pieces.gradients import Limits
from megatron_hexi.planner.bound.pieces.load import Load
from megatron_hexi.planner.fleet.room import Room

#: Where memory is full, what is held follows from what is attended to, and that from what is held.
_REFINED = 2
_NEARLY = 1e-9


class Pieces:
    """All pieces of groups that units of one kind on one site can be.

    Args:
        job: the job.
        loads: of each pipeline stage.
        rooms: likewise, for each number of micro-batches, from one, that a pipeline can keep at a time.
    """

    def __init__(self, job: Job, loads: Sequence[Load], rooms: Sequence[Sequence[Room]]) -> None:
        self.loads, self.rooms, first = loads, rooms, loads[0]
        #: Of each piece: its part of its group's heads, a unit.
        self.share = first.share
        self._heads, self.size, self._seq_length = first.heads, int(first.units.max()), job.seq_length
        self._crosses, self._all_heads = first.crosses, job.workload().local_heads
        self._whole = job.seq_length * self.share
        self._most_held = job.seq_length / first.units
        self._filling = Filling()
        #: By what was asked: of plans that are alike, the same is.
        self._found: dict[tuple[Limits, int, float, bool], tuple[Floats, Floats]] = {}

    @property
    def held_share(self) -> float:
        """Of the memory that a token takes, the part for holding it."""
        return min(room.held_share for rooms in self.rooms for room in rooms)

    def most(self, limits: Limits, groups: int, depth: float, several: bool = False) -> tuple[Floats, Floats]:
        """Tokens that a unit of each piece holds at most, and tokens whose attention it does at most.

        The two are the same, but where memory has no room for so many tokens, and attention of other sites'
        tokens could be done instead; or where a piece with few heads has attended to all tokens, and could
        hold other sites'. Attention of a token means of all heads.

        Args:
            limits: of all passes of a layer.
            groups: of a domain, at least.
            depth: where the group's middle is among the nested ones, from 0, outermost, to 1, at most.
            several: whether there are several replicas, so that a site may have any number of units of one.
        """
        asked = limits, groups, depth, several
        if asked not in self._found:
            self._found[asked] = self._find_most(*asked)
        return self._found[asked]

    def _find_most(self, limits: Limits, groups: int, depth: float, several: bool) -> tuple[Floats, Floats]:
        if limits.whole <= 0 or (limits.and_wire is not None and limits.and_wire <= 0):
            nothing = np.zeros(len(self.share))
            return nothing, nothing
        free = self._filling.last(
            "free", self._whole, lambda most: self._part(limits, most, most, groups, depth)
        )
        tokens = np.zeros(len(free))
        for least, most in _beside(self.size) if several else [(self.size, self.size)]:
            # A replica has a sequence: with so many units of it on a site, each holds its part at most.
            part = self._seq_length / least if several else np.inf
            done = np.minimum(self._exchanging(free, limits, groups, depth, most), part)
            tokens = np.maximum(tokens, done)
            if (tokens == free).all():
                break
        if not self._crosses:
            held = np.minimum(tokens, min(room.together(groups) for room in self._kept(limits)))
            return held, held
        held = tokens
        # All tokens are attended to already by so few heads: what time is left is for holding other sites'.
        spare = (tokens >= self._whole) & (self._heads < self._all_heads)
        if spare.any():
            more = self._filling.last(
                "held", self._most_held, lambda most: self._part(limits, most, self._whole, groups, depth)
            )
            held = np.where(spare, np.maximum(more, tokens), tokens)
        short = held > self._room_beside(limits, tokens, groups)
        if not short.any():
            return held, tokens
        beside, attended = self._instead(limits, groups, depth)
        return np.where(short, beside, held), np.where(short, attended, tokens)

    def _instead(self, limits: Limits, groups: int, depth: float) -> tuple[Floats, Floats]:
        """Where memory is full: fewer tokens held, and as many attended to as there is time for then.

        What other sites' tokens bring has to come over the site's links. Memory leaves less room to hold
        tokens the more are attended to; those that it leaves room for at any rate take their time.
        """
        held = np.zeros(len(self.share))
        room = min(room.attended_alone(groups) for room in self._kept(limits))
        for _ in range(_REFINED):
            attended = self._filling.last(
                "attended",
                np.minimum(self._whole, room),
                lambda most, held=held: self._part(limits, held, most, groups, depth),  # type: ignore[misc]
            )
            held = np.maximum(0.0, self._room_beside(limits, attended, groups))
        return held, attended

    def holding(
        self, limits: Limits, groups: int, held: Floats, attended: Floats, price: float
    ) -> tuple[Floats, Floats]:
        """The same for whom holding tokens is worth more than attending to them: more held, fewer attended.

        Args:
            limits: as of `most`.
            groups: likewise.
            held: what `most` found.
            attended: likewise.
            price: of holding a token, as a part of its whole price, up to which this does not pay.
        """
        most = min(room.held_alone() for room in self._kept(limits))
        full = held >= self._room_beside(limits, attended, groups) * (1 - _NEARLY)
        time_left = self._filling.last(
            "alone",
            self._most_held,
            lambda tokens: limits.through([load.holding_part(limits, tokens) for load in self.loads]),
        )
        more, fewer = hold_more(held, attended, price, np.maximum(held, np.minimum(time_left, most)))
        # Full memory has room for so many if they are not attended to.
        return np.where(full, most, more), np.where(full, 0.0, fewer)

    def _exchanging(self, free: Floats, limits: Limits, groups: int, depth: float, units: int) -> Floats:
        """Tokens at most with the exchange, where a site has so many units of a replica.

        The more tokens a piece and its site hold, the fewer keys are missing: what is missing at the most
        tokens that are possible without any exchange is missing at any smaller number.
        """
        wires = [load.wire(free, units * float(free.max()), depth) for load in self.loads]
        if limits.and_wire is None and all(
            (wire <= forward).all() and (2 * wire <= backward).all()
            for load, wire in zip(self.loads, wires, strict=True)
            for forward, backward in [load.attention(free / self.share, groups, depth)]
        ):
            return free
        return self._filling.last(
            "exchanging", free, lambda most: self._part(limits, most, most, groups, depth, wires)
        )

    def _part(
        self,
        limits: Limits,
        tokens: Floats,
        attended: Floats,
        groups: int,
        depth: float,
        wires: Sequence[Floats] | None = None,
    ) -> Floats:
        """The part of the limits that a layer of each stage takes together."""
        each: Sequence[Floats | float] = wires or [0.0] * len(self.loads)
        return limits.through(
            [
                load.part(limits, tokens, attended, groups, depth, wire)
                for load, wire in zip(self.loads, each, strict=True)
            ]
        )

    def _kept(self, limits: Limits) -> Sequence[Room]:
        """Memory of each stage beside the micro-batches of a replica that a pipeline keeps."""
        return self.rooms[min(limits.count, len(self.rooms)) - 1]

    def _room_beside(self, limits: Limits, attended: Floats, groups: int) -> Floats:
        """Tokens that every stage's memory has room for beside those attended to."""
        room: Floats = np.minimum.reduce([room.held(attended, groups) for room in self._kept(limits)])
        return room


def hold_more(held: Floats, attended: Floats, price: float, most: Floats | float) -> tuple[Floats, Floats]:
    """Tokens held in place of tokens attended to, at the rate at which their prices make up for each other.

    Args:
        held: tokens.
        attended: tokens.
        price: of holding one, as a part of the price of both.
        most: that can be held.
    """
    worth = price * held + (1 - price) * attended
    more = np.minimum(worth / price, most)
    return more, np.maximum(0.0, worth - price * more) / (1 - price)


def _beside(size: int) -> list[tuple[int, int]]:
    """Units of a replica on a site, as intervals: one by one up to four, then doubling."""
    spans, first = [], 1
    while first <= size:
        last = min(size, first + max(0, first // 2 - 1))
        spans.append((first, last))
        first = last + 1
    return spans
