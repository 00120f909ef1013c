"""Models as Hugging Face's config.json describes them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from megatron_hexi.errors import HexiError, NoFlagError
from megatron_hexi.models.hugging_face.config import Config, read_config
from megatron_hexi.models.hugging_face.constants import constants_of
from megatron_hexi.models.hugging_face.layers import (
    expert_fields,
    hybrid_pattern,
    state_fields,
    window_fields,
)
from megatron_hexi.models.model import Model
from megatron_hexi.models.vision import Vision


def model_from_config(text: str, path: Path) -> Model:
    """Return the model that a config.json describes, after checking every field of the file.

    Constants that Megatron has no flag for do not matter here: no weight, time or memory depends on them.
    Of a model with vision whose encoder is not read the language model is returned; its `source` says so.

    Raises:
        HexiError: the text is not JSON, its type is unknown, or a field is missing, unusable, unknown or not
            supported; with file, field, value and remedy.
    """
    config = read_config(text, path)
    with contextlib.suppress(NoFlagError):  # `constant_flags` says so where flags are printed
        constants_of(config)
    read = {"gpt2": _gpt, "nemotron_h": _hybrid, "lfm2": _paired, "lfm2_moe": _paired}
    fields = read.get(config.model_type, _decoder)(config)
    vision = _vision_of(config, fields["hidden_size"])
    left_out = config.is_part and vision is None
    source = f"{path}: text_config; vision is left out" if left_out else str(path)
    vocab_size, tied = config.size("vocab_size"), config.flag("tie_word_embeddings")
    try:
        return Model(
            name=str(path),
            source=source,
            vocab_size=vocab_size,
            tied_embeddings=tied,
            vision=vision,
            **fields,
        )
    except HexiError as problem:
        raise HexiError(f"{path}: {problem}") from None


def _decoder(config: Config) -> dict[str, Any]:
    """Return the fields of `Model` for a decoder with rotary positions, RMSNorm and a gated MLP."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    dense = "intermediate_size_mlp" if config.has("intermediate_size_mlp") else "intermediate_size"
    return {
        "layers": config.size("num_hidden_layers"),
        "hidden_size": hidden,
        "heads": heads,
        "ffn_hidden_size": config.size(dense),
        "gated": True,
        "biases": _has_biases(config),
        "qkv_bias": config.model_type == "qwen2"
        or (config.model_type == "glm4_moe" and config.flag("attention_bias")),
        "norm_biases": False,
        "qk_norm": config.model_type in ("qwen3", "qwen3_moe", "qwen3_next", "gemma3_text")
        or (config.model_type == "glm4_moe" and config.flag("use_qk_norm")),
        "output_gate": config.model_type == "qwen3_next",
        "sinks": config.model_type == "gpt_oss",
        "post_norms": config.model_type == "gemma3_text",
        "experts": expert_fields(config),
        "window": window_fields(config),
        "state": state_fields(config),
        "mtp_layers": config.count("num_nextn_predict_layers")
        if config.has("num_nextn_predict_layers")
        else 0,
        **(_latent(config, heads) if config.has("kv_lora_rank") else _heads(config, hidden, heads)),
    }


def _hybrid(config: Config) -> dict[str, Any]:
    """Return the fields of a hybrid without positions, with RMSNorm and an ungated MLP of squared ReLUs."""
    hidden, heads, pattern = (
        config.size("hidden_size"),
        config.size("num_attention_heads"),
        hybrid_pattern(config),
    )
    return {
        "layers": len(pattern),
        "pattern": pattern,
        "hidden_size": hidden,
        "heads": heads,
        "ffn_hidden_size": config.size("intermediate_size"),
        "gated": False,
        "experts": expert_fields(config),
        "state": state_fields(config),
        **_heads(config, hidden, heads),
    }


