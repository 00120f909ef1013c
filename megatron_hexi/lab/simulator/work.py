"""Work and messages of a stage's units in one layer: the cost model's numbers, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.expert_messages import expert_messages
from megatron_hexi.cost.experts import ExpertsOnRanks, expert_ranks
from megatron_hexi.cost.layer import Layer, Pass, UnitGpus, chunk_times, message_bytes, unit_times
from megatron_hexi.cost.mixing import Mixing, mixing_of
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.products import Times
from megatron_hexi.cost.sections import Section
from megatron_hexi.models.job import Job
from megatron_hexi.plan.program import Batch


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages between units: senders, receivers, bytes on one GPU."""

    src: Ints
    dst: Ints
    size: Floats


@dataclass(frozen=True, eq=False)
class ExpertTraffic:
    """Messages to routed experts in one layer, from rank to rank; those back are the same, reversed.

    Args:
        messages: messages between units; two ranks of one unit may send to each other.
        src_gpu: GPU of each message's sender, [M].
        dst_gpu: GPU of its receiver, [M].
    """

    messages: Messages
    src_gpu: Ints
    dst_gpu: Ints

    @property
    def reversed(self) -> ExpertTraffic:
        """The same messages in the other direction, from experts back to the tokens' ranks."""
        sent = self.messages
        return ExpertTraffic(Messages(sent.dst, sent.src, sent.size), self.dst_gpu, self.src_gpu)


def expert_traffic(
    sections: Sequence[Section], experts: Sequence[ExpertsOnRanks | None]
) -> list[ExpertTraffic]:
    """Return the messages to experts between all units of some sections, one after the other; [] without any.

    Args:
        sections: sections of one stage, whose units are counted from the first section's on.
    """
    placed = [held for held in experts if held is not None]
    if not placed:
        return []
    ranks = expert_ranks(sections, placed)
    widths = [section.ranks.shape[1] for section in sections for _ in section.ranks]
    unit = np.repeat(np.arange(len(widths)), widths)
    return [
        ExpertTraffic(
            Messages(unit[sent.src], unit[sent.dst], sent.size), ranks.gpus[sent.src], ranks.gpus[sent.dst]
        )
        for sent in expert_messages(sections[0].job, ranks)
    ]


@dataclass(frozen=True, eq=False)
class LayerWork:
    """The work of one layer, for all units of a stage.

    Args:
        token: seconds of token work.
        sums: seconds of all-reduces inside each unit, in each direction.
        experts: seconds of each unit's routed experts, on its rank with the most of them.
        own: seconds of the own group's block.
        share: fraction of each unit's heads that are in the first half.
        blocks: seconds of blocks, by step of the exchange and part.
        turn: number of the part of the last step in which the first half of the heads ends.
        early: fraction of that part's work that belongs to the first half.
        halves: number of all-to-alls in which query heads travel each way.
        attends: whether the layer has core attention.
        again: pass of the modules that are computed again, of the forward pass where there are none.
    """

    token: Times
    sums: Floats
    experts: Times
    own: Times
    share: Floats
    blocks: tuple[tuple[Times, ...], ...]
    unit_steps: Ints
    turn: Ints
    early: Floats
    halves: int
    attends: bool
    again: Pass
    sent: tuple[dict[Batch, Messages], dict[Batch, Messages]]

    def messages(self, again: bool) -> int:
        """Return the number of messages, forward and backward; with `again`, forward ones are repeated."""
        forward, backward = (sum(len(batch.src) for batch in sent.values()) for sent in self.sent)
        return forward * (1 + again) + backward


def layer_work(plan: PlanArrays, job: Job, stage: UnitGpus, layer: Layer) -> LayerWork:
    """Return the work of a layer, step by step.

    Args:
        layer: the cost model's layer, from which all-reduces inside units and experts are taken.
    """
    mixing, rows = mixing_of(plan, job), job.micro_batch_size * plan.tokens.astype(float)
    token, own = (Times(*seconds) for seconds in unit_times(mixing, rows, job, stage))
    unit_steps = (plan.groups_beside[plan.group] - 1) * mixing.is_attention
    first = plan.heads_first
    units = np.arange(len(first))
    # Only the first step may have several parts.
    stops = np.cumsum(plan.part_heads, axis=0)
    turn = np.where(unit_steps == 1, np.argmax(stops >= first, axis=0), 0)
    part_heads = np.where(unit_steps == 1, plan.part_heads[turn, units], plan.heads)
    before = np.where(unit_steps == 1, stops[turn, units] - part_heads, 0)
    blocks, keys = _exchange(mixing, plan, job, stage)
    home = {
        to._replace(cargo="gradients"): Messages(sent.dst, sent.src, sent.size) for to, sent in keys.items()
    }
    there_in, there_out, back_in, back_out = _all_to_alls(mixing)
    return LayerWork(
        token=token,
        sums=layer.forward.tensor_parallel,
        experts=Times(layer.forward.experts, layer.backward.experts),
        own=own,
        share=mixing.first_share,
        blocks=blocks,
        unit_steps=unit_steps,
        turn=turn,
        early=(first - before) / np.maximum(part_heads, 1),
        halves=1 + mixing.in_halves,
        attends=mixing.is_attention,
        again=layer.again or layer.forward,
        sent=(there_in | keys | there_out, back_in | keys | home | back_out),
    )


def _all_to_alls(mixing: Mixing) -> Iterator[dict[Batch, Messages]]:
    """Yield messages of all-to-alls: forward in and out, backward in and out, in one or two halves."""
    (holder, taker), moves = mixing.pairs, mixing.all_to_alls()
    for way, inward in itertools.product(("forward", "backward"), (True, False)):
        messages = {}
        for move in moves:
            if (move.way, move.inward) == (way, inward):
                # A unit may have heads of attention and none with a state.
                there = (move.size > 0) | mixing.is_attention
                ends = (holder[there], taker[there]) if inward else (taker[there], holder[there])
                messages[Batch("in" if inward else "out", move.half)] = Messages(*ends, move.size[there])
        yield messages


def _exchange(
    mixing: Mixing, plan: PlanArrays, job: Job, stage: UnitGpus
) -> tuple[tuple[tuple[Times, ...], ...], dict[Batch, Messages]]:
    """Return the seconds of blocks by step and part of the exchange, and the messages of keys for them."""
    blocks: list[tuple[Times, ...]] = []
    keys: dict[Batch, Messages] = {}
    for chunk in mixing.chunks():
        work, size = chunk_times(plan, job, stage, chunk), message_bytes(plan, job, chunk)
        for numbers in chunk.steps:
            for part, number in enumerate(numbers):
                selected = chunk.messages(number)
                batch = Batch("keys", len(blocks), part)
                keys[batch] = Messages(chunk.owner[selected], chunk.user[selected], size[selected])
            blocks.append(tuple(Times(*work[:, n]) for n in numbers))
    return tuple(blocks), keys
