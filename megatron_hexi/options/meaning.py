"""Derive arguments as Megatron does: from older spellings, and from other arguments if they are not given.

The source is `validate_args` of megatron-core 0.17 to 0.19 (megatron/training/arguments.py).
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_hexi.errors import HexiError
from megatron_hexi.kinds.states import hybrid_layers
from megatron_hexi.options.layer_features import layer_features


def resolve(args: Namespace, source: str) -> None:
    """Replace older spellings of arguments by current ones, and set arguments that follow from others.

    Raises:
        HexiError: arguments contradict each other in Megatron.
    """
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
    """Return the fields of `megatron_hexi.models.Model` that describe the parts of a layer.

    Raises:
        HexiError: `layer_features` refuses the arguments.
    """
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
