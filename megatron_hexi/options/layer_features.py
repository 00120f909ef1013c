"""Read the experts, windows, latent attention and states of each layer from Megatron's arguments."""

from __future__ import annotations

import ast
import itertools
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megatron_hexi.errors import HexiError
from megatron_hexi.options.kinds import STATE_LAYERS, hybrid_layers

#: Largest number of layers, far more than any model has; a longer pattern is a mistake and would need memory.
MOST_LAYERS = 2**14


def layer_features(args: Namespace, source: str) -> dict[str, Any]:
    """Return the fields of `megatron_hexi.cost.Model` that describe the kinds of a model's layers.

    Raises:
        HexiError: a pattern does not fit the model's number of layers, or latent attention has weights that
            the cost model does not count.
    """
    if hybrid_layers(args):
        return _hybrid(args, source)
    found = {
        "experts": _experts(args, source),
        "state": _delta_layers(args, source),
        "window": _window(args, source),
        "latent": _latent(args, source),
        "mtp_layers": getattr(args, "mtp_num_layers", None) or 0,
    }
    return {name: value for name, value in found.items() if value}


def layers_by_state(args: Namespace, source: str) -> tuple[bool, ...]:
    """Return for each layer of the model whether a state passes along the sequence.

    Raises:
        HexiError: the pattern of delta nets does not fit the model's number of layers.
    """
    pattern = hybrid_layers(args).replace("|", "")
    if pattern:
        return tuple(letter in STATE_LAYERS for letter in pattern)
    state = _delta_layers(args, source)
    return tuple(False for _ in _layers(args)) if state is None else state["layers"]


def query_size(args: Namespace) -> int:
    """Return the size of one head's query, which equals the size of one head's key."""
    if args.multi_latent_attention:
        return int(args.qk_head_dim + args.qk_pos_emb_head_dim)
    return int(args.kv_channels)


def _experts(args: Namespace, source: str) -> dict[str, Any] | None:
    if not args.num_experts:
        return None
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):  # megatron/core/models/gpt/gpt_layer_specs.py
        layers = [layer % _above_0("--moe-layer-freq", frequency, source) == 0 for layer in _layers(args)]
    else:
        layers = layer_pattern("--moe-layer-freq", frequency, args.num_layers, source)
    if not any(layers):
        raise HexiError(f"{source}: --moe-layer-freq leaves no layer with experts; leave --num-experts out")
    return {**_routed(args), "layers": tuple(layers)}


def _routed(args: Namespace) -> dict[str, Any]:
    return {
        "count": args.num_experts,
        "active": args.moe_router_topk,
        "ffn_hidden_size": args.moe_ffn_hidden_size or args.ffn_hidden_size,
        "shared_ffn_hidden_size": args.moe_shared_expert_intermediate_size or 0,
        "score_bias": bool(args.moe_router_enable_expert_bias),
        "shared_gate": bool(args.moe_shared_expert_gate),
    }


def _hybrid(args: Namespace, source: str) -> dict[str, Any]:
    """Return the fields that a pattern of layers gives; its letters have passed the rules of options.

    Raises:
        HexiError: the pattern has states of two kinds, or other options describe layers too.
    """
    flag, letters = "--hybrid-layer-pattern", hybrid_layers(args).replace("|", "")
    beside = {
        "--mtp-num-layers": bool(args.mtp_num_layers),
        "--window-size": bool(args.window_size),
        "--multi-latent-attention": args.multi_latent_attention,
    }
    for other, is_given in beside.items():
        if is_given:
            raise HexiError(f"{source}: {flag} with {other} is not read; leave {other} out")
    has_state = set(letters) & STATE_LAYERS
    if len(has_state) > 1:
        raise HexiError(f"{source}: {flag} with M and G is not read: states of one kind are; use one of them")
    found: dict[str, Any] = {"pattern": letters}
    if has_state:
        found["state"] = mamba_state(args, source) if "M" in has_state else _delta(args)
    if args.num_experts:
        found["experts"] = _routed(args)
    return found


def mamba_state(args: Namespace, source: str) -> dict[str, Any]:
    """Return the fields of `State` of Mamba layers.

    Without a number of heads, all heads together are twice as wide as the model (MambaMixer).

    Raises:
        HexiError: the size of a head does not divide that width.
    """
    heads, size = args.mamba_num_heads, args.mamba_head_dim
    if heads is None:
        if size < 1:
            raise HexiError(f"{source}: --mamba-head-dim {size}: give a number above 0")
        if 2 * args.hidden_size % size:
            raise HexiError(
                f"{source}: --mamba-head-dim {size} does not divide twice the hidden size "
                f"{args.hidden_size}; add --mamba-num-heads"
            )
        heads = 2 * args.hidden_size // size
    return {
        "kind": "mamba",
        "heads": heads,
        "head_dim": size,
        "groups": args.mamba_num_groups,
        "key_dim": args.mamba_state_dim,
    }


def _delta(args: Namespace) -> dict[str, Any]:
    return {
        "kind": "delta",
        "heads": args.linear_num_value_heads,
        "head_dim": args.linear_value_head_dim,
        "groups": args.linear_num_key_heads,
        "key_dim": args.linear_key_head_dim,
        "conv_width": args.linear_conv_kernel_dim,
    }


