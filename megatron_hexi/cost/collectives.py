"""Seconds of all-to-alls, tensor-parallel all-reduces and sends between stages; rings are in rings.py."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Bools, Floats, Ints
from megatron_hexi.cost.mixing import Mixing
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.models.job import Job


class Halves(NamedTuple):
    """Seconds of each unit's longest message in both halves of an all-to-all, forward and backward, [2, U].

    Args:
        shown: seconds of the half that units wait for: before attention the first, after attention the last.
        hidden: seconds of the half that travels during computation; 0 where all-to-alls are not cut.
    """

    shown: Floats
    hidden: Floats


def all_to_alls(mixing: Mixing, links: LinkTable, gpus: Ints, tensor_parallel: int) -> tuple[Halves, Halves]:
    """Return the seconds of a layer's all-to-alls, where all groups of all replicas send at the same time.

    Args:
        gpus: the first GPU of each unit, [U].

    Returns:
        The all-to-alls before attention, and those after attention.
    """
    (holder, taker), moves = mixing.pairs, mixing.all_to_alls()
    units, nothing = len(gpus), np.zeros((2, len(gpus)))
    if not len(holder):
        return (Halves(nothing, nothing),) * 2
    # Both directions in one call, as separate sets of messages: that is faster.
    src, dst = np.concatenate([holder, taker]), np.concatenate([taker, holder])
    sets = np.repeat([0, 1], len(holder))
    sizes = [[move.size for move in moves if move.inward is way] for way in (True, False)]
    both = np.concatenate(sizes, axis=1)
    seconds = links.message_seconds(gpus[src], gpus[dst], both, sets, tensor_parallel)
    if not mixing.is_attention:  # a unit may have heads of attention and none with a state
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


def tensor_parallel_seconds(
    job: Job, rows: Floats, bandwidth: Floats, latency: Floats, in_fp8: Bools | bool = False
) -> Floats:
    """Return the seconds of one all-reduce of rows x hidden inside each unit, [U].

    2 (t - 1) / t x rows h e / bandwidth + 2 (t - 1) latency, t ranks (Thakur et al., Optimization of
    collective communication operations in MPICH, 2005). Each part of a layer has one in each direction. Under
    sequence parallelism its first half gathers rows, which Transformer Engine casts to fp8 before.

    Args:
        rows: B x T of each unit, [U].
        bandwidth: bandwidth of the links inside each unit's node, bytes/s, [U].
        latency: seconds of latency of a message inside the node, [U].
        in_fp8: whether each unit multiplies in fp8.
    """
    tp = job.tensor_parallel
    if tp == 1:
        return np.zeros(rows.shape)
    gathered = np.where(in_fp8, 1, job.element_bytes) if job.row_parts > 1 else job.element_bytes
    size = rows * job.model.hidden_size * (gathered + job.element_bytes) / 2
    return np.where(rows > 0, 2 * (tp - 1) / tp * size / bandwidth + 2 * (tp - 1) * latency, 0.0)


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
