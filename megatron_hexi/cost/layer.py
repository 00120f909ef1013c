"""One transformer layer of one pipeline stage, forward and backward, for all units of all replicas.

A layer is a cycle: token work (projection and MLP of one layer, norm and QKV of the next), all-to-all in,
own block and exchange, all-to-all out. Assumed:
- members of a group wait for each other at both all-to-alls; where these travel in halves, the second half's
  way in hides behind the own block of the first, the first half's way out behind the rest of the last step
  (backward: of the own block);
- groups enter the exchange when their own members are ready, and wait for each other inside it as far as
  keys and values make them (`overlap`);
- the groups of a replica wait for each other once a layer, after the all-to-all out.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.collectives import all_to_alls, tensor_parallel_seconds
from megatron_hexi.cost.compute import (
    Speeds,
    Times,
    keys_merge_times,
    merge_times,
    own_block_times,
    rectangle_times,
    token_times,
)
from megatron_hexi.cost.exchange import Chunk, exchange_chunks
from megatron_hexi.cost.job import Job
from megatron_hexi.cost.memory import Flights
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.overlap import BackwardClock, ForwardClock, Part
from megatron_hexi.cost.plan_arrays import PlanArrays


@dataclass(frozen=True, eq=False)
class Pass:
    """One direction of one layer, seconds of each unit, [U].

    Args:
        token: its own token work.
        tensor_parallel: sums inside the unit.
        all_to_all_in: its group's, before attention: what shows of it.
        begin: when its group enters attention.
        attention: its own attention work.
        end: when it is done with the exchange.
        all_to_all_out: its group's, after attention: what shows of it.
        finish: when its group is done with the layer.
        wire: when nothing else can use the network: the longest messages of all steps, one number.
    """

    token: Floats
    tensor_parallel: Floats
    all_to_all_in: Floats
    begin: Floats
    attention: Floats
    end: Floats
    all_to_all_out: Floats
    finish: Floats
    wire: float

    @property
    def undisturbed(self) -> Floats:
        """When each unit would be done with the layer if keys and values took no time."""
        return self.begin + self.attention + self.all_to_all_out

    @property
    def exchange(self) -> Floats:
        """What each unit waits inside the exchange, for the network and for slower units."""
        return self.end - self.begin - self.attention

    def exposed_exchange(self, units: Ints) -> float:
        """What the exchange adds to the layer of a replica with these units."""
        return float(self.finish[units].max() - self.undisturbed[units].max())


@dataclass(frozen=True, eq=False)
class Layer:
    """Both directions, core attention as selective recomputation repeats it, and what the exchange holds."""

    forward: Pass
    backward: Pass
    attention_again: Pass | None
    flights: Flights


@dataclass(frozen=True, eq=False)
class Stage:
    """What the units of one pipeline stage run on.

    Args:
        gpus: first GPU of each unit, [U].
        kinds: model of GPU of each unit, an index into `speeds`, [U].
        speeds: of each model of GPU.
        bandwidth: of each unit's links inside its node, bytes/s.
        latency: of a message there, s.
    """

    gpus: Ints
    kinds: Ints
    speeds: tuple[Speeds, ...]
    bandwidth: Floats
    latency: Floats

    @cached_property
    def by_kind(self) -> list[tuple[Speeds, Ints]]:
        """The speeds in use, each with its units."""
        return [(self.speeds[kind], np.flatnonzero(self.kinds == kind)) for kind in np.unique(self.kinds)]


def layer_times(plan: PlanArrays, job: Job, stage: Stage, links: LinkTable, window: int) -> Layer:
    """Time one layer.

    Args:
        plan: the plan.
        job: the job.
        stage: where its units are.
        links: the cluster's.
        window: exchange steps under way ahead of the one in use.
    """
    rows = job.micro_batch_size * plan.tokens.astype(float)
    token, own = _unit_times(plan, job, stage, rows)
    sums = 2 * tensor_parallel_seconds(job, rows, stage.bandwidth, stage.latency)
    inward, outward = all_to_alls(plan, job, links, stage.gpus)
    share = plan.heads_first / np.maximum(plan.heads, 1)
    # What of the second half's way in does not hide behind the own block of the first half.
    late = [
        np.maximum(by_group(plan, halves.hidden) - seconds * share, 0.0)
        for halves, seconds in zip(inward, own, strict=True)
    ]
    enter = [by_group(plan, halves.shown) + rest for halves, rest in zip(inward, late, strict=True)]
    begin = [by_group(plan, part + sums) + way_in for part, way_in in zip(token, enter, strict=True)]
    posted = [start - rest for start, rest in zip(begin, late, strict=True)]
    forward = ForwardClock(posted[0], begin[0], own.forward, window)
    first = own.backward * share
    backward = BackwardClock(posted[1], begin[1], first, own.backward - first, window)
    is_again = job.mode == "selective"
    again = ForwardClock(enter[0] - late[0], enter[0], own.forward, window) if is_again else None
    attention = [own.forward.copy(), own.backward.copy()]
    received, sent, wire = np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(2)
    #: Each unit's work of its last step, or its own block where it has none.
    last_step, steps, distance = own.forward.copy(), plan.groups_beside[plan.group] - 1, 0
    last_ones = set(steps.tolist()) if plan.in_halves else set()
    for chunk in exchange_chunks(plan):
        work = _chunk_times(plan, job, stage, chunk)
        there, home = _message_seconds(job, stage, links, chunk)
        bounds = np.searchsorted(chunk.part, np.arange(len(chunk.keys) + 1))
        spans = [slice(low, high) for low, high in itertools.pairwise(bounds)]
        for numbers in chunk.steps:
            parts = [
                (chunk.owner[spans[n]], chunk.user[spans[n]], there[spans[n]], home[spans[n]])
                for n in numbers
            ]
            out, back = (
                [Part(seconds[n], *messages) for n, messages in zip(numbers, parts, strict=True)]
                for seconds in work
            )
            forward.step(out)
            backward.step(back)
            distance += 1
            if distance in last_ones:
                whole = sum((part.compute for part in out), start=np.zeros(len(rows)))
                last_step = np.where(steps == distance, whole, last_step)
            if again is not None:
                again.step(out)
        out_s, home_s = (_longest(chunk, seconds) for seconds in (there, home))
        wire += (out_s, out_s + home_s)
        attention[0] += work.forward.sum(axis=0)
        attention[1] += work.backward.sum(axis=0)
        received = np.maximum(received, chunk.received.max(axis=0)[plan.group] * plan.kv)
        sent = np.maximum(sent, _most_sent(chunk, len(rows)))
    steps_done = backward.end
    backward.finish()
    # The first half leaves before the rest of the last step (of the own block) is computed.
    rest = last_step * (1 - share)

    def assemble(way: int, clock: ForwardClock | BackwardClock, whole: bool = True) -> Pass:
        end, halves = by_group(plan, clock.end), outward[way]
        first = by_group(plan, (clock.end - rest if way == 0 else steps_done)) + by_group(plan, halves.hidden)
        leave = np.maximum(first - end, 0.0) + by_group(plan, halves.shown)
        return Pass(
            token=token[way] if whole else np.zeros(len(rows)),
            tensor_parallel=sums if whole else np.zeros(len(rows)),
            all_to_all_in=enter[way],
            begin=begin[way] if whole else enter[way],
            attention=attention[way],
            end=clock.end,
            all_to_all_out=leave,
            finish=end + leave,
            wire=float(wire[way] + inward[way].both.max() + halves.both.max()),
        )

    return Layer(
        assemble(0, forward),
        assemble(1, backward),
        assemble(0, again, whole=False) if again is not None else None,
        Flights(received, sent),
    )


def by_group(plan: PlanArrays, values: Floats) -> Floats:
    """The largest value of each unit's group."""
    largest = np.zeros(len(plan.group_tokens))
    np.maximum.at(largest, plan.group, values)
    return largest[plan.group]


