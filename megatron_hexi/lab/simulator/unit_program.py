"""Instructions of each unit: layer after layer its token work, all-reduces, routed experts, and attention.

An operation of attention's program (`plan.program`) becomes an instruction for each unit concerned: its
messages to post or to wait for, its seconds of computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.lab.simulator.routes import Routes
from megatron_hexi.lab.simulator.work import ExpertTraffic, LayerWork, Messages
from megatron_hexi.plan import program as attention
from megatron_hexi.plan.recompute import Again

Way = Literal["forward", "logits", "again", "backward"]

#: Points of a layer pass: tokens leave for experts, the all-to-all in is posted, attention begins, attention
#: is done (with its sends), the all-to-all out is done.
POINTS = ("route", "ready", "enter", "leave", "finish")
ROUTE, READY, ENTER, LEAVE, FINISH = range(len(POINTS))
#: Contents of the all-to-alls of experts.
TO_EXPERTS, FROM_EXPERTS = "tokens to experts", "tokens from experts"


class LayerPass(NamedTuple):
    """A forward or backward pass of one layer, or the logits.

    Args:
        layer: number of the layer; of the last layer for logits.
        work: the layer's work, all of it or some modules.
    """

    way: Way
    layer: int
    work: Again = Again(is_whole=True)


@dataclass(eq=False, slots=True)
class UnitBatch:
    """One unit's messages of one set, which it posts at once.

    Args:
        phase: ``all_to_all``, ``exchange`` or ``expert_all_to_all``.
        carries: contents as text, such as ``keys``.
        step: step of the exchange, from 1; 0 for an all-to-all.
        part: part of the step, from 1; 0 where it has one part only.
        began: start of the first message; negative before.
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
    """Note the time at which the unit passes a point of a layer pass."""

    lap: int
    point: int


Instruction = Compute | Sum | PostBatch | WaitForBatch | Mark
#: One set of messages, as the units' own batches.
_Batches = dict[int, UnitBatch]
#: Batches of attention.
_Sets = dict[attention.Batch, _Batches]


@dataclass(frozen=True, eq=False)
class StageProgram:
    """The instructions of all units of a stage.

    Args:
        src: sending unit of each message, [M].
        dst: receiving unit, [M].
        size: bytes on one GPU, [M].
        route: number of each message's route, [M].
        pass_numbers: number of the layer pass that each message belongs to, [M].
    """

    units: list[list[Instruction]]
    laps: tuple[LayerPass, ...]
    src: Ints
    dst: Ints
    size: Floats
    route: Ints
    pass_numbers: Ints
    batches: list[tuple[UnitBatch, UnitBatch]]


class SectionWork(NamedTuple):
    """The units of a section, and their work in each layer of one kind.

    Args:
        window: exchange steps in flight ahead of the step in use.
        logits: seconds of output matrix and loss of each unit, both directions, [U].
        logits_sums: seconds of their all-reduce inside each unit, [U].
        gpus: first GPU of each unit, [U].
        width: tensor-parallel size.
    """

    layer: LayerWork
    window: int
    logits: Floats
    logits_sums: Floats
    gpus: Ints
    width: int


