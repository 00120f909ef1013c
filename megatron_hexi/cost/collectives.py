"""What travels besides the exchange: all-to-alls, sums in units, gradients and weights, pipeline sends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.job import Job
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.plan_arrays import PlanArrays


@dataclass(frozen=True, eq=False)
class AllToAlls:
    """The four all-to-alls of a layer, seconds of each unit's longest message, [U]."""

    forward_in: Floats
    forward_out: Floats
    backward_in: Floats
    backward_out: Floats


def all_to_all_bytes(plan: PlanArrays, job: Job) -> tuple[Floats, Floats, Floats, Floats]:
    """Bytes of each pair of `PlanArrays.all_to_all_pairs` (holder i of tokens, taker j of heads).

    forward in:   i to j, T_i (h_j + 2 k_j) B D e    query, key and value
    forward out:  j to i, T_i h_j B D e              output
    backward in:  i to j, T_i h_j B D e              its gradient
    backward out: j to i, T_i (h_j + 2 k_j) B D e    three gradients
    """
    holder, taker = plan.all_to_all_pairs
    element = job.micro_batch_size * job.model.head_dim * job.element_bytes
    tokens, heads = plan.tokens[holder].astype(float) * element, plan.heads[taker]
    one: Floats = tokens * heads
    three: Floats = tokens * (heads + 2 * plan.kv[taker])
    return three, one, one, three


def all_to_alls(plan: PlanArrays, job: Job, links: LinkTable, gpus: Ints) -> AllToAlls:
    """All groups of all replicas at once.

    Args:
        plan: the plan.
        job: the job.
        links: the cluster's.
        gpus: the first GPU of each unit, [U].
    """
    holder, taker = plan.all_to_all_pairs
    three, one, _, _ = all_to_all_bytes(plan, job)
    there, back = (holder, taker), (taker, holder)

    def seconds(ends: tuple[Ints, Ints], size: Floats) -> Floats:
        message = links.message_seconds(gpus[ends[0]], gpus[ends[1]], size, width=job.tensor_parallel)
        longest = np.zeros(len(plan.tokens))
        np.maximum.at(longest, ends[0], message)
        np.maximum.at(longest, ends[1], message)
        return longest

    return AllToAlls(seconds(there, three), seconds(back, one), seconds(there, one), seconds(back, three))


def tensor_parallel_seconds(job: Job, rows: Floats, bandwidth: Floats, latency: Floats) -> Floats:
    """One all-reduce (or reduce-scatter and all-gather) of rows x hidden inside each unit, as rings.

    2 (t - 1) / t x rows h e / bandwidth + 2 (t - 1) latency, t ranks (Thakur et al., Optimization of
    collective communication operations in MPICH, 2005). A layer has two of them in each direction.

    Args:
        job: the job.
        rows: B x T of each unit.
        bandwidth: of its node's links, bytes/s.
        latency: of a message there, s.
    """
    tp = job.tensor_parallel
    size = rows * job.model.hidden_size * job.element_bytes
    return np.where(rows > 0, 2 * (tp - 1) / tp * size / bandwidth + 2 * (tp - 1) * latency, 0.0)


def ring_seconds(links: LinkTable, gpus: Ints, size: float, width: int) -> float:
    """One pass of a ring over units in rank order: a reduce-scatter or an all-gather of `size` bytes.

    (U - 1) / U x size over the slowest link that the ring crosses, and U - 1 latencies: ring
    algorithms as NCCL's (Thakur et al., 2005). Rings of a unit's tensor-parallel ranks run beside it.

    Args:
        links: the cluster's.
        gpus: the first GPU of each unit, [U].
        size: bytes of the whole buffer on one GPU.
        width: tensor-parallel size.
    """
    units = len(gpus)
    if units == 1:
        return 0.0
    following = np.roll(gpus, -1)
    each = np.full(units, (units - 1) / units * size)
    once = links.set_seconds(gpus, following, each, width)
    # A message's latency is in `once` already; the ring has U - 1 steps of it.
    latency = float(links.message_seconds(gpus, following, np.zeros(units)).max())
    return once + (units - 2) * latency


def pipeline_seconds(links: LinkTable, job: Job, rows: Floats, gpus: Ints, following: Ints) -> float:
    """Activations of a micro-batch from a stage to the next, all units at once: rows h e bytes each.

    With sequence parallelism each tensor-parallel rank sends its rows only. The way back takes as long.
    """
    size = rows * job.model.hidden_size * job.element_bytes / job.row_parts
    return links.set_seconds(gpus, following, size, job.tensor_parallel)
