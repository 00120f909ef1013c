"""Derive arguments and the kinds of a model's layers from Megatron's arguments, as Megatron does.

The source is `validate_args` of megatron-core 0.17 to 0.19 (megatron/training/arguments.py).
"""

from __future__ import annotations

import functools
import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from megatron_hexi.errors import HexiError
from megatron_hexi.kinds import STATES, DeltaNet, Experts, Latent, ShortConv, Window
from megatron_hexi.kinds.layer_list import layers_of
from megatron_hexi.kinds.states import hybrid_layers


def layer_features(args: Namespace, source: str) -> dict[str, Any]:
    """Return the fields of `megatron_hexi.models.Model` that describe the kinds of a model's layers."""
    if hybrid_layers(args):
        return _hybrid(args, source)
    # Layers without rotary positions cost what others do: the option is checked alone.
    layers_of(args, "--no-rope-freq", source, lambda layer, step: (layer + 1) % step == 0)
    found = {
        "experts": Experts.from_arguments(args, source),
        "state": DeltaNet.in_gpt(args, source),
        "window": Window.from_arguments(args, source),
        "latent": Latent.from_arguments(args, source),
        "mtp_layers": getattr(args, "mtp_num_layers", None) or 0,
    }
    return {name: value for name, value in found.items() if value}


def layers_by_state(args: Namespace, source: str) -> tuple[bool, ...]:
    """Return for each layer of the model whether a state passes along the sequence."""
    pattern = hybrid_layers(args).replace("|", "")
    if pattern:
        return tuple(letter in STATES for letter in pattern)
    state = DeltaNet.in_gpt(args, source)
    return (False,) * (args.num_layers or 0) if state is None else state["layers"]


def query_size(args: Namespace) -> int:
    """Return the size of one head's query, which equals the size of one head's key."""
    if args.multi_latent_attention:
        return int(args.qk_head_dim + args.qk_pos_emb_head_dim)
    return int(args.kv_channels)


def _hybrid(args: Namespace, source: str) -> dict[str, Any]:
    """Return the fields that a pattern of layers gives; its letters have passed the rules of options."""
    flag, letters = "--hybrid-layer-pattern", hybrid_layers(args).replace("|", "")
    beside = {
        "--mtp-num-layers": bool(args.mtp_num_layers),
        "--window-size": bool(args.window_size),
        "--multi-latent-attention": args.multi_latent_attention,
    }
    for other, is_given in beside.items():
        if is_given:
            raise HexiError(f"{source}: {flag} with {other} is not read; leave {other} out")
    states = [letter for letter in STATES if letter in letters]
    if len(states) > 1:
        raise HexiError(
            f"{source}: {flag} has layers {' and '.join(sorted(states, reverse=True))}: a model has layers "
            "with a state of one kind; use one of them"
        )
    found: dict[str, Any] = {"pattern": letters}
    if states:
        found["state"] = STATES[states[0]].from_arguments(args, source)
    if ShortConv.letter in letters:
        found["short_conv"] = ShortConv.from_arguments(args)
    if args.num_experts:
        found["experts"] = Experts.routed(args)
    return found


#: Arguments of Megatron by the field, of Megatron-Core's or Bridge's configuration, that has another name.
ARGUMENTS: Final = {
    "num_moe_experts": "num_experts",
    "use_te_rng_tracker": "te_rng_tracker",
    "bias_activation_fusion": "bias_swiglu_fusion",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "rope_scaling": "use_rope_scaling",
    "yarn_rotary_scaling_factor": "rotary_scaling_factor",
    "average_in_collective": "ddp_average_in_collective",
    "bucket_size": "ddp_bucket_size",
    "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "check_for_nan_in_grad": "check_for_nan_in_loss_and_grad",
    "path_to_cache": "data_cache_path",
    "fully_parallel_save": "ckpt_fully_parallel_save",
    "fully_parallel_load": "ckpt_fully_parallel_load",
}
#: Megatron's names of torch's types.
DTYPES: Final[dict[str, Any]] = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.uint8": "fp8",
}
DATA = Path(__file__).parent / "data" / "model_defaults.json"


@functools.cache
def model_defaults() -> Mapping[str, Any]:
    """Return the recorded defaults by field; a field that is absent has ``None``, or an option."""
    defaults: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return defaults


def resolve(args: Namespace, source: str) -> None:
    """Replace older spellings of arguments by current ones, and set arguments that follow from others."""
    for name in ("num_layers", "seq_length"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(args, f"encoder_{name}"))
    pattern = hybrid_layers(args)
    if pattern:  # Megatron's `get_hybrid_total_layer_count`, whatever --num-layers says
        args.num_layers = len(pattern.partition("/")[0].replace("|", ""))
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    _resolve_positions(args, source)
    if args.add_bias_linear:
        args.add_qkv_bias = True
    if args.kv_channels is None and None not in (args.hidden_size, args.num_attention_heads):
        if args.num_attention_heads < 1 or args.hidden_size % args.num_attention_heads:
            raise HexiError(
                f"{source}: --num-attention-heads {args.num_attention_heads} does not divide --hidden-size "
                f"{args.hidden_size}; add --kv-channels"
            )
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.ffn_hidden_size is None and args.hidden_size:
        # Of a gated MLP two thirds, in whole multiples of 64; --quick-geglu does not count as one here.
        hidden = args.hidden_size
        args.ffn_hidden_size = int((4 * hidden * 2 / 3) / 64) * 64 if args.swiglu else 4 * hidden


def model_features(args: Namespace, source: str) -> dict[str, Any]:
    """Return the fields of `megatron_hexi.models.Model` that describe the parts of a layer."""
    biases, norm_biases = bool(args.add_bias_linear), args.normalization == "LayerNorm"
    return {
        "gated": bool(args.swiglu or args.quick_geglu),
        "tied_embeddings": not args.untie_embeddings_and_output_weights,
        "biases": biases,
        "qkv_bias": bool(args.add_qkv_bias and not biases),
        "norm_biases": None if norm_biases == biases else norm_biases,
        # An L2 norm goes before it, and has no weights.
        # In latent attention it goes before the latent columns, which have norms of their own.
        "qk_norm": bool(args.qk_layernorm and not args.qk_l2_norm and not args.multi_latent_attention),
        "output_gate": bool(args.attention_output_gate),
        "sinks": args.softmax_type == "learnable",
        "ends_in_bf16": (
            (args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16)
            if args.fp8 and args.first_last_layers_bf16
            else (0, 0)
        ),
        **layer_features(args, source),
    }


def _resolve_positions(args: Namespace, source: str) -> None:
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if not args.add_position_embedding and args.position_embedding_type != "rope":
        raise HexiError(
            f"{source}: --no-position-embedding is older than --position-embedding-type; give "
            "--position-embedding-type none, or rope"
        )