class _Builder:
    def __init__(
        self, sections: Sequence[SectionWork], traffic: Sequence[ExpertTraffic], routes: Routes
    ) -> None:
        self._sections = sections
        self._routes = routes
        sizes = [len(section.gpus) for section in sections]
        self._firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._traffic = traffic
        self.sent: list[Messages] = []
        self.routes: list[Ints] = []
        self.units: list[list[Instruction]] = [[] for _ in range(sum(sizes))]
        self.batches: list[tuple[UnitBatch, UnitBatch]] = []
        self.pass_numbers: list[int] = []

    def add(self, number: int, lap: LayerPass) -> None:
        """Add a layer pass, or the logits."""
        there: list[_Batches] = []
        back: list[_Batches] = []
        if "moe" in lap.work and lap.way != "logits":
            there = [self._expert_batches(number, TO_EXPERTS, sent) for sent in self._traffic]
            back = [
                self._expert_batches(number, FROM_EXPERTS, sent.reversed) for sent in reversed(self._traffic)
            ]
        for first, section in zip(self._firsts, self._sections, strict=True):
            if lap.way != "logits":
                self._add_layer(number, lap, section, first, there, back)
                continue
            for unit, program in enumerate(self.units[first : first + len(section.gpus)]):
                program += _if_any(Compute("logits", "logits", float(section.logits[unit])))
                program += _if_any(Sum(float(section.logits_sums[unit])))
                program += [Mark(number, point) for point in range(len(POINTS))]

    def _add_layer(
        self,
        number: int,
        lap: LayerPass,
        section: SectionWork,
        first: int,
        to_experts: Sequence[_Batches],
        from_experts: Sequence[_Batches],
    ) -> None:
        work, way = section.layer, int(lap.way == "backward")
        mixes = lap.work.is_whole or ("core_attn" in lap.work and work.attends)
        token, sums, experts = work.token[way], work.sums, work.experts[way]
        if not lap.work.is_whole:
            token, sums, experts = work.again.token, work.again.tensor_parallel, work.again.experts
        sets = {
            batch: self._attention_batches(number, batch, sent, section, first)
            for batch, sent in (work.sent[way].items() if mixes else ())
        }
        for unit, program in enumerate(self.units[first : first + len(section.gpus)]):
            program += _if_any(Compute("token", "token work", float(token[unit])))
            program += _if_any(Sum(float(sums[unit])))
            program.append(Mark(number, ROUTE))
            for batches in to_experts:
                program += _post_and_wait(batches.get(first + unit))
            program += _if_any(Compute("experts", "experts", float(experts[unit])))
            for batches in from_experts:
                program += _post_and_wait(batches.get(first + unit))
            program.append(Mark(number, READY))
            if mixes:
                program += self._attention(section, first, unit, number, way, sets)
            else:
                program += [Mark(number, ENTER), Mark(number, LEAVE)]
            program.append(Mark(number, FINISH))

    def _attention(
        self, section: SectionWork, first_unit: int, unit: int, lap: int, way: int, sets: _Sets
    ) -> Iterator[Instruction]:
        work = section.layer
        parts = tuple(map(len, work.blocks[: int(work.unit_steps[unit])]))
        first_in, last_out = attention.Batch("in", 0), attention.Batch("out", work.halves - 1)
        for operation in attention.attention_program(
            way > 0, parts, section.window, work.halves, int(work.turn[unit])
        ):
            match operation:
                case attention.Post(batch):
                    if batch == last_out:
                        yield Mark(lap, LEAVE)
                    if first_unit + unit in sets[batch]:
                        yield PostBatch(sets[batch][first_unit + unit])
                case attention.Wait(batch):
                    if first_unit + unit in sets[batch]:
                        yield WaitForBatch(sets[batch][first_unit + unit])
                    if batch == first_in:
                        yield Mark(lap, ENTER)
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

    def _expert_batches(self, lap: int, carries: str, sent: ExpertTraffic) -> _Batches:
        route = self._routes.numbers(sent.src_gpu, sent.dst_gpu)
        return self._batches(UnitBatch(-1, lap, "expert_all_to_all", carries), sent.messages, route)

    def _attention_batches(
        self, lap: int, shared: attention.Batch, sent: Messages, section: SectionWork, first: int
    ) -> _Batches:
        alike = UnitBatch(-1, lap, "all_to_all", f"all-to-all {shared.cargo}")
        if shared.cargo in ("keys", "gradients"):
            part = shared.part + 1 if len(section.layer.blocks[shared.step]) > 1 else 0
            alike = UnitBatch(-1, lap, "exchange", shared.cargo, shared.step + 1, part)
        route = self._routes.numbers(section.gpus[sent.src], section.gpus[sent.dst], section.width)
        return self._batches(alike, Messages(first + sent.src, first + sent.dst, sent.size), route)

    def _batches(self, alike: UnitBatch, messages: Messages, route: Ints) -> _Batches:
        """Return a copy of `alike` for each unit that sends or receives any of the messages."""
        number = len(self.batches)
        batches: _Batches = {}
        for src, dst in zip(messages.src.tolist(), messages.dst.tolist(), strict=True):
            ends = tuple(
                batches.setdefault(unit, replace(alike, unit=unit, messages=[])) for unit in (src, dst)
            )
            for batch in ends:
                batch.messages.append(number)
                batch.left += 1
            self.batches.append((ends[0], ends[1]))
            number += 1
        self.sent.append(messages)
        self.routes.append(route)
        self.pass_numbers += [alike.lap] * len(messages.src)
        return batches


def build_program(
    sections: Sequence[SectionWork],
    laps: Sequence[LayerPass],
    routes: Routes,
    traffic: Sequence[ExpertTraffic] = (),
) -> StageProgram:
    """Return the instructions of each unit of a stage, section by section.

    Args:
        routes: routes of the cluster; those that messages take are added.
        traffic: messages to routed experts, with units numbered over all sections, one after the other.
    """
    builder = _Builder(sections, traffic, routes)
    for number, lap in enumerate(laps):
        builder.add(number, lap)
    return StageProgram(
        units=builder.units,
        laps=tuple(laps),
        src=np.concatenate([messages.src for messages in builder.sent]),
        dst=np.concatenate([messages.dst for messages in builder.sent]),
        size=np.concatenate([messages.size for messages in builder.sent]),
        route=np.concatenate(builder.routes),
        pass_numbers=np.array(builder.pass_numbers, dtype=np.int64),
        batches=builder.batches,
    )


def _if_any(step: Compute | Sum) -> tuple[Instruction, ...]:
    return (step,) if step.seconds > 0 else ()


def _post_and_wait(batch: UnitBatch | None) -> tuple[Instruction, ...]:
    return () if batch is None else (PostBatch(batch), WaitForBatch(batch))
