"""What Megatron makes of its arguments before it builds a model: older spellings, and derived defaults.

`validate_args` of megatron-core 0.17 to 0.19 (megatron/training/arguments.py) is the source of all.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_hexi.errors import HexiError
from megatron_hexi.options.layer_features import layer_features


def resolve(args: Namespace, source: str) -> None:
    """Rewrite older spellings to today's, and fill in what follows from other arguments.

    Args:
        args: Megatron's arguments as parsed; changed in place.
        source: where they stand, for errors.

    Raises:
        HexiError: arguments that Megatron refuses beside each other.
    """
    for name in ("num_layers", "seq_length"):
        _resolve_pair(args, name, f"encoder_{name}", source)
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    _resolve_positions(args, source)
    _resolve_activation(args, source)
    if args.add_bias_linear:
        args.add_qkv_bias = True
    if args.kv_channels is None and args.hidden_size and args.num_attention_heads:
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
    """Return the fields of `megatron_hexi.cost.Model` that say what layers consist of.

    Args:
        args: Megatron's arguments, resolved.
        source: where they stand, for errors.

    Raises:
        HexiError: as `layer_features`.
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


def _resolve_pair(args: Namespace, name: str, older: str, source: str) -> None:
    """Take an argument's older name, which Megatron refuses beside the other."""
    value, other = getattr(args, name), getattr(args, older)
    if value is not None and other is not None:
        flags = [f"--{one.replace('_', '-')}" for one in (name, older)]
        raise HexiError(f"{source}: {flags[0]} and {flags[1]} are one argument; leave {flags[1]} out")
    if value is None:
        setattr(args, name, other)


def _resolve_positions(args: Namespace, source: str) -> None:
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if not args.add_position_embedding and args.position_embedding_type != "rope":
        raise HexiError(
            f"{source}: --no-position-embedding is older than --position-embedding-type; give "
            "--position-embedding-type none, or rope"
        )


def _resolve_activation(args: Namespace, source: str) -> None:
    for other in ("squared_relu", "quick_geglu"):
        if args.swiglu and getattr(args, other):
            flag = f"--{other.replace('_', '-')}"
            raise HexiError(f"{source}: --swiglu and {flag} are two activations; leave one of them out")
