"""The batch: each rank takes the tokens at its own positions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_hexi.errors import PlanError
from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.patching import Patch

#: What is cut along its tokens; everything else in a batch says something about it.
_TOKEN_KEYS = ("tokens", "labels", "loss_mask", "position_ids")

Batch = dict[str, Any]


def cut_batch(batch: Batch, session: Session) -> Batch:
    """Cut a batch of whole sequences down to this rank's rows; changed in place, as Megatron does.

    Args:
        batch: tensors [B, S]; absent ones are ``None``.
        session: what this rank trains by.

    Returns:
        The batch with tensors [B, L].

    Raises:
        PlanError: the sequences are not as long as the plan says, or have a mask of their own.
    """
    shard = session.shard
    if batch.get("attention_mask") is not None:
        raise PlanError(
            "the batch has an attention mask, a plan makes its own; "
            "use --no-create-attention-mask-in-dataloader"
        )
    for key in _TOKEN_KEYS:
        tensor: Tensor | None = batch.get(key)
        if tensor is None:
            continue
        if tensor.shape[1] != session.seq_length:
            raise PlanError(
                f"{key} hold {tensor.shape[1]} tokens, the plan {session.given.path} was made for "
                f"{session.seq_length}; use a plan for this length"
            )
        batch[key] = tensor.index_select(1, shard.positions)
    if batch.get("loss_mask") is not None:
        batch["loss_mask"][:, shard.tokens :] = 0
    return batch


def _by_plan(original: Callable[..., Batch]) -> Callable[..., Batch]:
    @functools.wraps(original)
    def get_batch_on_this_cp_rank(batch: Batch, cp_group: dist.ProcessGroup) -> Batch:
        session = active_session()
        return cut_batch(batch, session) if session else original(batch, cp_group)

    return get_batch_on_this_cp_rank


BATCH_PATCHES = (
    Patch(
        target="megatron.core.utils:_get_batch_on_this_cp_rank_per_sequence_balancing",
        why="takes the tokens at the plan's positions instead of two equal chunks",
        build=_by_plan,
        parameters=("batch", "cp_group"),
    ),
)
