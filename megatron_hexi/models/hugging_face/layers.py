"""Fields of a Hugging Face model's experts, attention window and layers with a state.

The rules are those of transformers' configuration_*.py and modeling_*.py.
"""

from __future__ import annotations

from typing import Any

from megatron_hexi.errors import HexiError
from megatron_hexi.models.hugging_face.config import Config

Fields = dict[str, Any]


def expert_fields(config: Config) -> Fields | None:
    """Return the fields of `Experts`; ``None``: the model has no layer with experts.

    Raises:
        HexiError: a value is not usable.
    """
    read = {
        "mixtral": _plain_experts,
        "gpt_oss": _plain_experts,
        "qwen3_moe": _qwen_experts,
        "qwen3_next": _gated_experts,
        "nemotron_h": _hybrid_experts,
        "lfm2_moe": _experts_behind_dense,
        "deepseek_v3": _scored_experts,
        "kimi_k2": _scored_experts,
        "glm4_moe": _scored_experts,
        "llama4_text": _llama_experts,
    }.get(config.model_type)
    if read is None:
        return None
    found = read(config)
    if found is None or not any(found.get("layers", (True,))):
        return None
    return {"active": config.size("num_experts_per_tok"), **found}


def window_fields(config: Config) -> Fields | None:
    """Return the fields of `Window`; ``None``: no layer has a window.

    Raises:
        HexiError: a value is not usable.
    """
    if config.model_type == "llama4_text":
        return _chunks(config)
    if not config.has("sliding_window") or config.get("sliding_window") is None:
        return None
    if config.has("use_sliding_window") and not config.flag("use_sliding_window"):
        return None
    layers = _sliding_layers(config)
    return {"size": config.size("sliding_window"), "layers": layers} if any(layers) else None


def state_fields(config: Config) -> Fields | None:
    """Return the fields of `State`; ``None``: the model has no layer with a state.

    Raises:
        HexiError: a value that is not usable.
    """
    if config.model_type == "nemotron_h":
        if "M" not in hybrid_pattern(config):
            return None
        return {
            "kind": "mamba",
            "heads": config.size("mamba_num_heads"),
            "head_dim": config.size("mamba_head_dim"),
            "groups": config.size("n_groups"),
            "key_dim": config.size("ssm_state_size"),
            "conv_width": config.size("conv_kernel"),
        }
    if config.model_type != "qwen3_next":
        return None
    layers = _named(config, "linear_attention")
    if layers is None:
        interval = config.size("full_attention_interval")
        layers = tuple((i + 1) % interval != 0 for i in _layers(config))
    fields = {
        "kind": "delta",
        "heads": config.size("linear_num_value_heads"),
        "head_dim": config.size("linear_value_head_dim"),
        "groups": config.size("linear_num_key_heads"),
        "key_dim": config.size("linear_key_head_dim"),
        "conv_width": config.size("linear_conv_kernel_dim"),
        "layers": layers,
    }
    return fields if any(layers) else None


#: Letters of Megatron's patterns for the names of Nemotron-H's layers; the last two are older.
_LETTERS = {
    "linear_attention": "M",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
    "mamba": "M",
    "attention": "*",
}


def hybrid_pattern(config: Config) -> str:
    """Return the pattern of a hybrid's layers as in Megatron's: one letter a part.

    Raises:
        HexiError: the fields do not say it, or differ.
    """
    return _paired_pattern(config) if config.has("conv_L_cache") else _written_pattern(config)


def _paired_pattern(config: Config) -> str:
    """Return the pattern of LFM2's layers, each of which is a short convolution or attention, and an MLP."""
    convolves, attends = _named(config, "conv"), None
    if config.has("full_attn_idxs"):
        attends = _indices(config, "full_attn_idxs")
    if convolves is None:  # as transformers' defaults
        convolves = tuple(attends is not None and i not in attends for i in _layers(config))
    elif attends is not None and [i for i in _layers(config) if not convolves[i]] != sorted(attends):
        config.refuse("full_attn_idxs", attends, "remove it", "differs from layer_types")
    dense = config.count("num_dense_layers") if config.has("num_dense_layers") else len(convolves)
    return "".join("*C"[conv] + "-E"[i >= dense] for i, conv in enumerate(convolves))


def _written_pattern(config: Config) -> str:
    """Return the pattern of Nemotron-H's layers, a letter a layer as in Megatron's.

    Raises:
        HexiError: neither field says it, or both do and differ, or num_hidden_layers is another number.
    """
    named, pattern = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    if pattern is not None and (not isinstance(pattern, str) or not set(pattern) <= set(_LETTERS.values())):
        config.refuse("hybrid_override_pattern", pattern, "write a letter a layer: M, *, - or E")
    if named is not None:
        if not isinstance(named, list) or not all(
            isinstance(name, str) and name in _LETTERS for name in named
        ):
            config.refuse("layers_block_type", named, f"write a list of {', '.join(list(_LETTERS)[:4])}")
        letters = "".join(_LETTERS[name] for name in named)
        if pattern not in (None, letters):
            config.refuse("hybrid_override_pattern", pattern, "remove it", "differs from layers_block_type")
        pattern = letters
    if not pattern:
        raise HexiError(f"{config.path}: hybrid_override_pattern is missing; add it, a letter a layer")
    if config.get("num_hidden_layers") not in (None, len(pattern)):
        config.refuse(
            "num_hidden_layers",
            config.get("num_hidden_layers"),
            f"write {len(pattern)}",
            "differs from the pattern's number of layers",
        )
    return pattern


