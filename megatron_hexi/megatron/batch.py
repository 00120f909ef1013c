"""The batch of a rank: the tokens at its own positions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_hexi.errors import PlanError
from megatron_hexi.megatron.documents_ahead import ends_in
from megatron_hexi.megatron.packing import packed_shard
from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.patching import Patch

#: Tensors of a batch that are cut along their tokens.
TOKEN_KEYS = ("tokens", "labels", "loss_mask", "position_ids")

Batch = dict[str, Any]


def cut_batch(batch: Batch, session: Session) -> Batch:
    """Cut a batch of whole sequences down to this rank's rows; changed in place, as in Megatron.

    Args:
        batch: tensors [B, S] by name, ``None`` where absent; with ends of documents, B is 1. Positions on
            three axes, [3, B, S], stay whole: their rotary embedding takes those of the rank's rows.

    Returns:
        The batch with tensors [B, L].

    Raises:
        PlanError: the sequences are not as long as the plan says, or have a mask of their own.
    """
    shard = packed_shard(session, ends_in(batch)).shard
    if batch.get("attention_mask") is not None:
        raise PlanError(
            "the batch has an attention mask, a plan makes its own; "
            "use --no-create-attention-mask-in-dataloader"
        )
    for key in TOKEN_KEYS:
        tensor: Tensor | None = batch.get(key)
        if tensor is None or has_three_axes(key, tensor):
            continue
        if tensor.shape[1] != session.seq_length:
            raise PlanError(
                f"{key} hold {tensor.shape[1]} tokens, the plan {session.given.path} was made for "
                f"{session.seq_length}; use a plan for this length"
            )
        batch[key] = tensor[session.samples].index_select(1, shard.positions)
    if batch.get("loss_mask") is not None:
        batch["loss_mask"][:, shard.tokens :] = 0
    return batch


def has_three_axes(key: str, tensor: Tensor) -> bool:
    """Return whether a tensor of a batch holds positions in time, height and width, [3, B, S]."""
    return key == "position_ids" and tensor.dim() == 3


def _by_plan(original: Callable[..., Batch]) -> Callable[..., Batch]:
    @functools.wraps(original)
    def get_batch_on_this_cp_rank(batch: Batch, cp_group: dist.ProcessGroup | None = None) -> Batch:
        session = active_session()
        return cut_batch(batch, session) if session else original(batch, cp_group)

    return get_batch_on_this_cp_rank


#: Functions that cut a batch, with the versions of Megatron that have them under this name.
_CUTTERS = (
    ("get_batch_on_this_cp_rank", "<0.18"),
    ("get_pretrain_batch_on_this_cp_rank", ">=0.18,<0.19"),
    ("_get_batch_on_this_cp_rank_per_sequence_balancing", ">=0.19"),
    ("_get_batch_on_this_cp_rank_per_document_balancing", ">=0.19"),
)

BATCH_PATCHES = tuple(
    Patch(
        target=f"megatron.core.utils:{cutter}",
        why="takes the tokens at the plan's positions instead of two equal chunks",
        build=_by_plan,
        parameters=("batch", "cp_group"),
        only=versions,
    )
    for cutter, versions in _CUTTERS
)
