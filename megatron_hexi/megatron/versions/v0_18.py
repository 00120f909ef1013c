"""megatron-core 0.18: as 0.19, but `pretrain` is given the function that builds the model."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from megatron_hexi.megatron.versions import Batch
from megatron_hexi.megatron.versions.builder import build_gpt


def train(  # noqa: D103 (described in `Megatron`, as the rest)
    build_datasets: Callable[..., Any],
    forward_step: Callable[..., Any],
    embedding_ranks: Callable[[list[int]], list[int]],
) -> None:
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    pretrain(
        pretrain_cfg_container_from_args(args),
        build_datasets,
        build_gpt,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=embedding_ranks,
    )


def broadcast_batch(batch: Batch, is_packed: bool, **sizes: Any) -> Batch:  # noqa: D103
    return get_batch_on_this_tp_rank(batch, is_sft=is_packed, is_hybrid_cp=False, **sizes)


def cut_batch(batch: Batch, per_sequence: bool) -> Batch:  # noqa: D103
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def predicts_further_tokens(args: Namespace, vp_stage: int | None) -> bool:  # noqa: D103
    config = core_transformer_config_from_args(args)
    layout, heads = config.pipeline_model_parallel_layout, config.mtp_num_layers
    return bool(mtp_on_this_rank(layout, heads, ignore_virtual=False, vp_stage=vp_stage))
