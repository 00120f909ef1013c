"""What the units of a stage compute and send in one layer: the cost model's own numbers, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.collectives import all_to_all_bytes
from megatron_hexi.cost.compute import Times
from megatron_hexi.cost.exchange import exchange_chunks
from megatron_hexi.cost.job import Job
from megatron_hexi.cost.layer import Layer, Stage, chunk_times, message_bytes, unit_times
from megatron_hexi.cost.plan_arrays import PlanArrays


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages from unit to unit: who sends, who receives, bytes on one GPU."""

    src: Ints
    dst: Ints
    size: Floats

    @property
    def home(self) -> Messages:
        """As many bytes the other way."""
        return Messages(self.dst, self.src, self.size)


@dataclass(frozen=True, eq=False)
class ExchangePart:
    """Some heads of a step of the exchange: seconds of each unit's blocks, and the keys that travel."""

    blocks: Times
    keys: Messages


@dataclass(frozen=True, eq=False)
class LayerWork:
    """One layer, for all units of a stage.

    Args:
        token: work on tokens, s.
        sums: sums inside each unit, s, in each direction.
        own: the own group's block, s.
        share: of each unit's heads, the half that comes first.
        steps: of the exchange, each in its parts.
        unit_steps: how many of them each unit's replica has.
        turn: the part of the last one in which the half that comes first ends.
        early: how much of this part's work is that half's.
        moves: the all-to-alls: forward in and out, backward in and out, each of one or two halves.
    """

    token: Times
    sums: Floats
    own: Times
    share: Floats
    steps: tuple[tuple[ExchangePart, ...], ...]
    unit_steps: Ints
    turn: Ints
    early: Floats
    moves: tuple[tuple[Messages, ...], ...]

    @property
    def parts(self) -> list[ExchangePart]:
        """Of all steps."""
        return [part for step in self.steps for part in step]

    def messages(self, again: bool) -> int:
        """How many messages there are, forward and backward; `again`: part of it is recomputed."""
        moves = sum(len(half.src) for half in self.moves[0])
        keys = sum(len(part.keys.src) for part in self.parts)
        return (2 + 2 + 2 * again) * moves + (1 + 2 + again) * keys


def layer_work(plan: PlanArrays, job: Job, stage: Stage, layer: Layer) -> LayerWork:
    """Take a layer apart.

    Args:
        plan: the plan.
        job: the job.
        stage: what the units run on.
        layer: what the cost model makes of it; sums inside units are taken from there.
    """
    holder, taker = plan.all_to_all_pairs
    moves: dict[tuple[str, bool], list[Messages]] = {}
    for move in all_to_all_bytes(plan, job):
        ends = (holder, taker) if move.inward else (taker, holder)
        moves.setdefault((move.way, move.inward), []).append(Messages(*ends, move.size))
    token, own = unit_times(plan, job, stage)
    unit_steps = plan.groups_beside[plan.group] - 1
    first = plan.heads_first
    units = np.arange(len(first))
    # Only the first step may have several parts.
    stops = np.cumsum(plan.part_heads, axis=0)
    turn = np.where(unit_steps == 1, np.argmax(stops >= first, axis=0), 0)
    held = np.where(unit_steps == 1, plan.part_heads[turn, units], plan.heads)
    before = np.where(unit_steps == 1, stops[turn, units] - held, 0)
    return LayerWork(
        token=token,
        sums=layer.forward.tensor_parallel,
        own=own,
        share=first / np.maximum(plan.heads, 1),
        steps=tuple(_steps(plan, job, stage)),
        unit_steps=unit_steps,
        turn=turn,
        early=(first - before) / np.maximum(held, 1),
        moves=tuple(tuple(halves) for halves in moves.values()),
    )


def _steps(plan: PlanArrays, job: Job, stage: Stage) -> Iterator[tuple[ExchangePart, ...]]:
    for chunk in exchange_chunks(plan):
        work, size = chunk_times(plan, job, stage, chunk), message_bytes(job, chunk)
        parts = []
        for part in range(len(chunk.keys)):
            own = chunk.messages(part)
            keys = Messages(chunk.owner[own], chunk.user[own], size[own])
            parts.append(ExchangePart(Times(work.forward[part], work.backward[part]), keys))
        yield from (tuple(parts[number] for number in numbers) for numbers in chunk.steps)
