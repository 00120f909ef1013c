"""Seconds of a transformer layer of one pipeline stage, forward and backward, for all units of all replicas.

A layer is a cycle: token work (projection and MLP of one layer, norm and QKV of the next), all-to-all in,
block of the own group's keys ("own block") and exchange, all-to-all out. Assumed:
- members of a group wait for each other at both all-to-alls; where these are cut in halves, the second half's
  all-to-all in hides behind the own block of the first, the first half's all-to-all out behind the rest of
  the last step (backward: of the own block);
- groups enter the exchange when their own members are ready, and wait for each other inside it as far as
  keys and values make them (`overlap`);
- the groups of a replica wait for each other once a layer, after the all-to-all out.
The scan of a layer with a state is in place of attention, and nothing hides its all-to-alls; a layer of an
MLP alone is token work, at whose end members meet too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hexi.cost.arrays import Bools, Floats, Ints
from megatron_hexi.cost.calls import LAYER_CALLS
from megatron_hexi.cost.collectives import all_to_alls, tensor_parallel_seconds
from megatron_hexi.cost.compute import (
    Speeds,
    expansion_times,
    keys_merge_times,
    merge_times,
    rectangle_times,
    token_times,
)
from megatron_hexi.cost.documents import cut_share
from megatron_hexi.cost.exchange import Chunk
from megatron_hexi.cost.fp8 import computed_rows
from megatron_hexi.cost.layer_bytes import Flights
from megatron_hexi.cost.mixing import Mixing, mixing_of
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.overlap import EntryTimes, ExchangePart, pass_ends
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.recomputed import PassWork, work_again
from megatron_hexi.models.job import Job


@dataclass(frozen=True, eq=False)
class Pass:
    """Seconds of a forward or backward pass of one layer, for each unit, [U].

    Args:
        token: the unit's work on its tokens.
        tensor_parallel: collectives inside the unit.
        all_to_all_in: exposed time of its group's all-to-all before attention.
        begin: time at which its group enters attention.
        attention: the unit's attention work.
        end: time at which it ends the exchange.
        all_to_all_out: exposed time of its group's all-to-all after attention.
        finish: time at which its group ends the layer.
        experts: the unit's work on its routed experts.
        expert_exchange: all-to-alls to routed experts and back.
        expert_wait: wait for the rank of the expert domain that computes longest.
        wire: seconds in which the pass keeps the network busy, the longest message of each step, a number.
    """

    token: Floats
    tensor_parallel: Floats
    all_to_all_in: Floats
    begin: Floats
    attention: Floats
    end: Floats
    all_to_all_out: Floats
    finish: Floats
    experts: Floats
    expert_exchange: Floats
    expert_wait: Floats
    wire: float

    @property
    def undisturbed(self) -> Floats:
        """Time at which each unit would end the layer if keys and values took no time, s, [U]."""
        return self.begin + self.attention + self.all_to_all_out

    @property
    def exchange(self) -> Floats:
        """Seconds that each unit waits inside the exchange, for the network and for slower units, [U]."""
        return self.end - self.begin - self.attention

    def exposed_exchange(self, units: Ints) -> float:
        """Return the seconds that the exchange adds to the layer of a replica with these units."""
        return float(self.finish[units].max() - self.undisturbed[units].max())


@dataclass(frozen=True, eq=False)
class Layer:
    """Seconds of a layer's passes, and the keys that its exchange has in flight.

    Args:
        again: pass of the modules that are computed again (`Again.modules`); ``None``: there are none.
        experts: seconds of the routed experts in it.
    """

    forward: Pass
    backward: Pass
    again: Pass | None
    flights: Flights
    experts: ExpertCycle


@dataclass(frozen=True, eq=False)
class ExpertCycle:
    """Seconds of the routed experts' part of a layer, forward and backward, for each unit, [2, U].

    Args:
        compute: work on the unit's experts.
        exchange: both all-to-alls, until the last rank of the expert domain has its rows.
        wait: wait for the rank of the expert domain that computes longest.
        activation: seconds of the activation forward, [U].
    """

    compute: Floats
    exchange: Floats
    wait: Floats
    activation: Floats

    @property
    def total(self) -> Floats:
        """Seconds from the first token sent to the last result received, equal in a domain, [2, U]."""
        return self.compute + self.exchange + self.wait


@dataclass(frozen=True, eq=False)
class UnitGpus:
    """GPUs and links of the units of one pipeline stage.

    Args:
        gpus: first GPU of each unit, [U].
        kinds: model of GPU of each unit, its number among the models of the cluster, [U].
        speeds: rates of each model of GPU, by number.
        bandwidth: bandwidth of the links inside each unit's node, bytes/s, [U].
        latency: latency of a message inside the node, s, [U].
    """

    gpus: Ints
    kinds: Ints
    speeds: Mapping[int, Speeds]
    bandwidth: Floats
    latency: Floats

    @cached_property
    def by_kind(self) -> list[tuple[Speeds, Ints | slice]]:
        """The rates of each model of GPU in use, with its units; a slice if all have the same model."""
        used = np.unique(self.kinds).tolist()
        if len(used) == 1:
            return [(self.speeds[used[0]], slice(None))]
        return [(self.speeds[kind], np.flatnonzero(self.kinds == kind)) for kind in used]

    @cached_property
    def fp8_copies(self) -> Floats | float:
        """Bytes of fp8 copies of a weight of the layers' matrices on the units' GPUs; 0: in bf16, [U]."""
        copies = np.array([self.speeds[kind].fp8_copies for kind in self.kinds.tolist()])
        return copies if copies.any() else 0.0

    @property
    def in_fp8(self) -> Bools | bool:
        """Whether the units multiply the layers' matrices in fp8, [U]."""
        return np.greater(self.fp8_copies, 0)


