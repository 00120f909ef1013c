"""Experts, windows and latent attention as a config.json states them, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_hexi.cost.hugging_face_config import Config
from megatron_hexi.cost.layer_kinds import Experts, Latent, Window

#: Types in which layers up to `first_k_dense_replace` are dense, and a bias evens experts' loads.
SCORE_BIAS = ("deepseek_v3", "kimi_k2", "glm4_moe")
LATENT = ("deepseek_v3", "kimi_k2")
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def experts_of(config: Config, layers: int) -> Experts | None:
    """Return the experts of a model, ``None`` where all its layers are dense."""
    if config.model_type in SCORE_BIAS:
        width = config.size("moe_intermediate_size")
        first = config.count("first_k_dense_replace")
        return _experts(
            config,
            "n_routed_experts",
            [layer >= first for layer in range(layers)],
            ffn_hidden_size=width,
            shared_ffn_hidden_size=width * config.count("n_shared_experts"),
            score_bias=True,
        )
    if config.model_type in ("mixtral", "gpt_oss"):
        return _experts(
            config, "num_local_experts", [True] * layers, ffn_hidden_size=config.size("intermediate_size")
        )
    if config.model_type == "qwen3_moe":
        step = config.size("decoder_sparse_step")
        dense = config.layer_numbers("mlp_only_layers", layers) or ()
        has_experts = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
        return _experts(
            config, "num_local_experts", has_experts, ffn_hidden_size=config.size("moe_intermediate_size")
        )
    if config.model_type == "llama4_text":
        width, numbers = config.size("intermediate_size"), config.layer_numbers("moe_layers", layers)
        if numbers is None:
            step = config.size("interleave_moe_layer_step")
            numbers = range(step - 1, layers, step)
        has_experts = [layer in numbers for layer in range(layers)]
        return _experts(
            config, "num_local_experts", has_experts, ffn_hidden_size=width, shared_ffn_hidden_size=width
        )
    return None


def _experts(config: Config, count: str, layers: Sequence[bool], **fields: Any) -> Experts | None:
    if not any(layers):
        return None
    active = config.size("num_experts_per_tok")
    if config.model_type == "gpt_oss":
        config.require_equal("experts_per_token", active)
    return Experts(count=config.size(count), active=active, layers=tuple(layers), **fields)


def latent_of(config: Config, heads: int) -> tuple[Latent, int] | None:
    """Return latent attention, and the size of one head's query; ``None`` in other types."""
    if config.model_type not in LATENT:
        return None
    rotary = config.size("qk_rope_head_dim")
    query = rotary + config.size("qk_nope_head_dim")
    config.require_equal("qk_head_dim", query)
    config.require_equal("head_dim", rotary, query, config.size("hidden_size") // heads)
    config.require_equal("num_key_value_heads", heads)
    rank = config.get("q_lora_rank")
    return (
        Latent(
            kv_rank=config.size("kv_lora_rank"),
            rotary_dim=rotary,
            value_dim=config.size("v_head_dim"),
            query_rank=None if rank is None else config.size("q_lora_rank"),
        ),
        query,
    )


def window_of(config: Config, layers: int) -> Window | None:
    """Return the window of attention, ``None`` where every layer sees all earlier tokens.

    In Qwen's dense types layers from max_window_layers on have a window, or those that layer_types names,
    where use_sliding_window is true; in mistral, mixtral, qwen3_moe and phi3 all have one.
    """
    kind = config.model_type
    if kind in ("qwen2", "qwen3", "qwen3_moe") and not config.flag("use_sliding_window"):
        return None
    if kind == "llama4_text":
        return _chunks(config, layers)
    if kind in (*LATENT, "llama", "glm4_moe"):
        if kind == "llama" and config.get("sliding_window") is not None:
            problem = "transformers' llama has no window"
            config.refuse("sliding_window", config.get("sliding_window"), "remove it", problem)
        return None
    if config.get("sliding_window") is None:
        return None
    has_window = _sliding_layers(config, layers)
    return Window(config.size("sliding_window"), tuple(has_window)) if any(has_window) else None


def _sliding_layers(config: Config, layers: int) -> list[bool]:
    kind = config.model_type
    if kind not in ("qwen2", "qwen3", "gpt_oss", "gemma3_text"):
        return [True] * layers
    types = _layer_types(config, layers, _SLIDING)
    if types is not None:
        return [of_layer == _SLIDING for of_layer in types]
    if kind == "gpt_oss":
        return [layer % 2 == 0 for layer in range(layers)]
    if kind == "gemma3_text":
        written = "_sliding_window_pattern" in config.values
        step = config.size("_sliding_window_pattern" if written else "sliding_window_pattern")
        return [(layer + 1) % step != 0 for layer in range(layers)]
    first = config.count("max_window_layers")
    return [layer >= first for layer in range(layers)]


def _chunks(config: Config, layers: int) -> Window | None:
    """Llama 4's attention: layers with rotary positions see their own chunk of tokens."""
    if config.get("attention_chunk_size") is None:
        return None
    types = _layer_types(config, layers, _CHUNKED)
    if types is not None:
        chunked = [of_layer == _CHUNKED for of_layer in types]
    else:
        with_rotary = config.get("no_rope_layers")
        if not with_rotary:
            step = config.size("no_rope_layer_interval")
            with_rotary = [int((layer + 1) % step != 0) for layer in range(layers)]
        if not isinstance(with_rotary, list) or len(with_rotary) < layers or set(with_rotary) - {0, 1}:
            config.refuse("no_rope_layers", with_rotary, f"write 0 or 1 for each of the {layers} layers")
        chunked = [bool(has) for has in with_rotary[:layers]]
    if not any(chunked):
        return None
    return Window(config.size("attention_chunk_size"), tuple(chunked), in_chunks=True)


def _layer_types(config: Config, layers: int, other: str) -> list[str] | None:
    types = config.get("layer_types")
    if types is None:
        return None
    known = {_FULL, other}
    if not isinstance(types, list) or len(types) != layers or not known.issuperset(map(str, types)):
        config.refuse("layer_types", types, f"write {_FULL} or {other} for each of the {layers} layers")
    return types