def _paired(config: Config) -> dict[str, Any]:
    """Return the fields of an LFM2, as a hybrid of two parts a layer, with a gated MLP."""
    dense = config.size("intermediate_size")
    if config.has("block_auto_adjust_ff_dim") and config.flag("block_auto_adjust_ff_dim"):
        multiple, factor = config.size("block_multiple_of"), config.number("block_ffn_dim_multiplier")
        dense = multiple * -(-int(factor * int(2 * dense / 3)) // multiple)
    fields = {**_hybrid(config), "ffn_hidden_size": dense, "gated": True, "qk_norm": True}
    if "C" in fields["pattern"]:
        fields["short_conv"] = {"taps": config.size("conv_L_cache")}
    return fields


def _heads(config: Config, hidden: int, heads: int) -> dict[str, Any]:
    """Return the fields of `Model` for attention without latent columns."""
    if config.get("head_dim") is None:
        _check_divides(config, heads, hidden, "add head_dim")
    return {
        "kv_heads": config.size("num_key_value_heads", heads),
        "head_dim": config.size("head_dim", hidden // heads),
    }


def _latent(config: Config, heads: int) -> dict[str, Any]:
    """Return the fields of `Model` for latent attention.

    transformers computes head_dim and qk_head_dim itself, whatever the file says.
    """
    rotary, other = config.size("qk_rope_head_dim"), config.size("qk_nope_head_dim")
    for field, value in (
        ("num_key_value_heads", heads),
        ("head_dim", rotary),
        ("qk_head_dim", rotary + other),
    ):
        if config.get(field) not in (None, value):
            config.refuse(
                field, config.get(field), f"write {value}", "differs from what the other fields say"
            )
    return {
        "kv_heads": heads,
        "head_dim": rotary + other,
        "latent": {
            "kv_rank": config.size("kv_lora_rank"),
            "rotary_dim": rotary,
            "value_dim": config.size("v_head_dim"),
            "query_rank": None if config.get("q_lora_rank") is None else config.size("q_lora_rank"),
        },
    }


def _gpt(config: Config) -> dict[str, Any]:
    """Return the fields of `Model` for a GPT-2: learned positions, LayerNorm and biases."""
    hidden, heads = config.size("n_embd"), config.size("n_head")
    _check_divides(config, heads, hidden, "correct one of them")
    return {
        "layers": config.size("n_layer"),
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_hidden_size": config.size("n_inner", 4 * hidden),
        "gated": False,
        "biases": True,
        "learned_positions": config.size("n_positions"),
    }


def _check_divides(config: Config, heads: int, hidden: int, remedy: str) -> None:
    if hidden % heads:
        raise HexiError(f"{config.path}: {heads} heads do not divide hidden size {hidden}; {remedy}")


def _has_biases(config: Config) -> bool:
    """Return whether all linear layers have biases; a Llama with biases in some of them only is refused."""
    if config.model_type != "llama":
        return config.model_type == "gpt_oss"
    attention, mlp = config.flag("attention_bias"), config.flag("mlp_bias")
    if attention != mlp:
        problem = (
            f"with mlp_bias = {str(mlp).lower()} is not supported: Megatron has biases in both or in none"
        )
        config.refuse("attention_bias", attention, "give a model with both or none", problem)
    return attention


def _vision_of(config: Config, hidden_size: int) -> Vision | None:
    """Return the encoder of a model's images; ``None``: the model has none, or none that is read.

    Args:
        hidden_size: width of the decoder.

    Raises:
        HexiError: a field is not usable, or the encoder's features are not as wide as the decoder.
    """
    own = config.encoder
    if own is None:
        return None
    features = "out_hidden_size" if own.has("out_hidden_size") else "hidden_size"
    if own.size(features) != hidden_size:
        own.refuse(features, own.get(features), f"write {hidden_size}", "differs from the decoder's width")
    layers, patch = own.size("depth"), own.size("patch_size")
    fields: dict[str, Any] = {
        "layers": layers,
        "heads": own.size("num_heads"),
        "patch_values": own.size("in_channels") * own.size("temporal_patch_size") * patch**2,
        "merge": own.size("spatial_merge_size"),
    }
    if own.has("embed_dim"):
        width = own.size("embed_dim")
        fields |= {"hidden_size": width, "ffn_hidden_size": own.size("mlp_ratio") * width}
    else:
        fields |= {"hidden_size": own.size("hidden_size"), "ffn_hidden_size": own.size("intermediate_size")}
    if own.has("window_size"):
        side = fields["merge"] * (own.size("window_size") // fields["merge"] // patch)
        full = len(_layers(own, "fullatt_block_indexes", layers))
        fields |= {"gated": True, "norm_biases": False, "window": side**2, "full_layers": full}
    if own.has("num_position_embeddings"):
        further = len(_layers(own, "deepstack_visual_indexes", layers))
        positions = own.size("num_position_embeddings")
        fields |= {"patch_bias": True, "positions": positions, "deepstack": further, "in_megatron": True}
    try:
        return Vision(**fields)
    except HexiError as problem:
        raise HexiError(f"{own.path}: {problem}") from None


def _layers(own: Config, field: str, layers: int) -> list[int]:
    """Return the value of a field that is a list of layers of the encoder, counted from 0."""
    value = own.get(field)
    if not isinstance(value, list | tuple) or any(type(i) is not int or not 0 <= i < layers for i in value):
        own.refuse(field, value, f"write a list of layers from 0 to {layers - 1}")
    return list(value)