def _delta_layers(args: Namespace, source: str) -> dict[str, Any] | None:
    """Return the layers of a GPT that have a gated delta net in place of attention."""
    if getattr(args, "experimental_attention_variant", None) != "gated_delta_net":
        return None
    flag, frequency = "--linear-attention-freq", args.linear_attention_freq
    if frequency is None:
        raise HexiError(f"{source}: {flag} is missing: it says which layers are delta nets; add it")
    if isinstance(frequency, int):  # `get_linear_attention_pattern` in Megatron's attention variants
        step = _above_0(flag, frequency, source)
        layers = [(layer + 1) % step != 0 for layer in _layers(args)]
    else:
        layers = layer_pattern(flag, frequency, args.num_layers, source)
    return {**_delta(args), "layers": tuple(layers)} if any(layers) else None


def _window(args: Namespace, source: str) -> dict[str, Any] | None:
    if not args.window_size or args.window_size[0] < 0:  # -1: as far as there are keys
        return None
    frequency = args.window_attn_skip_freq
    if frequency is None:
        layers = [True for _ in _layers(args)]
    elif isinstance(frequency, int):  # `is_layer_window_attention` in megatron/core/transformer/utils.py
        step = _above_0("--window-attn-skip-freq", frequency, source)
        layers = [(layer + 1) % step != 0 for layer in _layers(args)]
    else:
        layers = layer_pattern("--window-attn-skip-freq", frequency, args.num_layers, source)
    return {"size": args.window_size[0] + 1, "layers": tuple(layers)} if any(layers) else None


def _latent(args: Namespace, source: str) -> dict[str, Any] | None:
    if not args.multi_latent_attention:
        return None
    uncounted = {
        "without --qk-layernorm": not args.qk_layernorm,
        "without --disable-bias-linear": args.add_bias_linear,
        "with --add-qkv-bias": args.add_qkv_bias,
        "with --attention-output-gate": args.attention_output_gate,
        "with --group-query-attention": args.group_query_attention,
    }
    for what, is_so in uncounted.items():
        if is_so:
            verb = "add" if what.startswith("without") else "remove"
            raise HexiError(
                f"{source}: --multi-latent-attention {what} is not read: its weights are not counted; "
                f"{verb} {what.partition(' ')[2]}"
            )
    return {
        "kv_rank": args.kv_lora_rank,
        "rotary_dim": args.qk_pos_emb_head_dim,
        "value_dim": args.v_head_dim,
        "query_rank": args.q_lora_rank,
    }


def _layers(args: Namespace) -> range:
    return range(min(args.num_layers or 0, MOST_LAYERS))


def _above_0(flag: str, value: int, source: str) -> int:
    if value < 1:
        raise HexiError(f"{source}: {flag} {value}; write a whole number above 0, or a list of 0 and 1")
    return value


def layer_pattern(flag: str, pattern: str | list[int], layers: int, source: str) -> list[bool]:
    """Parse a pattern of layers and return one value for each layer.

    Args:
        pattern: a list of 0 and 1, or Megatron's expression of such lists: "[0]*3+[1]*58".

    Raises:
        HexiError: the pattern is another expression, or has another number of layers.
    """
    try:
        values = _value(ast.parse(pattern, mode="eval").body) if isinstance(pattern, str) else pattern
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        values = None
    if not isinstance(values, list) or any(value not in (0, 1) for value in values):
        said = str(pattern)[:40]
        raise HexiError(f"{source}: {flag} {said}: is no list of 0 and 1; write one, as '[0]*3+[1]*{layers}'")
    if len(values) != layers:
        raise HexiError(
            f"{source}: {flag} has {len(values)} entries, the model has {layers} layers; give one for each"
        )
    return [bool(value) for value in values]


def pattern_text(layers: Sequence[bool]) -> str:
    """Return a pattern of layers as Megatron's expression, with repeated parts written once."""
    numbers = [int(has) for has in layers]
    for period in range(1, len(numbers) // 2 + 1):
        if numbers == numbers[:period] * (len(numbers) // period):
            return f"{str(numbers[:period]).replace(' ', '')}*{len(numbers) // period}"
    runs = [(number, len(list(same))) for number, same in itertools.groupby(numbers)]
    if len(runs) * 2 > len(numbers):
        return str(numbers).replace(" ", "")
    return "+".join(f"[{number}]*{count}" for number, count in runs)


def _value(node: ast.expr) -> Any:
    """Return the value of an expression of integers and lists with + and *; ValueError for any other."""
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= MOST_LAYERS:
        return node.value
    if isinstance(node, ast.List):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _value(node.left), _value(node.right)
        kinds = {type(left), type(right)}
        if isinstance(node.op, ast.Add) and kinds == {list}:
            return _short(left + right)
        if isinstance(node.op, ast.Mult) and kinds == {list, int}:
            return _repeated(*((left, right) if isinstance(left, list) else (right, left)))
    raise ValueError


def _repeated(values: list[Any], times: int) -> list[Any]:
    if len(values) * times > MOST_LAYERS:
        raise ValueError
    return values * times


def _short(values: list[Any]) -> list[Any]:
    if len(values) > MOST_LAYERS:
        raise ValueError
    return values