def layer_times(
    plan: PlanArrays,
    job: Job,
    stage: UnitGpus,
    links: LinkTable,
    window: int,
    experts: ExpertCycle | None = None,
) -> Layer:
    """Return the seconds of one layer's passes, for all units of a section.

    Args:
        job: the job, with layers of one kind.
        window: prefetch depth of the exchange, in steps.
        experts: seconds of the layer's routed experts; ``None``: it has none.
    """
    rows = computed_rows(job, plan.tokens.astype(float), stage.in_fp8)
    mixing = mixing_of(plan, job)
    token, own = unit_times(mixing, rows, job, stage)
    if experts is None:
        nothing = np.zeros(token.shape)
        experts = ExpertCycle(nothing, nothing, nothing, np.zeros(len(rows)))
    part_sums = tensor_parallel_seconds(
        job, rows, stage.bandwidth, stage.latency, np.logical_and(stage.in_fp8, job.precision == "fp8")
    )
    sums = len(job.model.parts) * part_sums
    inward, outward = all_to_alls(mixing, links, stage.gpus, job.tensor_parallel)
    share, in_halves = mixing.first_share, mixing.in_halves
    first = own * share
    shown, hidden, ready = by_group(
        plan, np.stack([inward.shown, inward.hidden, token + sums + experts.total])
    )
    # Exposed part of the second half's all-to-all, behind the first half's block of the own group.
    late = np.maximum(hidden - first, 0.0)
    enter = shown + late
    begin = ready + enter
    attention = own
    received, sent, wire = np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(2)
    steps: list[list[ExchangePart]] = []
    for chunk in mixing.chunks():
        work = chunk_times(plan, job, stage, chunk)
        there, home = _message_seconds(plan, job, stage, links, chunk)
        steps += _parts(chunk, work, there, home)
        out_s, home_s = (_longest(chunk, seconds) for seconds in (there, home))
        wire += (out_s, out_s + home_s)
        attention = attention + work.sum(axis=1)
        received = np.maximum(received, chunk.received.max(axis=0)[plan.group] * plan.kv)
        sent = np.maximum(sent, _most_sent(chunk, len(rows)))
    last_rest = (_last_step(plan, own[0], steps) if in_halves else own[0]) * (1 - share)
    leaving = by_group(plan, np.stack(outward))
    for halves in (inward, outward):
        wire += (halves.shown + halves.hidden).max(axis=1)
    wire += experts.exchange.max(axis=1)

    def assemble(way: int, work: PassWork, start: Floats) -> Pass:
        out, out_first = leaving[:, way]
        entry = EntryTimes(start - late[way], late[way], first[way], own[way] - first[way])
        ends = pass_ends(way > 0, steps, entry, window, 1 + in_halves, last_rest)
        end, first_end = by_group(plan, np.stack(ends))
        leave = np.maximum(first_end + out_first - end, 0.0) + out
        return Pass(
            **work._asdict(),
            all_to_all_in=enter[way],
            begin=start,
            attention=attention[way],
            end=ends.whole,
            all_to_all_out=leave,
            finish=end + leave,
            wire=float(wire[way]),
        )

    again = None
    if job.again.modules:
        repeated = work_again(job, stage, rows, part_sums, experts)
        ready = by_group(plan, sum(repeated, np.zeros(len(rows))))
        if "core_attn" in job.again and mixing.is_attention:
            again = assemble(0, repeated, ready + enter[0])
        else:
            again = _without_attention(repeated, ready)
    forward, backward = (
        assemble(
            way,
            PassWork(token[way], sums, experts.compute[way], experts.exchange[way], experts.wait[way]),
            begin[way],
        )
        for way in range(2)
    )
    return Layer(forward, backward, again, Flights(received, sent), experts)


def _without_attention(work: PassWork, ready: Floats) -> Pass:
    """Return a pass without attention, which a group ends at `ready`, [U]."""
    nothing = np.zeros(len(ready))
    return Pass(
        **work._asdict(),
        all_to_all_in=nothing,
        begin=ready,
        attention=nothing,
        end=ready,
        all_to_all_out=nothing,
        finish=ready,
        wire=float(work.expert_exchange.max()),
    )


