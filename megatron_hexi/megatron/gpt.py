"""Pretraining of a GPT or hybrid model on Megatron's parts: batch, forward step, loss, data sets."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args, parse_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_hexi.kinds.states import layers_with_state
from megatron_hexi.megatron import versions
from megatron_hexi.options.kinds import masks_documents
from megatron_hexi.options.refusals import refuse_unsupported, replace_options
from megatron_hexi.text_file import read_text

#: Inputs of a model, each [B, S] on one context-parallel rank; the mask is [B, 1, S, S].
_FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
#: Tensors with the ends of documents.
_PACKING = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")

_MEGATRON = versions.installed()


def pretrain_from_command_line() -> None:
    """Parse the command line and train.

    Raises:
        HexiError: the command line has an option that this script does not carry out.
    """
    args = parse_args()
    if args.hexi_plan is not None:
        replace_options(args, "any")
    refuse_unsupported(args, "script")  # before Megatron checks these flags
    build_datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank builds its own
    _MEGATRON.train(build_datasets, forward_step, embedding_ranks)


def read_options() -> None:
    """Read the help of Megatron's options from its sources, which takes half a second of a core once."""
    parse_args(ignore_unknown_args=True)


def forward_step(data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[Any, Any]:
    """Run the model on the next microbatch.

    Returns:
        The model's output (on the last pipeline stage the loss of each token, [B, S of this rank]) and the
        function that reduces it.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=_packing(batch),
    )
    # Only the last stage, which has a mask, calls it.
    return output, partial(reduce_loss, cast(torch.Tensor, batch["loss_mask"]))


def get_batch(data_iterator: Iterator[dict[str, torch.Tensor]], vp_stage: int | None) -> versions.Batch:
    """Return this rank's part of the next microbatch; no tokens on a pipeline stage that needs none."""
    args = get_args()
    has_mtp = _MEGATRON.predicts_further_tokens(args, vp_stage)
    is_packed, needs_tokens = _is_packed(args), is_first_or_last_pipeline_stage(vp_stage)
    fields = (*_FIELDS, *_PACKING)
    if not needs_tokens and not has_mtp and not is_packed:
        return dict.fromkeys(fields)

    batch: versions.Batch = {}
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        sample = next(data_iterator)
        batch = {name: sample[name].cuda(non_blocking=True) if name in sample else None for name in fields}
    batch = _MEGATRON.broadcast_batch(
        batch,
        is_packed,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    if needs_tokens or has_mtp:
        batch = _MEGATRON.cut_batch(batch, per_sequence=is_packed and not args.sft)
    return {name: batch.get(name) for name in fields}


def _packing(batch: versions.Batch) -> PackedSeqParams | None:
    """Return the ends of documents for attention; ``None`` where a sequence is one document."""
    ends, longest = batch["cu_seqlens"], batch["max_seqlen"]
    if ends is None or longest is None:
        return None
    from megatron.training.training import update_seqlen_stats_from_cu_seqlens  # not in 0.17

    ends = ends.squeeze(0)
    update_seqlen_stats_from_cu_seqlens(ends)
    padded = batch["cu_seqlens_padded"]
    padded = None if padded is None else padded.squeeze(0)
    used = ends if padded is None else padded
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=used,
        cu_seqlens_kv=used,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=int(longest.item()),
        max_seqlen_kv=int(longest.item()),
        tokens_per_sample=get_args().seq_length,
        # Megatron numbers the documents of the whole sequence by it, for its Mamba layers alone.
        total_tokens=get_args().seq_length if layers_with_state(get_args()) else None,
    )


def reduce_loss(
    loss_mask: torch.Tensor, token_losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the losses of tokens that count, and their number.

    Args:
        loss_mask: 1.0 where a token counts, [B, S of this rank].
        token_losses: loss of each token, of the same shape.

    Returns:
        The sum, the number of tokens, and both under the name in Megatron's log.
    """
    mask = loss_mask.float().view(-1)
    loss = torch.sum(token_losses.float().view(-1) * mask)
    tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for name, is_bad in (("NaN", torch.isnan), ("infinite", torch.isinf)):
            get_rerun_state_machine().validate_result(
                loss, is_bad, f"{name} loss in the forward pass", fatal=True
            )
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def build_datasets(sample_counts: list[int | None], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Return the training, validation and test sets."""
    args = get_args()
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    builder = BlendedMegatronDatasetBuilder(
        SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset,
        sample_counts,
        partial(_needs_dataset, args, vp_stage),
        dataset_config(args),
    )
    train, valid, test = builder.build()
    return train, valid, test


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Return Megatron's data set configuration, from its arguments."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = None
    if args.per_dataset_sequences_path is not None:
        sequences = json.loads(read_text(args.per_dataset_sequences_path))
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequences_per_dataset=sequences,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size if args.sequence_parallel else 0,
        **({"inter_document_masking": True} if masks_documents(args) else {}),  # Megatron 0.19
    )


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline that hold the word embedding: first, sharing, and multi-token ranks."""
    args = get_args()
    ranks = {pipeline_ranks[0]}
    if len(pipeline_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pipeline_ranks[-1])
        ranks.update(get_mtp_ranks(pipeline_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def _is_packed(args: Namespace) -> bool:
    """Return whether samples tell where their documents end."""
    return bool(args.sft or masks_documents(args))


def _needs_dataset(args: Namespace, vp_stage: int | None) -> bool:
    """Return whether this rank reads data: tensor-parallel rank 0, if it needs tokens or documents' ends."""
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    if _is_packed(args):
        return True
    return is_first_or_last_pipeline_stage(vp_stage) or _MEGATRON.predicts_further_tokens(args, vp_stage)
