"""Bytes on one GPU of layers without attention: heads with a state, or an MLP alone.

Shape letters: B micro-batch, T tokens of the unit, G tokens of its group, P inputs of a head, N size of a
key, Q tokens of a chunk, h heads with a state, g groups of these heads, e bytes an element.
"""

from __future__ import annotations

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.kinds import State
from megatron_hexi.models.job import Job


def scan_bytes(job: Job, group_tokens: Floats, heads: Floats) -> Floats:
    """Return the bytes that a layer keeps of a scan, B G e times `State.kept_columns`; an MLP keeps none.

    Args:
        job: the job, with layers of one kind, without attention.
        group_tokens: G.
        heads: number of the unit's heads of attention, in whose proportion it has heads with a state.
    """
    kept = (state.kept_columns(*_own_heads(job, state, heads)) for state in job.model.scans)
    columns = sum(kept, np.zeros(np.shape(heads)))
    return job.micro_batch_size * job.element_bytes * group_tokens * columns


def scan_working_bytes(job: Job, tokens: Floats, group_tokens: Floats, heads: Floats) -> Floats:
    """Return the bytes that a layer without attention needs at its peak, in the backward pass.

    Columns and their gradients as they travel 2 T C e, all columns C of the rank's layer; of the own heads
    and groups, of c columns, their gradients, what the convolution put out and its gradient 3 G c e; states
    and their gradients in fp32 8 G h N P / Q, outputs and their gradients 2 G h P e. Of an MLP gradients of
    its first output and its activation. Sequence parallelism: see `working_set_bytes`.

    Args:
        job: the job, with layers of one kind, without attention.
        tokens: T.
        group_tokens: G.
        heads: see `scan_bytes`.
    """
    model, element = job.model, job.element_bytes
    whole = 2 * (job.row_parts > 1) * tokens * model.hidden_size * element
    inside = tokens * (2 + model.gated) * job.columns.activated * element
    if model.short_conv is not None:  # gradients of gates and value, and of the sum in fp32
        inside = tokens * 2 * job.columns.outputs * element
    for state in model.scans:
        own, read = _own_heads(job, state, heads)
        columns = own * state.head_columns + read * state.group_columns
        states = 8 * own * state.key_dim * state.head_dim / state.chunk
        scan = group_tokens * (element * (3 * columns + 2 * own * state.head_dim) + states)
        inside = np.maximum(inside, 2 * tokens * state.columns / job.tensor_parallel * element + scan)
    return job.micro_batch_size * (whole + inside)


def _own_heads(job: Job, state: State, heads: Floats) -> tuple[Floats, Floats]:
    """Return a unit's heads with a state, and the state-space groups (`State.groups`) that these heads read.

    The most groups are counted: a range of heads may begin and end inside a group.

    Args:
        state: the state of its layers.
        heads: heads of attention of each unit, to which heads with a state are in proportion, [U].
    """
    own = heads * state.heads / job.model.heads
    shared_by = state.heads / state.groups
    read = np.ceil(own / shared_by) + (own % shared_by > 0)
    return own, np.minimum(read, state.groups / job.tensor_parallel)
