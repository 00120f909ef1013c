"""Seconds of all-to-alls, tensor-parallel all-reduces and sends between stages; rings are in rings.py."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.scan import state_shares
from megatron_hexi.models.job import Job


class AllToAll(NamedTuple):
    """One of the all-to-alls of a layer, in the order in which the runtime starts them.

    Args:
        way: the pass, ``forward`` or ``backward``.
        inward: whether it turns tokens of all heads into heads of all tokens (before attention), or back.
        half: 0, or 1 for the second half of the heads.
        size: bytes of the message of each pair of `exchange_pairs` (i holds tokens, j computes heads),
            [pairs]; inward it goes from i to j, else from j to i.
    """

    way: Literal["forward", "backward"]
    inward: bool
    half: int
    size: Floats


def all_to_all_bytes(plan: PlanArrays, job: Job) -> list[AllToAll]:
    """Return the all-to-alls of a layer, with the bytes of their messages.

    forward in:    T_i (h_j D + k_j (D + V)) B e    query, key and value
    forward out:   T_i h_j V B e                    output
    backward in:   T_i h_j V B e                    its gradient
    backward out:  T_i (h_j D + k_j (D + V)) B e    three gradients

    D is the size of a head's query and key, V that of its value; where latent columns travel, they are one KV
    head of C + R in place of D + V.

    Where all-to-alls are cut into halves, each carries half of the query heads. Keys and values travel with
    the first half, their gradients with the last.

    Layers with a state send the columns of a member's heads and of the groups that these heads read inward,
    and the heads' outputs outward, uncut; the backward pass sends the gradients of both. Short convolutions
    send the rows of a halo inward, and their gradients back. Other layers without attention send nothing.
    """
    holder, taker = exchange_pairs(plan, job)
    if not job.model.has_attention:
        return _column_bytes(plan, job)
    tokens = plan.tokens[holder].astype(float) * (job.micro_batch_size * job.element_bytes)
    keys = tokens * job.exchanged_columns * plan.kv[taker]
    halves = [plan.heads_first, plan.heads - plan.heads_first] if plan.in_halves else [plan.heads]
    queries = [tokens * job.model.head_dim * half[taker] for half in halves]
    outputs = [tokens * job.model.value_dim * half[taker] for half in halves]
    ways: list[tuple[Literal["forward", "backward"], bool, int | None]]
    ways = [("forward", True, 0), ("forward", False, None), ("backward", True, None)]
    ways.append(("backward", False, len(halves) - 1))
    return [
        AllToAll(way, inward, half, size + keys if half == with_keys else size)
        for way, inward, with_keys in ways
        for half, size in enumerate(outputs if with_keys is None else queries)
    ]


def halo_bytes(job: Job) -> float:
    """Return the bytes of the rows before its own that a rank receives in a layer; 0 where it needs none."""
    elements = job.model.mixer.halo_elements(job.model, job.tensor_parallel)
    return elements * job.micro_batch_size * job.element_bytes


def exchange_pairs(plan: PlanArrays, job: Job) -> tuple[Ints, Ints]:
    """Return the units i and j of all messages of `all_to_all_bytes`, of which i holds tokens, [pairs] each.

    Rows of a halo go from each unit with tokens to the next one of its domain, and from the last to the
    first: in the nested layout nearly every unit has one before it.
    """
    if not halo_bytes(job):
        return plan.all_to_all_pairs
    units = plan.slots[plan.tokens[plan.slots] > 0]
    domain = plan.unit_replica[units]
    is_last = np.append(domain[:-1] != domain[1:], True)
    following = np.where(is_last, units[np.searchsorted(domain, domain)], np.roll(units, -1))
    return units[units != following], following[units != following]


def _column_bytes(plan: PlanArrays, job: Job) -> list[AllToAll]:
    """Return the all-to-alls of a layer without attention, with the bytes of their messages."""
    holder, taker = exchange_pairs(plan, job)
    tokens = plan.tokens[holder].astype(float)
    outputs = np.zeros(len(holder))
    columns = np.full(len(holder), halo_bytes(job))
    for state in job.model.scans:
        heads, groups = state_shares(plan, job)
        unit = tokens * (job.micro_batch_size * job.element_bytes)
        columns = unit * (heads * state.head_columns + groups * state.group_columns)[taker]
        outputs = unit * (heads * state.head_dim)[taker]
    return [
        AllToAll("forward", True, 0, columns),
        AllToAll("forward", False, 0, outputs),
        AllToAll("backward", True, 0, outputs),
        AllToAll("backward", False, 0, columns),
    ]


class Halves(NamedTuple):
    """Seconds of each unit's longest message in both halves of an all-to-all, forward and backward, [2, U].

    Args:
        shown: seconds of the half that units wait for: before attention the first, after attention the last.
        hidden: seconds of the half that travels during computation; 0 where all-to-alls are not cut.
    """

    shown: Floats
    hidden: Floats


def all_to_alls(plan: PlanArrays, job: Job, links: LinkTable, gpus: Ints) -> tuple[Halves, Halves]:
    """Return the seconds of a layer's all-to-alls, where all groups of all replicas send at the same time.

    Args:
        gpus: the first GPU of each unit, [U].

    Returns:
        The all-to-alls before attention, and those after attention.
    """
    holder, taker = exchange_pairs(plan, job)
    units, nothing = len(plan.tokens), np.zeros((2, len(plan.tokens)))
    if not len(holder) or not (job.model.has_attention or job.model.state or halo_bytes(job)):
        return (Halves(nothing, nothing),) * 2
    moves = all_to_all_bytes(plan, job)
    # Both directions in one call, as separate sets of messages: that is faster.
    src, dst = np.concatenate([holder, taker]), np.concatenate([taker, holder])
    sets = np.repeat([0, 1], len(holder))
    sizes = [[move.size for move in moves if move.inward is way] for way in (True, False)]
    both = np.concatenate(sizes, axis=1)
    seconds = links.message_seconds(gpus[src], gpus[dst], both, sets, job.tensor_parallel)
    if not job.model.has_attention:  # a unit may have heads of attention and none with a state
        seconds = seconds * (both > 0)
    longest = np.zeros((len(both), 2 * units))
    for row, times in zip(longest, seconds, strict=True):
        np.maximum.at(row, sets * units + src, times)
        np.maximum.at(row, sets * units + dst, times)
    # By half, both passes of each.
    inward, outward = np.split(longest.reshape(2, -1, 2 * units).swapaxes(0, 1), 2, axis=2)
    if len(inward) == 1:
        return Halves(inward[0], nothing), Halves(outward[0], nothing)
    return Halves(*inward), Halves(*outward[::-1])


def tensor_parallel_seconds(job: Job, rows: Floats, bandwidth: Floats, latency: Floats) -> Floats:
    """Return the seconds of one all-reduce of rows x hidden inside each unit, [U].

    2 (t - 1) / t x rows h e / bandwidth + 2 (t - 1) latency, t ranks (Thakur et al., Optimization of
    collective communication operations in MPICH, 2005). Each part of a layer has one in each direction.

    Args:
        rows: B x T of each unit, [U].
        bandwidth: bandwidth of the links inside each unit's node, bytes/s, [U].
        latency: seconds of latency of a message inside the node, [U].
    """
    tp = job.tensor_parallel
    if tp == 1:
        return np.zeros(rows.shape)
    size = rows * job.model.hidden_size * job.element_bytes
    return np.where(rows > 0, 2 * (tp - 1) / tp * size / bandwidth + 2 * (tp - 1) * latency, 0.0)


def loss_sum_seconds(job: Job, rows: Floats, bandwidth: Floats, latency: Floats) -> Floats:
    """Return the seconds of the tensor-parallel collectives of the last stage outside its layers, [U].

    One is for the loss. A block of multi-token prediction has one for its own loss, two for the input of its
    projection, which is 2 h wide, and one for the projection's output, which Megatron gathers. For the
    arguments see `tensor_parallel_seconds`.
    """
    return (1 + 4 * job.model.mtp_layers) * tensor_parallel_seconds(job, rows, bandwidth, latency)


def pipeline_seconds(links: LinkTable, job: Job, rows: Floats, gpus: Ints, following: Ints) -> float:
    """Return the seconds of a micro-batch's activations from a stage to the next, or of the gradients back.

    All units send at the same time, rows h e bytes each; with sequence parallelism each tensor-parallel rank
    sends only its part of the rows.

    Args:
        rows: B x T of each unit, [U].
        gpus: first GPU of each sending unit, [U].
        following: first GPU of each receiving unit, [U].
    """
    size = rows * job.model.hidden_size * job.element_bytes / job.row_parts
    return links.set_seconds(gpus, following, size, job.tensor_parallel)