def _parts(chunk: Chunk, work: Floats, there: Floats, home: Floats) -> Iterator[list[ExchangePart]]:
    """Yield the parts of each step of a chunk."""
    for numbers in chunk.steps:
        step = []
        for n in numbers:
            own = chunk.messages(n)
            step.append(ExchangePart(work[:, n], chunk.owner[own], chunk.user[own], there[own], home[own]))
        yield step


def _last_step(plan: PlanArrays, own: Floats, steps: Sequence[Sequence[ExchangePart]]) -> Floats:
    """Return the seconds of each unit's last step forward; without steps, of its own group's block, [U]."""
    work, number = own, plan.groups_beside[plan.group] - 1
    for last in set(number.tolist()) - {0}:
        work = np.where(number == last, sum(part.compute[0] for part in steps[last - 1]), work)
    return work


def by_group(plan: PlanArrays, values: Floats) -> Floats:
    """Return the largest value of each unit's group, [..., U]."""
    largest: Floats = np.maximum.reduceat(values[..., plan.slots], plan.first_slot[:-1], axis=-1)
    return largest[..., plan.group]


def unit_times(mixing: Mixing, rows: Floats, job: Job, stage: UnitGpus) -> Floats:
    """Return seconds [work, pass, unit]: token-wise work and work inside the group; forward, backward.

    Args:
        rows: B x T of each unit, [U].
        job: the job, with layers of one kind.
    """
    found = np.stack([np.empty((2, len(rows))), mixing.own_times(stage)])
    for speeds, units in stage.by_kind:
        found[0][:, units] = token_times(speeds, job, rows[units])
        for way, calls in enumerate(LAYER_CALLS):
            # Kernels of a pass that are shorter than what calls them wait for the host.
            called = speeds.call_s * calls * len(job.model.parts) / 2
            late = called * (rows[units] > 0) - found[1, way, units]
            found[0, way, units] = np.maximum(found[0, way, units], late)
    return found


def chunk_times(plan: PlanArrays, job: Job, stage: UnitGpus, chunk: Chunk) -> Floats:
    """Return the seconds that each unit computes in each part, forward and backward, [2, C, U]."""
    work = np.zeros((2, *chunk.heads.shape))
    for speeds, units in stage.by_kind:
        groups, column = np.unique(plan.group[units], return_inverse=True)
        queries, keys = chunk.queries[:, groups].astype(float), chunk.keys[:, groups].astype(float)
        tokens = plan.group_tokens[groups].astype(float)
        blocks = np.array(rectangle_times(speeds, job, queries, keys, tokens[:, None]))
        cut = cut_share(job, tokens)
        blocks += merge_times(speeds, job, queries * np.reshape(cut, (-1, 1)))
        received = chunk.received[:, groups].astype(float) * cut
        gradients = keys_merge_times(speeds, job, received)
        if job.latent_exchange:
            made = np.array(expansion_times(speeds, job, received, merged=True))
            work[:, :, units] = made[:, :, column] * chunk.heads[:, units]
        work[:, :, units] += blocks.sum(axis=3)[:, :, column] * chunk.heads[:, units]
        work[1][:, units] += gradients[:, column] * chunk.kv_heads[:, units]
    return work


def message_bytes(plan: PlanArrays, job: Job, chunk: Chunk) -> Floats:
    """Return the bytes of each message of keys and values, or of their gradients, [M].

    KV heads x tokens x B (D + V) e, of tokens in documents that other groups have tokens of.

    Where latent columns travel, they are one KV head of C + R in place of D + V.
    """
    columns = job.exchanged_columns
    size = (job.micro_batch_size * columns * job.element_bytes * chunk.kv * chunk.sent).astype(float)
    return (
        size
        * np.broadcast_to(cut_share(job, plan.group_tokens), len(plan.group_tokens))[plan.group[chunk.user]]
    )


def _message_seconds(
    plan: PlanArrays, job: Job, stage: UnitGpus, links: LinkTable, chunk: Chunk
) -> tuple[Floats, Floats]:
    size, parts = message_bytes(plan, job, chunk), len(chunk.keys)
    owner, user = stage.gpus[chunk.owner], stage.gpus[chunk.user]
    # Both directions in one call, as separate sets of messages: that is faster.
    both = links.message_seconds(
        np.concatenate([owner, user]),
        np.concatenate([user, owner]),
        np.concatenate([size, size]),
        np.concatenate([chunk.part, chunk.part + parts]),
        job.tensor_parallel,
    )
    return both[: len(size)], both[len(size) :]


def _longest(chunk: Chunk, seconds: Floats) -> float:
    """Return the sum over all parts of the seconds of the longest message."""
    longest = np.zeros(len(chunk.keys))
    np.maximum.at(longest, chunk.part, seconds)
    return float(longest.sum())


def _most_sent(chunk: Chunk, units: int) -> Floats:
    steps = len(chunk.parts)
    step = np.repeat(np.arange(steps), chunk.parts)[chunk.part]
    key = step * units + chunk.owner
    sent = np.bincount(key, weights=chunk.kv * chunk.sent, minlength=steps * units)
    return sent.reshape(steps, units).max(axis=0)
