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
from megatron_hexi.cost.layer import Layer, message_bytes
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
        steps: of the exchange, each in its parts.
        unit_steps: how many of them each unit's replica has.
        moves: the all-to-alls: forward in and out, backward in and out.
    """

    token: Times
    sums: Floats
    own: Times
    own_last: Floats
    steps: tuple[tuple[ExchangePart, ...], ...]
    unit_steps: Ints
    moves: tuple[Messages, Messages, Messages, Messages]

    @property
    def parts(self) -> list[ExchangePart]:
        """Of all steps."""
        return [part for step in self.steps for part in step]

    def messages(self, again: bool) -> int:
        """How many messages there are, forward and backward; `again`: part of it is recomputed."""
        moves, keys = len(self.moves[0].src), sum(len(part.keys.src) for part in self.parts)
        return (2 + 2 + 2 * again) * moves + (1 + 2 + again) * keys


def layer_work(
    plan: PlanArrays, job: Job, speeds: tuple[Speeds, ...], kinds: Ints, layer: Layer
) -> LayerWork:
    """Take a layer apart.

    Args:
        plan: the plan.
        job: the job.
        speeds: of each model of GPU.
        kinds: model of GPU of each unit, [U].
        layer: what the cost model makes of it; work on tokens is taken from there.
    """
    holder, taker = plan.all_to_all_pairs
    forward_in, forward_out, backward_in, backward_out = all_to_all_bytes(plan, job)
    by_kind = [(speeds[kind], np.flatnonzero(kinds == kind)) for kind in np.unique(kinds)]
    own = _own_blocks(plan, job, by_kind)
    return LayerWork(
        token=Times(layer.forward.token, layer.backward.token),
        sums=layer.forward.tensor_parallel,
        own=own,
        own_last=own.backward * (1 - plan.heads_first / np.maximum(plan.heads, 1)),
        steps=tuple(step for chunk in exchange_chunks(plan) for step in _steps(plan, job, by_kind, chunk)),
        unit_steps=plan.groups_beside[plan.group] - 1,
        moves=(
            Messages(holder, taker, forward_in),
            Messages(taker, holder, forward_out),
            Messages(holder, taker, backward_in),
            Messages(taker, holder, backward_out),
        ),
    )


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
