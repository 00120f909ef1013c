"""A GPT from the command line, for versions whose `pretrain` needs a model builder, which no wheel has."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.spec_utils import import_module
from megatron.training import get_args, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args


def build_gpt(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Return one pipeline stage of the model.

    Args:
        config: configuration of its transformer; by default the command line's.
    """
    print_rank_0("building GPT model ...")
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    uses_te = args.transformer_impl == "transformer_engine"
    kind = {"normalization": args.normalization, "qk_l2_norm": args.qk_l2_norm, "vp_stage": vp_stage}
    if args.spec is not None:
        layers = import_module(args.spec)
    else:
        layers = get_gpt_decoder_block_spec(config, uses_te, **kind)
    heads = None
    if args.mtp_num_layers is not None:
        last = get_gpt_decoder_layer_specs(config, uses_te, **kind)[-1]
        heads = get_gpt_mtp_block_spec(config, last, uses_te, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=heads,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
