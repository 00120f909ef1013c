"""megatron-core 0.17: `pretrain` parses the arguments too, and a batch is cut by its group alone."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_batch_on_this_tp_rank

from megatron_hexi.megatron.versions import Batch
from megatron_hexi.megatron.versions.builder import build_gpt


def train(  # noqa: D103 (described in `Megatron`, as the rest)
    build_datasets: Callable[..., Any],
    forward_step: Callable[..., Any],
    embedding_ranks: Callable[[list[int]], list[int]],
) -> None:
    pretrain(
        build_datasets,
        build_gpt,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        get_embedding_ranks=embedding_ranks,
    )


def broadcast_batch(batch: Batch, is_packed: bool, mtp_on_this_rank: bool, **sizes: Any) -> Batch:  # noqa: D103
    # It reads the batch itself, and takes the sizes from the arguments.
    sample = {name: tensor for name, tensor in batch.items() if tensor is not None}
    return get_batch_on_this_tp_rank(iter([sample]), mtp_on_this_rank)


def cut_batch(batch: Batch, per_sequence: bool) -> Batch:  # noqa: D103
    return get_batch_on_this_cp_rank(batch)


def predicts_further_tokens(args: Namespace, vp_stage: int | None) -> bool:  # noqa: D103
    config = core_transformer_config_from_args(args)
    return bool(mtp_on_this_rank(config, ignore_virtual=False, vp_stage=vp_stage))