def _unit_times(plan: PlanArrays, job: Job, stage: Stage, rows: Floats) -> tuple[Times, Times]:
    token, own = (Times(np.zeros(len(rows)), np.zeros(len(rows))) for _ in range(2))
    for speeds, units in stage.by_kind:
        group_tokens = plan.group_tokens[plan.group[units]].astype(float)
        parts = token_times(speeds, job, rows[units])
        blocks = own_block_times(speeds, job, group_tokens, plan.causal)
        for way in range(2):
            token[way][units] = parts[way]
            own[way][units] = plan.heads[units] * blocks[way]
    return token, own


def _chunk_times(plan: PlanArrays, job: Job, stage: Stage, chunk: Chunk) -> Times:
    """Seconds that each unit computes in each part, [C, U]."""
    work = Times(np.zeros(chunk.heads.shape), np.zeros(chunk.heads.shape))
    for speeds, units in stage.by_kind:
        groups, column = np.unique(plan.group[units], return_inverse=True)
        queries, keys = chunk.queries[:, groups].astype(float), chunk.keys[:, groups].astype(float)
        blocks = rectangle_times(speeds, job, queries, keys)
        merges = merge_times(speeds, job, queries)
        gradients = keys_merge_times(speeds, job, chunk.received[:, groups].astype(float))
        for way in range(2):
            per_head = (blocks[way] + merges[way]).sum(axis=2)
            work[way][:, units] = per_head[:, column] * chunk.heads[:, units]
        work.backward[:, units] += gradients[:, column] * chunk.kv_heads[:, units]
    return work


def message_bytes(job: Job, chunk: Chunk) -> Floats:
    """Keys and values of each message: 2 x KV heads x tokens x B D e; their gradients are as many."""
    element = job.micro_batch_size * job.model.head_dim * job.element_bytes
    return (2 * element * chunk.kv * chunk.sent).astype(float)


def _message_seconds(job: Job, stage: Stage, links: LinkTable, chunk: Chunk) -> tuple[Floats, Floats]:
    size, parts = message_bytes(job, chunk), len(chunk.keys)
    owner, user = stage.gpus[chunk.owner], stage.gpus[chunk.user]
    # Both ways in one call, as sets of their own: that is faster.
    both = links.message_seconds(
        np.concatenate([owner, user]),
        np.concatenate([user, owner]),
        np.concatenate([size, size]),
        np.concatenate([chunk.part, chunk.part + parts]),
        job.tensor_parallel,
    )
    return both[: len(size)], both[len(size) :]


def _longest(chunk: Chunk, seconds: Floats) -> float:
    """The longest messages of all parts, one after the other."""
    longest = np.zeros(len(chunk.keys))
    np.maximum.at(longest, chunk.part, seconds)
    return float(longest.sum())


def _most_sent(chunk: Chunk, units: int) -> Floats:
    steps = len(chunk.parts)
    step = np.repeat(np.arange(steps), chunk.parts)[chunk.part]
    key = step * units + chunk.owner
    sent = np.bincount(key, weights=chunk.kv * chunk.sent, minlength=steps * units)
    return sent.reshape(steps, units).max(axis=0)
