"""What the units of a stage compute and send in one layer: the cost model's own numbers, step by step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.collectives import all_to_all_bytes
from megatron_hexi.cost.compute import (
    Speeds,
    Times,
    keys_merge_times,
    merge_times,
    own_block_times,
    rectangle_times,
)
from megatron_hexi.cost.exchange import Chunk, exchange_chunks
from megatron_hexi.cost.job import Job
from megatron_hexi.cost.layer import Layer, Stage, message_bytes
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
        own_last: the part of it that comes after the exchange in the backward pass, s.
        share: of each unit's heads, the half that comes first.
        steps: of the exchange, each in its parts.
        before: of each step, what of each part's work is of the half that comes first, [parts, U], and the
            part in which this half ends, [U].
        unit_steps: how many of them each unit's replica has.
        moves: the all-to-alls: forward in and out, backward in and out, each of one or two halves.
    """

    token: Times
    sums: Floats
    own: Times
    own_last: Floats
    share: Floats
    steps: tuple[tuple[ExchangePart, ...], ...]
    before: tuple[tuple[Floats, Ints], ...]
    unit_steps: Ints
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
        layer: what the cost model makes of it; work on tokens is taken from there.
    """
    holder, taker = plan.all_to_all_pairs
    moves: dict[tuple[str, bool], list[Messages]] = {}
    for move in all_to_all_bytes(plan, job):
        ends = (holder, taker) if move.inward else (taker, holder)
        moves.setdefault((move.way, move.inward), []).append(Messages(*ends, move.size))
    chunks = list(exchange_chunks(plan))
    first = plan.heads_first
    own = _own_blocks(plan, job, stage.by_kind)
    return LayerWork(
        token=Times(layer.forward.token, layer.backward.token),
        sums=layer.forward.tensor_parallel,
        own=own,
        own_last=own.backward * (1 - first / np.maximum(plan.heads, 1)),
        share=first / np.maximum(plan.heads, 1),
        steps=tuple(step for chunk in chunks for step in _steps(plan, job, stage.by_kind, chunk)),
        before=tuple(step for chunk in chunks for step in _before(first, chunk)),
        unit_steps=plan.groups_beside[plan.group] - 1,
        moves=tuple(tuple(halves) for halves in moves.values()),
    )


def _before(first: Ints, chunk: Chunk) -> list[tuple[Floats, Ints]]:
    """Of each step: the share of each part's heads that are among each unit's first, and where these end."""
    found = []
    for numbers in chunk.steps:
        heads = chunk.heads[numbers.start : numbers.stop]
        ends = np.cumsum(heads, axis=0)
        inside = np.clip(first - (ends - heads), 0, heads)
        found.append((inside / np.maximum(heads, 1), np.argmax(ends >= first, axis=0)))
    return found


def _own_blocks(plan: PlanArrays, job: Job, by_kind: list[tuple[Speeds, Ints]]) -> Times:
    times = Times(np.zeros(len(plan.tokens)), np.zeros(len(plan.tokens)))
    for speeds, units in by_kind:
        tokens = plan.group_tokens[plan.group[units]].astype(float)
        one_head = own_block_times(speeds, job, tokens, plan.causal)
        for way in range(2):
            times[way][units] = plan.heads[units] * one_head[way]
    return times


def _steps(
    plan: PlanArrays, job: Job, by_kind: list[tuple[Speeds, Ints]], chunk: Chunk
) -> list[tuple[ExchangePart, ...]]:
    blocks = Times(np.zeros(chunk.heads.shape), np.zeros(chunk.heads.shape))
    for speeds, units in by_kind:
        groups = plan.group[units]
        queries, keys = chunk.queries[:, groups].astype(float), chunk.keys[:, groups].astype(float)
        work, sums = rectangle_times(speeds, job, queries, keys), merge_times(speeds, job, queries)
        for way in range(2):
            blocks[way][:, units] = chunk.heads[:, units] * (work[way] + sums[way]).sum(axis=2)
        received = chunk.received[:, groups].astype(float)
        blocks.backward[:, units] += chunk.kv_heads[:, units] * keys_merge_times(speeds, job, received)
    size = message_bytes(job, chunk)
    bounds = np.searchsorted(chunk.part, np.arange(len(chunk.keys) + 1))
    parts = [
        ExchangePart(
            Times(blocks.forward[part], blocks.backward[part]),
            Messages(chunk.owner[low:high], chunk.user[low:high], size[low:high]),
        )
        for part, (low, high) in enumerate(itertools.pairwise(bounds))
    ]
    return [tuple(parts[number] for number in numbers) for numbers in chunk.steps]
