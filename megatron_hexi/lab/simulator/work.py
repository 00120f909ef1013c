"""What the units of a stage compute and send in one layer: the cost model's own numbers, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.collectives import all_to_all_bytes
from megatron_hexi.cost.compute import Times
from megatron_hexi.cost.exchange import exchange_chunks
from megatron_hexi.cost.job import Job
from megatron_hexi.cost.layer import Layer, Stage, chunk_times, message_bytes, unit_times
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.plan.program import Batch


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages from unit to unit: who sends, who receives, bytes on one GPU."""

    src: Ints
    dst: Ints
    size: Floats


@dataclass(frozen=True, eq=False)
class LayerWork:
    """One layer, for all units of a stage.

    Args:
        token: work on tokens, s.
        sums: sums inside each unit, s, in each direction.
        own: the own group's block, s.
        share: of each unit's heads, the half that comes first.
        blocks: of each step of the exchange in its parts, s.
        unit_steps: how many of them each unit's replica has.
        turn: the part of the last one in which the half that comes first ends.
        early: how much of this part's work is that half's.
        halves: in how many all-to-alls query heads travel each way.
        sent: what travels forward, and backward.
    """

    token: Times
    sums: Floats
    own: Times
    share: Floats
    blocks: tuple[tuple[Times, ...], ...]
    unit_steps: Ints
    turn: Ints
    early: Floats
    halves: int
    sent: tuple[dict[Batch, Messages], dict[Batch, Messages]]

    def messages(self, again: bool) -> int:
        """How many messages there are, forward and backward; `again`: the forward ones are repeated."""
        forward, backward = (sum(len(batch.src) for batch in sent.values()) for sent in self.sent)
        return forward * (1 + again) + backward


def layer_work(plan: PlanArrays, job: Job, stage: Stage, layer: Layer) -> LayerWork:
    """Take a layer apart.

    Args:
        plan: the plan.
        job: the job.
        stage: what the units run on.
        layer: what the cost model makes of it; sums inside units are taken from there.
    """
    token, own = (Times(*seconds) for seconds in unit_times(plan, job, stage))
    unit_steps = plan.groups_beside[plan.group] - 1
    first = plan.heads_first
    units = np.arange(len(first))
    # Only the first step may have several parts.
    stops = np.cumsum(plan.part_heads, axis=0)
    turn = np.where(unit_steps == 1, np.argmax(stops >= first, axis=0), 0)
    held = np.where(unit_steps == 1, plan.part_heads[turn, units], plan.heads)
    before = np.where(unit_steps == 1, stops[turn, units] - held, 0)
    blocks, keys = _exchange(plan, job, stage)
    home = {to._replace(cargo="gradients"): Messages(one.dst, one.src, one.size) for to, one in keys.items()}
    there_in, there_out, back_in, back_out = _all_to_alls(plan, job).values()
    return LayerWork(
        token=token,
        sums=layer.forward.tensor_parallel,
        own=own,
        share=first / np.maximum(plan.heads, 1),
        blocks=blocks,
        unit_steps=unit_steps,
        turn=turn,
        early=(first - before) / np.maximum(held, 1),
        halves=1 + plan.in_halves,
        sent=(there_in | keys | there_out, back_in | keys | home | back_out),
    )


def _all_to_alls(plan: PlanArrays, job: Job) -> dict[tuple[str, bool], dict[Batch, Messages]]:
    """Forward in and out, backward in and out, each of one or two halves."""
    holder, taker = plan.all_to_all_pairs
    found: dict[tuple[str, bool], dict[Batch, Messages]] = {}
    for move in all_to_all_bytes(plan, job):
        ends = (holder, taker) if move.inward else (taker, holder)
        batch = Batch("in" if move.inward else "out", move.half)
        found.setdefault((move.way, move.inward), {})[batch] = Messages(*ends, move.size)
    return found


def _exchange(
    plan: PlanArrays, job: Job, stage: Stage
) -> tuple[tuple[tuple[Times, ...], ...], dict[Batch, Messages]]:
    """Seconds of the blocks of each step in its parts, and the keys that travel for them."""
    blocks: list[tuple[Times, ...]] = []
    keys: dict[Batch, Messages] = {}
    for chunk in exchange_chunks(plan, None if job.model.window is None else job.model.window.size):
        work, size = chunk_times(plan, job, stage, chunk), message_bytes(job, chunk)
        for numbers in chunk.steps:
            for part, number in enumerate(numbers):
                own = chunk.messages(number)
                batch = Batch("keys", len(blocks), part)
                keys[batch] = Messages(chunk.owner[own], chunk.user[own], size[own])
            blocks.append(tuple(Times(*work[:, n]) for n in numbers))
    return tuple(blocks), keys