def _plain_experts(config: Config) -> Fields:
    """Return the fields for experts in every layer, each of which is intermediate_size wide."""
    return {"count": config.size("num_local_experts"), "ffn_hidden_size": config.size("intermediate_size")}


def _gated_experts(config: Config) -> Fields:
    """Return the fields of Qwen3-Next's experts, with a gated shared expert."""
    shared = config.size("shared_expert_intermediate_size")
    return {**_qwen_experts(config), "shared_ffn_hidden_size": shared, "shared_gate": True}


def _hybrid_experts(config: Config) -> Fields | None:
    """Return the fields of the experts of a hybrid, whose pattern says which layers have them."""
    if "E" not in hybrid_pattern(config):
        return None
    return {
        "count": config.size("n_routed_experts"),
        "ffn_hidden_size": config.size("moe_intermediate_size"),
        "shared_ffn_hidden_size": config.size("moe_shared_expert_intermediate_size"),
        "score_bias": True,
    }


def _experts_behind_dense(config: Config) -> Fields | None:
    """Return the fields of LFM2's experts, which the first layers do not have."""
    if "E" not in hybrid_pattern(config):
        return None
    return {
        "count": config.size("num_experts"),
        "ffn_hidden_size": config.size("moe_intermediate_size"),
        "score_bias": config.flag("use_expert_bias"),
    }


def _qwen_experts(config: Config) -> Fields:
    step, dense = config.size("decoder_sparse_step"), _indices(config, "mlp_only_layers") or []
    return {
        "count": config.size("num_experts" if config.has("num_experts") else "num_local_experts"),
        "ffn_hidden_size": config.size("moe_intermediate_size"),
        "layers": tuple(i not in dense and (i + 1) % step == 0 for i in _layers(config)),
    }


def _scored_experts(config: Config) -> Fields:
    width, first = config.size("moe_intermediate_size"), config.count("first_k_dense_replace")
    return {
        "count": config.size("n_routed_experts"),
        "ffn_hidden_size": width,
        "shared_ffn_hidden_size": width * config.size("n_shared_experts"),
        "score_bias": True,
        "layers": tuple(i >= first for i in _layers(config)),
    }


def _llama_experts(config: Config) -> Fields:
    step, named = config.size("interleave_moe_layer_step"), _indices(config, "moe_layers")
    return {
        "count": config.size("num_local_experts"),
        "ffn_hidden_size": config.size("intermediate_size"),
        "shared_ffn_hidden_size": config.size("intermediate_size"),
        "layers": tuple((i + 1) % step == 0 if named is None else i in named for i in _layers(config)),
    }


def _chunks(config: Config) -> Fields | None:
    """Return the fields of Llama 4's window: attention in chunks, in layers with rotary embeddings."""
    if config.get("attention_chunk_size") is None:
        return None
    layers = _named(config, "chunked_attention")
    if layers is None:
        layers = tuple(map(bool, _rotary_layers(config)))
    size = config.size("attention_chunk_size")
    return {"size": size, "layers": layers, "in_chunks": True} if any(layers) else None


def _rotary_layers(config: Config) -> list[int]:
    """Return 1 for each layer of Llama 4 with rotary embeddings, and 0 for each without."""
    given, interval = config.get("no_rope_layers"), config.size("no_rope_layer_interval")
    if not given:
        return [int((i + 1) % interval != 0) for i in _layers(config)]
    count = config.size("num_hidden_layers")
    if not isinstance(given, list) or len(given) != count or any(has not in (0, 1) for has in given):
        config.refuse("no_rope_layers", given, f"write 0 or 1 for each of the {count} layers")
    return given


def _sliding_layers(config: Config) -> tuple[bool, ...]:
    named = _named(config, "sliding_attention") if config.has("layer_types") else None
    if named is not None:
        return named
    if config.model_type == "gpt_oss":
        return tuple(i % 2 == 0 for i in _layers(config))
    if config.model_type == "gemma3_text":
        every = config.size("sliding_window_pattern")
        return tuple((i + 1) % every != 0 for i in _layers(config))
    if config.has("max_window_layers"):
        first = config.count("max_window_layers")
        return tuple(i >= first for i in _layers(config))
    return tuple(True for _ in _layers(config))


def _named(config: Config, name: str) -> tuple[bool, ...] | None:
    """Return whether each layer has this name in layer_types; ``None``: the file has no layer_types."""
    types, count = config.get("layer_types"), config.size("num_hidden_layers")
    if types is None:
        return None
    known = {"full_attention", name}
    if not isinstance(types, list) or len(types) != count or not known.issuperset(map(str, types)):
        config.refuse("layer_types", types, f"write {name} or full_attention for each of the {count} layers")
    return tuple(kind == name for kind in types)


def _indices(config: Config, field: str) -> list[int] | None:
    """Return the value of a field that is a list of layers, counted from 0; ``None``: the value is null."""
    value, count = config.get(field), config.size("num_hidden_layers")
    if value is None:
        return None
    if not isinstance(value, list) or any(type(i) is not int or not 0 <= i < count for i in value):
        config.refuse(field, value, f"write a list of layers from 0 to {count - 1}")
    return value


def _layers(config: Config) -> range:
    return range(config.size("num_hidden_layers"))
