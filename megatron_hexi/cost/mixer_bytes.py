"""Bytes on one GPU of what mixes tokens in a layer, by the kind of its mixer.

Shape letters: B micro-batch, T tokens of the unit, G tokens of its group, P inputs of a head, N size of a
key, Q tokens of a chunk, h heads with a state, g groups of these heads, e bytes an element.
"""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.layer_bytes import (
    attention_bytes,
    is_alone_in_group,
    token_qkv_bytes,
    working_set_bytes,
)
from megatron_hexi.kinds import ShortConv, State
from megatron_hexi.kinds.attention import SoftmaxAttention
from megatron_hexi.kinds.part import LayerPart
from megatron_hexi.models.job import Job

if TYPE_CHECKING:
    from megatron_hexi.cost.memory import Holdings


class MixerBytes(NamedTuple):
    """Bytes of a layer's mixer and a micro-batch, [U].

    Args:
        kept: bytes that are kept for the backward pass.
        working: bytes that the layer needs at its peak, in the backward pass.
        kept_again: bytes that are kept where the job's modules are computed again.
        working_again: bytes that the layer needs at its peak in that case.
    """

    kept: Floats
    working: Floats
    kept_again: Floats
    working_again: Floats


@singledispatch
def mixer_bytes(mixer: LayerPart, job: Job, held: Holdings, window: int) -> MixerBytes:
    """Return the bytes of a mixer; for an MLP alone, of gradients of its first output and its activation.

    Args:
        job: the job, with layers of one kind.
        window: prefetch depth of the exchange, in steps.
    """
    del mixer, window
    return _uncut(job, held, np.zeros(np.shape(held.heads)), held.tokens * mlp_gradient_bytes(job))


@mixer_bytes.register(ShortConv)
def _(mixer: ShortConv, job: Job, held: Holdings, window: int) -> MixerBytes:
    """Return the bytes of a short convolution: gradients of gates and value, and of the sum in fp32."""
    del mixer, window
    gradients = held.tokens * 2 * job.columns.outputs * job.element_bytes
    return _uncut(job, held, np.zeros(np.shape(held.heads)), gradients)


@mixer_bytes.register(State)
def _(mixer: State, job: Job, held: Holdings, window: int) -> MixerBytes:
    """Return the bytes of a scan, which keeps G e times `State.kept_columns`.

    Columns and their gradients as they travel 2 T C e, all columns C of the rank's layer; of the own heads
    and groups, of c columns, their gradients, what the convolution put out and its gradient 3 G c e; states
    and their gradients in fp32 8 G h N P / Q, outputs and their gradients 2 G h P e.
    """
    del window
    element, (own, read) = job.element_bytes, _own_heads(job, mixer, held.heads)
    kept = job.micro_batch_size * element * held.group_tokens * mixer.kept_columns(own, read)
    columns = own * mixer.head_columns + read * mixer.group_columns
    states = 8 * own * mixer.key_dim * mixer.head_dim / mixer.chunk
    scan = held.group_tokens * (element * (3 * columns + 2 * own * mixer.head_dim) + states)
    moved = 2 * held.tokens * mixer.columns / job.tensor_parallel * element
    return _uncut(job, held, kept, np.maximum(held.tokens * mlp_gradient_bytes(job), moved + scan))


@mixer_bytes.register(SoftmaxAttention)
def _(mixer: SoftmaxAttention, job: Job, held: Holdings, window: int) -> MixerBytes:
    """Return the bytes of attention, the only mixer of which modules are computed again.

    ``core_attn`` keeps query, key and value as they come, in place of those in the heads' layout and of the
    output; ``mla_up_proj`` does not keep those that come, which a unit alone in its group has in no other
    layout.
    """
    del mixer
    sizes = held.tokens, held.group_tokens, held.heads
    kept = attention_bytes(job, *sizes, held.kv)
    working = working_set_bytes(job, *sizes, held.kv, held.flights, window)
    inputs = job.micro_batch_size * held.tokens * token_qkv_bytes(job)
    attends_again, made_again = "core_attn" in job.again, "mla_up_proj" in job.again
    freed = np.where(made_again & (attends_again | is_alone_in_group(job, *sizes)), inputs, 0.0)
    left = (inputs if attends_again else kept) - freed
    return MixerBytes(kept, working, left, working + attends_again * kept + freed)


def _uncut(job: Job, held: Holdings, kept: Floats, inside: Floats) -> MixerBytes:
    """Return the bytes of a mixer that selective recomputation leaves as it is.

    Sequence parallelism: see `working_set_bytes`.
    """
    rows = 2 * (job.row_parts > 1) * held.tokens * job.model.hidden_size * job.element_bytes
    working = job.micro_batch_size * (rows + inside)
    return MixerBytes(kept, working, kept, working)


def mlp_gradient_bytes(job: Job) -> float:
    """Return the bytes of a token's gradients of an MLP's first output and of its activation."""
    return (2 + job.model.gated) * job.columns.activated * job.element_bytes


def _own_heads(job: Job, state: State, heads: Floats) -> tuple[Floats, Floats]:
    """Return a unit's heads with a state, and the state-space groups (`State.groups`) that these heads read.

    The most groups are counted: a range of heads may begin and end inside a group.

    Args:
        heads: heads of attention of each unit, to which heads with a state are in proportion, [U].
    """
    own = heads * state.heads / job.model.heads
    shared_by = state.heads / state.groups
    read = np.ceil(own / shared_by) + (own % shared_by > 0)
    return own, np.minimum(read, state.groups / job.tensor_parallel)
