"""Rotary embeddings at the rank's true positions.

Without this, training runs silently with a loss that is wrong in its fifth digit.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.errors import PlanError
from megatron_hexi.megatron.packing import packed_shard
from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.patching import patched

_ROTARY = "megatron.core.models.common.embeddings"
#: A group for what need not be cut.
ALONE: Final = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


@patched(
    f"{_ROTARY}.rope_utils:get_pos_emb_on_this_cp_rank",
    why="takes the embeddings of the plan's positions instead of two equal chunks",
)
def _at_positions(
    original: Callable[..., Tensor], pos_emb: Tensor, seq_dim: int, cp_group: dist.ProcessGroup
) -> Tensor:
    session = active_session()
    if session is None:
        return original(pos_emb, seq_dim, cp_group)
    assert pos_emb.shape[seq_dim] == session.seq_length, "embeddings must cover the whole sequence"
    return pos_emb.index_select(seq_dim, session.shard.positions)


@patched(
    f"{_ROTARY}.rope_utils:_apply_rotary_pos_emb_thd",
    only=">=0.19",  # before, packed sequences are refused under a plan
    why="takes the embeddings of the plan's positions in each document instead of two equal chunks",
)
def _at_positions_in_documents(
    original: Callable[..., Tensor],
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: dist.ProcessGroup | None = None,
    multi_latent_attention: bool | None = None,
) -> Tensor:
    session = active_session()
    if session is None:
        rest = rotary_interleaved, mla_rotary_interleaved, mscale, cp_group, multi_latent_attention
        return original(t, cu_seqlens, freqs, *rest)
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    packed, terms = packed_shard(session, cu_seqlens), session.given.terms
    rows = packed.shard.positions if terms.has_axes else packed.in_document
    turned: Tensor = _apply_rotary_pos_emb_bshd(
        t.unsqueeze(1),
        freqs.index_select(0, rows),
        rotary_interleaved=rotary_interleaved,
        mla_rotary_interleaved=mla_rotary_interleaved,
        mscale=mscale,
    )
    return turned.squeeze(1)


def _length(session: Session) -> int:
    """Return the number of positions with embeddings; with padding where Megatron takes them as they are."""
    from megatron.core import parallel_state

    alone = parallel_state.get_context_parallel_world_size() == 1
    return session.shard.rows if alone else session.seq_length


@patched(
    f"{_ROTARY}.rotary_pos_embedding:RotaryEmbedding.get_rotary_seq_len",
    why="the whole sequence is not the local length times the number of ranks",
    parameters=(
        *("self", "inference_context", "transformer", "transformer_input", "transformer_config"),
        *("packed_seq_params", "inference_params"),
    ),
)
def _of_whole_sequence(original: Callable[..., int], self: Any, *args: Any, **kwargs: Any) -> int:
    session = active_session()
    return original(self, *args, **kwargs) if session is None else _length(session)


@patched(
    f"{_ROTARY}.rotary_pos_embedding:MultimodalRotaryEmbedding.forward",
    only=">=0.19",  # before, positions on three axes are refused under a plan
    why="takes the positions of the plan's rows on three axes instead of two equal chunks",
)
def _on_three_axes(
    original: Callable[..., Tensor],
    self: Any,
    position_ids: Tensor | None,
    mrope_section: list[int],
    cp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    session = active_session()
    if session is None:
        return original(self, position_ids, mrope_section, cp_group)
    shape = None if position_ids is None else list(position_ids.shape)
    if position_ids is None or len(position_ids) != 3 or position_ids.shape[2:] != (session.seq_length,):
        raise PlanError(
            f"position_ids are {shape}, not [3, B, {session.seq_length}]; give those of whole sequences, in "
            "time, height and width, on each stage"
        )
    own = position_ids[:, session.samples]
    if not session.given.terms.has_documents:  # their ends are not known here; each layer takes its rows
        own = own.index_select(2, session.shard.positions)
    return original(self, own, mrope_section, ALONE)


@patched(
    f"{_ROTARY}.yarn_rotary_pos_embedding:YarnRotaryEmbedding._set_cos_sin_cache",
    why="YaRN at first caches the embeddings of a shorter sequence, which lacks positions of a plan",
)
def _cached_whole(
    original: Callable[..., None],
    self: Any,
    seq_len: int,
    offset: int,
    dtype: torch.dtype,
    packed_seq: bool = False,
) -> None:
    session = active_session()
    original(self, _length(session) if session else seq_len, offset, dtype, packed_seq)


ROTARY_PATCHES = (
    _at_positions,
    _at_positions_in_documents,
    _of_whole_sequence,
    _on_three_axes,
    _cached_whole,
)
