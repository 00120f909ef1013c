"""What each unit does, in the order in which the runtime does it.

One layer forward (runtime/attention.py, runtime/exchange.py):

    token work, sums inside the unit, all-to-all in
    post the keys of steps 1 to window; own block
    each step: post the keys of the step `window` later; part by part wait for its own keys, its blocks
    all-to-all out

and backward the same, where each part also posts its gradients when its blocks are done; a step then waits
for those of the step `window` before. Only a part of the own block comes before the steps; the rest comes
after them, and then the gradients still under way are waited for. An all-to-all is posted and waited for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.simulator.work import ExchangePart, LayerWork, Messages

Way = Literal["forward", "logits", "again", "backward"]

#: Points of a lap that each unit passes: the all-to-all in is posted, attention begins, attention is done
#: (with what it sends), the all-to-all out is done.
POINTS = ("ready", "enter", "leave", "finish")


class Lap(NamedTuple):
    """One direction of one layer, or the logits.

    Args:
        way: what is done.
        layer: of which layer; that of the last one for logits.
        whole: whether work on tokens is part of it; recomputed core attention has none.
    """

    way: Way
    layer: int
    whole: bool = True


@dataclass(eq=False, slots=True)
class Batch:
    """One unit's messages of one set: what it posts at once.

    Args:
        unit: whose.
        lap: of which lap.
        phase: ``all_to_all`` or ``exchange``.
        carries: keys, say, for people.
        step: of the exchange, from 1; 0 for an all-to-all.
        part: of the step, from 1; 0 where it has one part only.
        messages: their numbers.
        left: how many have not arrived.
        began: when the first of them left; before that, less than nothing.
        ended: when the last one arrived.
    """

    unit: int
    lap: int
    phase: str
    carries: str
    step: int = 0
    part: int = 0
    messages: list[int] = field(default_factory=list)
    left: int = 0
    began: float = -1.0
    ended: float = -1.0

    @property
    def name(self) -> str:
        """For people: ``keys 2``, or ``keys 1.3`` where a step has parts."""
        part = f".{self.part}" if self.part else ""
        return f"{self.carries} {self.step}{part}" if self.step else self.carries


class Compute(NamedTuple):
    """Work of one kind."""

    kind: str
    name: str
    seconds: float


class Sum(NamedTuple):
    """Sums inside the unit."""

    seconds: float


class Post(NamedTuple):
    """Start a batch, behind those that were posted before."""

    batch: Batch


class Wait(NamedTuple):
    """Wait until a batch has arrived."""

    batch: Batch


class Mark(NamedTuple):
    """Pass a point of a lap."""

    lap: int
    point: int


Instruction = Compute | Sum | Post | Wait | Mark
#: Of each part of a step, the batches of the units.
_Batches = list[dict[int, Batch]]


@dataclass(frozen=True, eq=False)
class Program:
    """What all units do.

    Args:
        units: the instructions of each unit.
        laps: what they do one after the other.
        src: sending unit of each message, [M].
        dst: receiving unit, [M].
        size: bytes on one GPU, [M].
        sets: the set of each: messages that the cost model takes to be under way together, [M].
        set_kinds: what each set carries, for people.
        set_laps: the lap of each set.
        batches: sender's and receiver's batch of each message.
    """

    units: list[list[Instruction]]
    laps: tuple[Lap, ...]
    src: Ints
    dst: Ints
    size: Floats
    sets: Ints
    set_kinds: list[str]
    set_laps: list[int]
    batches: list[tuple[Batch, Batch]]


class _Builder:
    def __init__(self, work: LayerWork, window: int, logits: Floats, sums: Floats) -> None:
        self._work = work
        self._window = window
        self._logits = logits
        self._logits_sums = sums
        self._posted: list[Messages] = []
        self.units: list[list[Instruction]] = [[] for _ in range(len(work.sums))]
        self.batches: list[tuple[Batch, Batch]] = []
        self.set_kinds: list[str] = []
        self.set_laps: list[int] = []

    @property
    def table(self) -> tuple[Ints, Ints, Floats, Ints]:
        """Sender, receiver, bytes and set of all messages."""
        if not self._posted:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64)
        counts = [len(messages.src) for messages in self._posted]
        return (
            np.concatenate([messages.src for messages in self._posted]),
            np.concatenate([messages.dst for messages in self._posted]),
            np.concatenate([messages.size for messages in self._posted]),
            np.repeat(np.arange(len(counts)), counts),
        )

    def add(self, number: int, lap: Lap) -> None:
        if lap.way == "logits":
            for unit, program in enumerate(self.units):
                program += _if_any(Compute("logits", "logits", float(self._logits[unit])))
                program += _if_any(Sum(float(self._logits_sums[unit])))
                program += [Mark(number, point) for point in range(len(POINTS))]
            return
        way = int(lap.way == "backward")
        steps = self._work.steps
        enter = self._halves(number, "all-to-all in", self._work.moves[2 * way])
        keys = [self._step(number, "keys", step, s) for s, step in enumerate(steps, start=1)]
        home = [self._step(number, "gradients", step, s) for s, step in enumerate(steps, start=1) if way]
        leave = self._halves(number, "all-to-all out", self._work.moves[2 * way + 1])
        for unit, program in enumerate(self.units):
            if lap.whole:
                program += _if_any(Compute("token", "token work", float(self._work.token[way][unit])))
                program += _if_any(Sum(float(self._work.sums[unit])))
            program.append(Mark(number, 0))
            for half in enter:
                program += _post(half, unit)
            program += _wait(enter[0], unit)
            program.append(Mark(number, 1))
            program += self._attention(unit, way, (enter, leave), keys, home)
            program.append(Mark(number, 2))
            program += _post(leave[-1], unit)
            for half in leave:
                program += _wait(half, unit)
            program.append(Mark(number, 3))

    def _attention(
        self,
        unit: int,
        way: int,
        moves: tuple[_Batches, _Batches],
        keys: Sequence[_Batches],
        home: Sequence[_Batches],
    ) -> Iterator[Instruction]:
        work, (enter, leave) = self._work, moves
        steps = int(work.unit_steps[unit])
        for posted in itertools.chain(*keys[: self._window]):
            yield from _post(posted, unit)
        own, first = float(work.own[way][unit]), float(work.own[way][unit] * work.share[unit])
        rest = float(work.own_last[unit]) if way else 0.0
        if len(enter) > 1:
            yield from _if_any(Compute("attention", "own block", first))
            if not steps:
                yield from _post(leave[0], unit)
            yield from _wait(enter[1], unit)
            yield from _if_any(Compute("attention", "own block", own - rest - first))
        else:
            yield from _if_any(Compute("attention", "own block", own - rest))
        for step in range(steps):
            if step + self._window < steps:
                for posted in keys[step + self._window]:
                    yield from _post(posted, unit)
            for number, part in enumerate(work.steps[step]):
                yield from _wait(keys[step][number], unit)
                seconds = float(part.blocks[way][unit])
                if len(leave) > 1 and not way and step == steps - 1:
                    before, ends_in = work.before[step]
                    early = seconds * float(before[number, unit])
                    yield from _if_any(Compute("attention", f"blocks {step + 1}", early))
                    if number == ends_in[unit]:
                        yield from _post(leave[0], unit)
                    seconds -= early
                yield from _if_any(Compute("attention", f"blocks {step + 1}", seconds))
                if home:
                    yield from _post(home[step][number], unit)
            if home and self._window <= step < steps - 1:
                for arrived in home[step - self._window]:
                    yield from _wait(arrived, unit)
        if len(leave) > 1 and way and steps:
            yield from _post(leave[0], unit)
        yield from _if_any(Compute("attention", "rest of own block", rest))
        for last in itertools.chain(*home[max(0, steps - 1 - self._window) : steps]):
            yield from _wait(last, unit)

    def _halves(self, lap: int, carries: str, halves: Sequence[Messages]) -> _Batches:
        """The batches of each half of an all-to-all."""
        return [self._batches(lap, "all_to_all", carries, messages) for messages in halves]

    def _step(self, lap: int, carries: str, step: Sequence[ExchangePart], number: int) -> _Batches:
        """The batches of each part of a step, on the way to the users or home."""
        found = []
        for place, part in enumerate(step, start=1):
            messages = part.keys.home if carries == "gradients" else part.keys
            which = place if len(step) > 1 else 0
            found.append(self._batches(lap, "exchange", carries, messages, number, which))
        return found

    def _batches(
        self, lap: int, phase: str, carries: str, messages: Messages, step: int = 0, part: int = 0
    ) -> dict[int, Batch]:
        """One batch for each unit that sends or receives any of the messages."""
        number = len(self.batches)
        found: dict[int, Batch] = {}
        for src, dst in zip(messages.src.tolist(), messages.dst.tolist(), strict=True):
            ends = tuple(
                found.setdefault(unit, Batch(unit, lap, phase, carries, step, part)) for unit in (src, dst)
            )
            for batch in ends:
                batch.messages.append(number)
                batch.left += 1
            self.batches.append((ends[0], ends[1]))
            number += 1
        self._posted.append(messages)
        self.set_kinds.append(carries)
        self.set_laps.append(lap)
        return found


def build_program(
    work: LayerWork, laps: Sequence[Lap], window: int, logits: Floats, logits_sums: Floats
) -> Program:
    """Write down what each unit of a stage does.

    Args:
        work: of one layer.
        laps: what is done, in order.
        window: exchange steps under way ahead of the one in use.
        logits: output matrix and loss of each unit, both directions, s, [U].
        logits_sums: the sum inside each unit that they need, s, [U].
    """
    builder = _Builder(work, window, logits, logits_sums)
    for number, lap in enumerate(laps):
        builder.add(number, lap)
    src, dst, size, sets = builder.table
    return Program(
        builder.units,
        tuple(laps),
        src,
        dst,
        size,
        sets,
        builder.set_kinds,
        builder.set_laps,
        builder.batches,
    )


def _if_any(step: Compute | Sum) -> tuple[Instruction, ...]:
    return (step,) if step.seconds > 0 else ()


def _post(batches: dict[int, Batch], unit: int) -> tuple[Instruction, ...]:
    return (Post(batches[unit]),) if unit in batches else ()


def _wait(batches: dict[int, Batch], unit: int) -> tuple[Instruction, ...]:
    return (Wait(batches[unit]),) if unit in batches else ()
