"""Instructions of each unit: layer after layer its token work, all-reduces, and attention.

An operation of attention's program (`plan.program`) becomes an instruction for each unit concerned: its
messages to post or to wait for, its seconds of computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.lab.simulator.work import LayerWork, Messages
from megatron_hexi.plan import program as attention

Way = Literal["forward", "logits", "again", "backward"]

#: Points of a layer pass: the all-to-all in is posted, attention begins, attention is done (with its sends),
#: the all-to-all out is done.
POINTS = ("ready", "enter", "leave", "finish")


class LayerPass(NamedTuple):
    """A forward or backward pass of one layer, or the logits.

    Args:
        way: the kind of pass.
        layer: number of the layer; of the last layer for logits.
        whole: whether token work is part of it; recomputed core attention has none.
    """

    way: Way
    layer: int
    whole: bool = True


@dataclass(eq=False, slots=True)
class UnitBatch:
    """One unit's messages of one set, which it posts at once.

    Args:
        unit: number of the unit.
        lap: number of the layer pass.
        phase: ``all_to_all`` or ``exchange``.
        carries: contents as text, such as ``keys``.
        step: step of the exchange, from 1; 0 for an all-to-all.
        part: part of the step, from 1; 0 where it has one part only.
        messages: numbers of the messages.
        left: number of messages that have not arrived.
        began: start of the first message; negative before.
        ended: arrival of the last message.
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
        """Name as text: ``keys 2``, or ``keys 1.3`` where a step has parts."""
        part = f".{self.part}" if self.part else ""
        return f"{self.carries} {self.step}{part}" if self.step else self.carries


class Compute(NamedTuple):
    """Work of one kind."""

    kind: str
    name: str
    seconds: float


class Sum(NamedTuple):
    """All-reduces inside the unit."""

    seconds: float


class PostBatch(NamedTuple):
    """Start a batch, behind those that were posted before."""

    batch: UnitBatch


class WaitForBatch(NamedTuple):
    """Wait until a batch has arrived."""

    batch: UnitBatch


class Mark(NamedTuple):
    """Pass a point of a layer pass."""

    lap: int
    point: int


Instruction = Compute | Sum | PostBatch | WaitForBatch | Mark
#: Batches of attention, each as the units' own batches.
_Sets = dict[attention.Batch, dict[int, UnitBatch]]


@dataclass(frozen=True, eq=False)
class StageProgram:
    """The instructions of all units of a stage.

    Args:
        units: the instructions of each unit.
        laps: the layer passes, in order.
        src: sending unit of each message, [M].
        dst: receiving unit, [M].
        size: bytes on one GPU, [M].
        sets: set of each message; the cost model assumes that a set is under way together, [M].
        set_kinds: contents of each set, as text.
        set_laps: layer pass of each set.
        batches: the sender's and the receiver's batch of each message.
    """

    units: list[list[Instruction]]
    laps: tuple[LayerPass, ...]
    src: Ints
    dst: Ints
    size: Floats
    sets: Ints
    set_kinds: list[str]
    set_laps: list[int]
    batches: list[tuple[UnitBatch, UnitBatch]]


