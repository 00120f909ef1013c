"""Work of heads with a state over the tokens of a group: convolution, chunked scan, and gates.

A scan computes a chunk of tokens at once: products of all its pairs, the state that it leaves, and what its
tokens read of the state before it. Products run at the rate of attention without a mask over as many tokens
as a chunk has, and what is read and written at the memory's bandwidth. That is an estimate: no measured rate
is known here, and that kernels hand a state on from chunk to chunk, head by head, is not counted.
"""

from __future__ import annotations

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.compute import Speeds, rates
from megatron_hexi.cost.plan_arrays import Grouping
from megatron_hexi.cost.products import Times
from megatron_hexi.kinds.state import TokenWork
from megatron_hexi.models.job import Job
from megatron_hexi.plan.heads import kv_range, state_heads


def scan_times(speeds: Speeds, job: Job, tokens: Floats) -> tuple[Times, Times]:
    """Return the seconds of a head and of a group of heads, for `tokens` of each sample of a micro-batch."""
    (state,) = job.model.scans
    at = np.array([float(state.chunk)])
    forward, backward = (float(rates(curve, at)[0]) for curve in (speeds.full.forward, speeds.full.backward))
    rows = job.micro_batch_size * tokens

    def seconds(work: TokenWork) -> Times:
        return Times(
            rows * (work.flops[0] / forward + work.bytes[0] / speeds.memory),
            rows * (work.flops[1] / backward + work.bytes[1] / speeds.memory),
        )

    return seconds(state.head_work(job.element_bytes)), seconds(state.group_work(job.element_bytes))


def whole_scan_times(speeds: Speeds, job: Job, tokens: Floats) -> Times:
    """Return the seconds of all heads of a tensor-parallel rank for `tokens`; 0 without a state."""
    times = np.zeros((2, *np.shape(tokens)))
    for state in job.model.scans:
        heads, groups = (count / job.tensor_parallel for count in (state.heads, state.groups))
        head, group = scan_times(speeds, job, tokens)
        times += heads * np.array(head) + groups * np.array(group)
    return Times(*times)


def state_shares(plan: Grouping, job: Job) -> tuple[Ints, Ints]:
    """Return each unit's heads with a state, and the groups that these read, [U] each.

    As in the runtime, heads are divided in proportion to units' heads of attention, by largest remainder.
    """
    (state,) = job.model.scans
    local, shared_by = state.heads // job.tensor_parallel, state.heads // state.groups
    heads, groups = np.zeros((2, len(plan.slots)), dtype=np.int64)
    for number, found in enumerate(plan.head_class.tolist()):
        members = plan.slots[plan.first_slot[number] : plan.first_slot[number + 1]]
        held = state_heads(plan.head_ranges[found], local)
        read = [kv_range(own, shared_by) for own in held]
        heads[members] = [stop - start for start, stop in held]
        groups[members] = [stop - start for start, stop in read]
    return heads, groups
