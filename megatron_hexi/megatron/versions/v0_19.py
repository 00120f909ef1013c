"""megatron-core 0.19: arguments are parsed first, and `pretrain` builds the model from its configuration."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from megatron_hexi.megatron.versions import Batch


def train(  # noqa: D103 (described in `Megatron`, as the rest)
    build_datasets: Callable[..., Any],
    forward_step: Callable[..., Any],
    embedding_ranks: Callable[[list[int]], list[int]],
) -> None:
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    config_from_args = hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args
    pretrain(
        pretrain_cfg_container_from_args(args, config_from_args(args)),
        build_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=embedding_ranks,
    )


def broadcast_batch(batch: Batch, is_packed: bool, **sizes: Any) -> Batch:  # noqa: D103
    whole = get_batch_on_this_tp_rank(batch, has_cu_seqlens=is_packed, is_hybrid_cp=False, **sizes)
    return flatten_batch_for_packed_sequences(whole)


def cut_batch(batch: Batch, per_sequence: bool) -> Batch:  # noqa: D103
    return get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        use_per_sequence_balancing=per_sequence,
    )


def predicts_further_tokens(args: Namespace, vp_stage: int | None) -> bool:  # noqa: D103
    config = core_transformer_config_from_args(args)
    layout, heads = config.pipeline_model_parallel_layout, config.mtp_num_layers
    return bool(mtp_on_this_rank(layout, heads, ignore_virtual=False, vp_stage=vp_stage))
