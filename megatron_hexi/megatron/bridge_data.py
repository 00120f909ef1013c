"""Fine-tuning data of Megatron Bridge under a plan: global batches, short sequences, packed documents.

Bridge's loader for fine-tuning gives a rank its rows of a whole global batch, as long as the longest of them,
which the loop cuts into micro-batches. A plan's sequences all have one length, so shorter ones are padded
behind their last token, where causal attention does not look and no loss is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.nn.functional import pad

from megatron_hexi.megatron.batch import TOKEN_KEYS, Batch, cut_batch
from megatron_hexi.megatron.bridge_checkpoint import OF_BRIDGE
from megatron_hexi.megatron.documents_ahead import AHEAD, Prefetched, ends_in
from megatron_hexi.megatron.session import active_session
from megatron_hexi.patching import patched


def whole_sequences(sample: Batch, length: int) -> Batch:
    """Return a sample with sequences of the plan's length.

    Args:
        sample: tensors [B, L] by name, L at most `length`; with documents, B is 1 and their ends may repeat
            the last one.
        length: tokens of the plan's sequences.

    Returns:
        The sample with tensors [B, length]. Padding belongs to the last document, whose end comes once.
    """
    whole, tokens = dict(sample), sample["tokens"].shape[1]
    for key in TOKEN_KEYS:
        if tokens < length and whole.get(key) is not None:
            whole[key] = pad(whole[key], (0, length - tokens))
    ends = ends_in(sample)
    if ends is None:
        return whole
    documents = int((ends.flatten() < tokens).sum())
    keys = [key for key in sample if key.startswith("cu_seqlens") and sample[key] is not None]
    with_padding = [key for key in keys if key.endswith("padded")] or keys
    for key in keys:
        whole[key] = sample[key][..., : documents + 1]
        if key in with_padding:
            whole[key] = whole[key].masked_fill(whole[key] == tokens, length)
    return whole


@patched(
    "megatron.bridge.data.samplers:MegatronPretrainingBatchSampler.__iter__",
    why="a rank draws its replica's rows of a global batch, where replicas differ",
    **OF_BRIDGE,
)
def _of_own_rows(original: Callable[[Any], Iterator[list[int]]], self: Any) -> Iterator[list[int]]:
    session = active_session()
    share = session.share if session else None
    for rows in original(self):
        if share is None:
            yield rows
        else:
            first, size = share.first * self.micro_batch_size, share.count * self.micro_batch_size
            yield rows[first : first + size]


@patched(
    "megatron.bridge.data.batch_utils:prepare_finetuning_batch",
    why="cuts a rank's rows of a global batch into its replica's micro-batches, and reads documents ahead",
    **OF_BRIDGE,
)
def _of_own_micro_batches(
    original: Callable[..., tuple[Any, int]],
    data_iterator: Any,
    num_microbatches: int,
    default_seq_length: int,
    seq_key: str = "tokens",
) -> tuple[Any, int]:
    session = active_session()
    if session is not None and session.share is not None:
        num_microbatches = session.share.count
    samples, length = original(data_iterator, num_microbatches, default_seq_length, seq_key)
    if session is not None and session.given.terms.has_documents and samples is not None:
        samples = Prefetched(samples)
    return samples, length


@patched(
    "megatron.bridge.training.gpt_step:get_batch_from_iterator",
    why="a plan's sequences all have one length",
    parameters=(
        *("data_iterator", "include_mtp_inputs", "skip_getting_attention_mask_from_dataset"),
        *("is_first_pp_stage", "is_last_pp_stage", "include_full_batch_fields"),
    ),
    **OF_BRIDGE,
)
def _of_whole_sequences(
    original: Callable[..., Batch], data_iterator: Iterator[Batch], *args: Any, **kwargs: Any
) -> Batch:
    session = active_session()
    if session is None:
        return original(data_iterator, *args, **kwargs)
    sample = whole_sequences(next(data_iterator), session.seq_length)
    AHEAD.take(sample, session.seq_length)
    return original(iter((sample,)), *args, **kwargs)


@patched(
    "megatron.bridge.training.gpt_step:_partition_packed_batch_for_cp",
    why="takes the tokens at the plan's positions in each document instead of two equal chunks",
    **OF_BRIDGE,
)
def _by_documents(original: Callable[..., Batch], batch: Batch, cp_group: dist.ProcessGroup) -> Batch:
    session = active_session()
    return cut_batch(batch, session) if session else original(batch, cp_group)


BRIDGE_DATA_PATCHES = (_of_own_rows, _of_own_micro_batches, _of_whole_sequences, _by_documents)
