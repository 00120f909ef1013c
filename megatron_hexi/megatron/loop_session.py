"""A plan in a training loop other than Megatron-LM's: its start, its batches, and its means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from megatron_hexi.elastic.store import in_round
from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.megatron.batch import has_three_axes
from megatron_hexi.megatron.documents_ahead import END_KEYS, ends_in
from megatron_hexi.megatron.encoder import Encode, ImageShares
from megatron_hexi.megatron.groups import agree
from megatron_hexi.megatron.loop_job import LoopJob, hold_loop
from megatron_hexi.megatron.packing import PackedShard, packed_shard
from megatron_hexi.megatron.session import (
    Session,
    active_session,
    given_plan,
    set_active_session,
    set_given_plan,
)
from megatron_hexi.patching import PatchSet

#: Entries of a batch that describe its documents, which every rank needs whole.
_OF_DOCUMENTS: Final = frozenset((*END_KEYS, "max_seqlen"))


@dataclass(frozen=True)
class LoopSession:
    """This rank's part of a plan.

    B are the sequences of a micro-batch, T the tokens of a sequence, L this rank's rows: its tokens, and
    padding behind them. With documents B is 1, and each micro-batch has rows of its own.

    Args:
        micro_batches: numbers of the micro-batches of each global batch that this rank's replica takes.
    """

    micro_batches: range
    _session: Session

    @property
    def positions(self) -> Tensor:
        """Return the place of each row in a sequence without documents, [L]; -1 for padding."""
        shard = self._session.shard
        return torch.cat([shard.positions[: shard.tokens], shard.positions[shard.tokens :] - 1])

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's rows of a batch.

        Args:
            batch: tensors [B, T, …] of whole sequences by name, equal on all ranks of a replica; or ``None``.
                With documents, ``cu_seqlens`` (or ``cu_seqlens_padded``) has 0 and the end of each.

        Returns:
            Tensors [B, L, …], which are 0 in padding rows; what describes documents, and ``position_ids`` on
            three axes, [3, B, T], as they were. A ``loss_mask`` is added where the batch has none: 1 for
            tokens.

        Raises:
            PlanError: a tensor, or its documents, are not as long as the plan's sequences.
        """
        shard = self._rows(ends_in(batch)).shard
        rows, length = dict(batch), self._session.seq_length
        for name, tensor in batch.items():
            is_whole = name in _OF_DOCUMENTS or (isinstance(tensor, Tensor) and has_three_axes(name, tensor))
            if tensor is None or is_whole:
                continue
            if not isinstance(tensor, Tensor) or tensor.dim() < 2 or tensor.shape[1] != length:
                shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise PlanError(
                    f"batch[{name!r}] is {shape}, not [B, {length}, …]; give whole sequences, or no {name!r}"
                )
            if rows.get("loss_mask") is None:
                rows["loss_mask"] = torch.ones(len(tensor), shard.rows, device=tensor.device)
            rows[name] = tensor.index_select(1, shard.positions)
            rows[name][:, shard.tokens :] = 0
        if rows.get("loss_mask") is not None:
            rows["loss_mask"][:, shard.tokens :] = 0
        return rows

    def encode(
        self,
        encode: Encode,
        pixels: Tensor,
        grids: Tensor,
        seen: Tensor,
        merge: int = 1,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the features of a micro-batch's images, each image encoded by one rank of the sequence.

        The plan's `patches` say how images are divided; without them each rank encodes all. All ranks that
        hold a part of the sequences must call it, also for a micro-batch without images. In the backward
        pass the encoder's weights get the gradients of a rank's own images, which add up over ranks.

        Args:
            encode: the encoder: a function of the patches, [N, P], and the sizes, [I, 3], of some images that
                returns their features, [N / merge^2, H], for each image by itself.
            pixels: patches of all images, [N, P], equal on all ranks.
            grids: frames, height and width of each image in patches, [I, 3]; frames are divided, too.
            seen: whether a token stands for a feature, [B, T]; features are in the order of these tokens.
            merge: side of the square of patches of which one feature is made.
            documents: ends of the documents, as in `shard`.

        Returns:
            Features of all images, [F, H], which are 0 outside this rank's rows: merge them with the texts'
            embeddings before `shard`.

        Raises:
            PlanError: images and tokens do not have equally many features.
        """
        images = ImageShares.of(self._session, grids, merge, seen, self._rows(documents).documents)
        return images.whole(images.encode(encode, pixels))

    def unshard(self, values: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return per-token values in the sequence's order, on every rank that holds a part of the sequence.

        All these ranks must call it. In the backward pass the gradients of all of them are summed, as those
        of a loss that all ranks compute and `reduce` averages must be.

        Args:
            values: values of this rank's rows, [B, L, …]; those of padding rows are not used.
            documents: ends of the documents, as in `shard`.

        Returns:
            Values [B, T, …].

        Raises:
            PlanError: the values are not of this rank's rows.
        """
        shard = self._rows(documents).shard
        if values.dim() < 2 or values.shape[1] != shard.rows:
            raise PlanError(f"values are {list(values.shape)}, not [B, {shard.rows}, …]; give all rows")
        whole = values.new_zeros(values.shape[0], self._session.seq_length, *values.shape[2:])
        own = whole.index_copy(1, shard.positions[: shard.tokens], values[:, : shard.tokens])
        gathered: Tensor = all_reduce(own, group=self._session.attention.domain_group)
        return gathered

    def reduce(self, total: Tensor, count: Tensor) -> Tensor:
        """Return the mean over the tokens of all ranks; every rank of the job must call it.

        Its backward pass gives each rank its part of the gradient: add the ranks' gradients of a weight.
        Megatron's own schedules divide by the tokens themselves; there this is for the log.

        Args:
            total: sum of a loss over this rank's tokens, a scalar; 0 on other stages than the last.
            count: number of these tokens, without padding and masked ones; likewise.
        """
        from megatron.core import parallel_state

        sums = torch.stack([total.detach().double(), count.detach().double()])
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
        tokens = sums[1].clamp(min=1)
        return (sums[0] / tokens).to(total.dtype) + (total - total.detach()) / tokens.to(total.dtype)

    def _rows(self, documents: Tensor | None) -> PackedShard:
        terms = self._session.given.terms
        if (documents is not None) != terms.has_documents:
            raise PlanError(
                "the job was started without documents, but the batch has their ends; give LoopJob arguments="
                "{'dataloader_inter_document_masking': True}, or leave cu_seqlens out"
                if not terms.has_documents
                else "the job was started with documents, but the batch has no cu_seqlens; give their ends"
            )
        return packed_shard(self._session, documents)


def start_loop(plan: str | Path, job: LoopJob, device: torch.device, patches: PatchSet) -> LoopSession:
    """Start a loop by a plan; return its session. See `megatron_hexi.api.start`."""
    from megatron.core import parallel_state

    if not dist.is_initialized():
        raise HexiError("start: torch.distributed has no process group; call init_process_group before")
    if parallel_state.model_parallel_is_initialized():
        raise HexiError("start: Megatron has groups already; call start, not initialize_model_parallel")
    if in_round():
        raise HexiError("start: an elastic job needs Megatron-LM's loop; start with torchrun")
    rank, world_size, mistake = dist.get_rank(), dist.get_world_size(), ""
    try:
        held = hold_loop(plan, job, device)
    except HexiError as problem:
        set_given_plan(None)
        mistake = str(problem)
    minutes = job.arguments.get("distributed_timeout_minutes", 10)  # Megatron's default
    agree(given_plan(), rank, world_size, timedelta(minutes=minutes), mistake=mistake)
    patches.install()
    args = held.args
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        nccl_communicator_config_path=args.nccl_communicator_config_path,
        distributed_timeout_minutes=minutes,
    )
    held.apply()
    session = active_session()
    assert session is not None, "Megatron's groups were made under the plan"
    # The loop runs its own number of micro-batches, where Megatron-LM's runs that of the whole batch.
    set_active_session(replace(session, share=None))
    total, share = job.global_batch_size // job.micro_batch_size, session.share
    if share is None:
        return LoopSession(range(session.replica, total, len(session.given.plan.replicas)), session)
    return LoopSession(range(share.first, share.first + share.count), session)