class _Builder:
    def __init__(self, work: LayerWork, window: int, logits: Floats, sums: Floats) -> None:
        self._work = work
        self._window = window
        self._logits = logits
        self._logits_sums = sums
        self.sent: list[Messages] = []
        self.units: list[list[Instruction]] = [[] for _ in range(len(work.sums))]
        self.batches: list[tuple[UnitBatch, UnitBatch]] = []
        self.set_kinds: list[str] = []
        self.set_laps: list[int] = []

    def add(self, number: int, lap: LayerPass) -> None:
        if lap.way == "logits":
            for unit, program in enumerate(self.units):
                program += _if_any(Compute("logits", "logits", float(self._logits[unit])))
                program += _if_any(Sum(float(self._logits_sums[unit])))
                program += [Mark(number, point) for point in range(len(POINTS))]
            return
        work, way = self._work, int(lap.way == "backward")
        sets = {batch: self._batches(number, batch, sent) for batch, sent in work.sent[way].items()}
        for unit, program in enumerate(self.units):
            if lap.whole:
                program += _if_any(Compute("token", "token work", float(work.token[way][unit])))
                program += _if_any(Sum(float(work.sums[unit])))
            program.append(Mark(number, 0))
            program += self._attention(unit, number, way, sets)
            program.append(Mark(number, 3))

    def _attention(self, unit: int, lap: int, way: int, sets: _Sets) -> Iterator[Instruction]:
        work = self._work
        parts = tuple(map(len, work.blocks[: int(work.unit_steps[unit])]))
        first_in, last_out = attention.Batch("in", 0), attention.Batch("out", work.halves - 1)
        for operation in attention.attention_program(
            way > 0, parts, self._window, work.halves, int(work.turn[unit])
        ):
            match operation:
                case attention.Post(batch):
                    if batch == last_out:
                        yield Mark(lap, 2)
                    if unit in sets[batch]:
                        yield PostBatch(sets[batch][unit])
                case attention.Wait(batch):
                    if unit in sets[batch]:
                        yield WaitForBatch(sets[batch][unit])
                    if batch == first_in:
                        yield Mark(lap, 1)
                case attention.OwnBlock(first, stop):
                    share = float(work.share[unit])
                    shares = share * (first == 0) + (1 - share) * (stop == 2)
                    name = "rest of own block" if first and way else "own block"
                    yield from _if_any(Compute("attention", name, float(work.own[way][unit]) * shares))
                case attention.FarBlocks(step, part, piece):
                    early = float(work.early[unit])
                    shares = 1.0 if piece is None else (early, 1 - early)[piece]
                    seconds = float(work.blocks[step][part][way][unit]) * shares
                    yield from _if_any(Compute("attention", f"blocks {step + 1}", seconds))

    def _batches(self, lap: int, shared: attention.Batch, messages: Messages) -> dict[int, UnitBatch]:
        """Return a batch for each unit that sends or receives any of the messages."""
        phase, carries, step, part = "all_to_all", f"all-to-all {shared.cargo}", 0, 0
        if shared.cargo in ("keys", "gradients"):
            phase, carries, step = "exchange", shared.cargo, shared.step + 1
            part = shared.part + 1 if len(self._work.blocks[shared.step]) > 1 else 0
        number = len(self.batches)
        batches: dict[int, UnitBatch] = {}
        for src, dst in zip(messages.src.tolist(), messages.dst.tolist(), strict=True):
            ends = tuple(
                batches.setdefault(unit, UnitBatch(unit, lap, phase, carries, step, part))
                for unit in (src, dst)
            )
            for batch in ends:
                batch.messages.append(number)
                batch.left += 1
            self.batches.append((ends[0], ends[1]))
            number += 1
        self.sent.append(messages)
        self.set_kinds.append(carries)
        self.set_laps.append(lap)
        return batches


def build_program(
    work: LayerWork, laps: Sequence[LayerPass], window: int, logits: Floats, logits_sums: Floats
) -> StageProgram:
    """Return the instructions of each unit of a stage.

    Args:
        work: work of one layer.
        laps: layer passes in order, at least one.
        window: exchange steps under way ahead of the step in use.
        logits: seconds of output matrix and loss of each unit, both directions, [U].
        logits_sums: seconds of their all-reduce inside each unit, [U].
    """
    builder = _Builder(work, window, logits, logits_sums)
    for number, lap in enumerate(laps):
        builder.add(number, lap)
    counts = [len(messages.src) for messages in builder.sent]
    return StageProgram(
        units=builder.units,
        laps=tuple(laps),
        src=np.concatenate([messages.src for messages in builder.sent]),
        dst=np.concatenate([messages.dst for messages in builder.sent]),
        size=np.concatenate([messages.size for messages in builder.sent]),
        sets=np.repeat(np.arange(len(counts)), counts),
        set_kinds=builder.set_kinds,
        set_laps=builder.set_laps,
        batches=builder.batches,
    )


def _if_any(step: Compute | Sum) -> tuple[Instruction, ...]:
    return (step,) if step.seconds > 0 else ()
