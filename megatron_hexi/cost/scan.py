"""Work of heads with a state over the tokens of a group: convolution, chunked scan, and gates.

A scan computes a chunk of tokens at once: products of all its pairs, the state that it leaves, and what its
tokens read of the state before it. Products run at the rate of attention without a mask over as many tokens
as a chunk has, and what is read and written at the memory's bandwidth. That is an estimate: no measured rate
is known here, and that kernels hand a state on from chunk to chunk, head by head, is not counted.

Shape letters: G tokens of the group, P inputs of a head, N size of a key, Q tokens of a chunk, e bytes an
element.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.compute import Speeds, rates
from megatron_hexi.cost.job import Job
from megatron_hexi.cost.layer_kinds import CHUNKS, State
from megatron_hexi.cost.plan_arrays import Grouping
from megatron_hexi.cost.products import Times
from megatron_hexi.plan.heads import kv_range
from megatron_hexi.plan.state_heads import state_heads


class TokenWork(NamedTuple):
    """FLOPs and bytes of one token, each forward and backward."""

    flops: tuple[float, float]
    bytes: tuple[float, float]


def head_work(state: State, element: int) -> TokenWork:
    """Return the work of one head.

    FLOPs, 2 a product. Mamba, whose blocks above the diagonal are left out, as mamba_ssm's ssd_combined.py:
    forward:  pairs Q P; the state that is left, and what is read of it, 2 N P each
    backward: states again 2 N P; gradients of states, inputs, keys and queries 8 N P; pairs 3 Q P
    Delta net, whole blocks, as fla/ops/gated_delta_rule/chunk.py:
    forward:  keys by keys 2 Q N, solved for inputs and keys 2 Q (N + P); the state by keys, what is left of
              it and what is read of it 6 N P; pairs 2 Q (N + P)
    backward: solved, and states, once more 2 Q (N + P) + 4 N P; gradients 12 N P + Q (14 N + 8 P) + 4 Q^2

    Elements, c = N P / Q of a state a token:
    Mamba   forward:  convolution 2 P, inputs twice, gate and output 4 P; states 8 bytes and 2 e of c
            backward: convolution again and its gradient 5 P, the kernels of a scan's gradient 16 P; states
                      28 bytes and 4 e of c
    delta   forward:  convolution 2 P, keys and queries repeated 2 N, values copied 2 P, kernels 7 N + 6 P,
                      the matrix of pairs 8 bytes and 2 e of Q, states 2 c, gated norm 3 P
            backward: 19 N + 25 P, 2 Q, 4 c likewise
    """
    size, key, chunk = state.head_dim, state.key_dim, CHUNKS[state.kind]
    area, kept = key * size, key * size / chunk
    if state.kind == "mamba":
        return TokenWork(
            (chunk * size + 4.0 * area, 3.0 * chunk * size + 10 * area),
            (6 * size * element + (8 + 2 * element) * kept, 21 * size * element + (28 + 4 * element) * kept),
        )
    forward = 6.0 * area + chunk * (6 * key + 4 * size)
    backward = 16.0 * area + chunk * (16 * key + 10 * size) + 4 * chunk**2
    return TokenWork(
        (forward, backward),
        (
            element * (9 * key + 13 * size + 2 * chunk + 2 * kept) + 8.0 * chunk,
            element * (19 * key + 25 * size + 2 * chunk + 4 * kept),
        ),
    )


def group_work(state: State, element: int) -> TokenWork:
    """Return the work of one group of heads that share keys and queries.

    Mamba: queries by keys Q N forward, three times that backward; keys and queries through the convolution
    4 N forward, 10 N backward, in kernels 4 N and 8 N, their products in fp32 8 Q and 16 Q bytes. Delta nets:
    convolution 4 N and 6 N, norm 4 N and 6 N, read to be repeated 2 N each way.
    """
    key, chunk = state.key_dim, CHUNKS[state.kind]
    if state.kind == "mamba":
        return TokenWork(
            (1.0 * chunk * key, 3.0 * chunk * key),
            (8.0 * key * element + 8 * chunk, 18.0 * key * element + 16 * chunk),
        )
    return TokenWork((0.0, 0.0), (10.0 * key * element, 14.0 * key * element))


def scan_times(speeds: Speeds, job: Job, tokens: Floats) -> tuple[Times, Times]:
    """Return seconds of one head, and of one group of heads, over so many tokens of the job's micro-batch."""
    state = job.model.state
    assert state is not None, "layers with a state are asked for"
    at = np.array([float(CHUNKS[state.kind])])
    forward, backward = (float(rates(curve, at)[0]) for curve in (speeds.full.forward, speeds.full.backward))
    rows = job.micro_batch_size * tokens

    def seconds(work: TokenWork) -> Times:
        return Times(
            rows * (work.flops[0] / forward + work.bytes[0] / speeds.memory),
            rows * (work.flops[1] / backward + work.bytes[1] / speeds.memory),
        )

    return seconds(head_work(state, job.element_bytes)), seconds(group_work(state, job.element_bytes))


def whole_scan_times(speeds: Speeds, job: Job, tokens: Floats) -> Times:
    """Return seconds of all heads of a tensor-parallel rank over so many tokens."""
    state = job.model.state
    assert state is not None, "layers with a state are asked for"
    heads, groups = (count / job.tensor_parallel for count in (state.heads, state.groups))
    head, group = scan_times(speeds, job, tokens)
    return Times(*(heads * one + groups * shared for one, shared in zip(head, group, strict=True)))


def state_shares(plan: Grouping, job: Job) -> tuple[Ints, Ints]:
    """Return each unit's heads with a state, and the groups that these read, [U] each.

    They are those of the runtime: of all in proportion to attention's, by largest remainder.
    """
    state = job.model.state
    assert state is not None, "layers with a state are asked for"
    local, shared_by = state.heads // job.tensor_parallel, state.heads // state.groups
    heads, groups = np.zeros((2, len(plan.slots)), dtype=np.int64)
    for number, found in enumerate(plan.head_class.tolist()):
        members = plan.slots[plan.first_slot[number] : plan.first_slot[number + 1]]
        held = state_heads(plan.head_ranges[found], local)
        read = [kv_range(own, shared_by) for own in held]
        heads[members] = [stop - start for start, stop in held]
        groups[members] = [stop - start for start, stop in read]
    return heads, groups
