"""Models as Hugging Face's config.json describes them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from megatron_hexi.cost.hugging_face_config import Config, read_config
from megatron_hexi.cost.hugging_face_constants import NoFlagError, constants_of
from megatron_hexi.cost.hugging_face_layers import SCORE_BIAS, experts_of, latent_of, window_of
from megatron_hexi.cost.model import Model
from megatron_hexi.errors import HexiError


def model_from_config(text: str, path: Path) -> Model:
    """The model of a config.json, all of whose fields were looked at.

    Constants that Megatron has no flag for do not matter here: no weight, time or memory depends on them.

    Raises:
        HexiError: not JSON, an unknown type, or a field that is missing, unusable, unknown or not supported;
            with file, field, value and remedy.
    """
    config = read_config(text, path)
    with contextlib.suppress(NoFlagError):  # `constant_flags` says so where flags are printed
        constants_of(config)
    vocab_size, tied = config.size("vocab_size"), config.flag("tie_word_embeddings")
    try:
        fields = _gpt(config) if config.model_type == "gpt2" else _decoder(config)
        return Model(
            name=str(path),
            source=f"{path} ({config.note})" if config.note else str(path),
            vocab_size=vocab_size,
            tied_embeddings=tied,
            **fields,
        )
    except HexiError as problem:
        said = str(problem)
        raise HexiError(said if said.startswith(str(path)) else f"{path}: {said}") from None


def _decoder(config: Config) -> dict[str, Any]:
    """Fields of a model with rotary positions, RMSNorm and a gated MLP."""
    kind, layers = config.model_type, config.size("num_hidden_layers")
    width = "intermediate_size_mlp" if kind == "llama4_text" else "intermediate_size"
    return {
        "layers": layers,
        "hidden_size": config.size("hidden_size"),
        "ffn_hidden_size": config.size(width),
        "gated": True,
        "biases": (kind == "llama" and _has_biases(config)) or kind == "gpt_oss",
        "qkv_bias": kind == "qwen2" or (kind == "glm4_moe" and config.flag("attention_bias")),
        "norm_biases": False,
        "qk_norm": kind in ("qwen3", "qwen3_moe", "gemma3_text")
        or (kind == "glm4_moe" and config.flag("use_qk_norm")),  # Llama 4's has no weights
        "sinks": kind == "gpt_oss",
        "post_norms": kind == "gemma3_text",
        "experts": experts_of(config, layers),
        "window": window_of(config, layers),
        "mtp_layers": config.count("num_nextn_predict_layers") if kind in SCORE_BIAS else 0,
        **_heads(config),
    }


def _heads(config: Config) -> dict[str, Any]:
    """Fields about the heads of attention."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    latent = latent_of(config, heads)
    if latent is not None:
        return {"heads": heads, "kv_heads": heads, "head_dim": latent[1], "latent": latent[0]}
    given = config.model_type != "phi3" and config.get("head_dim") is not None
    if not given:
        remedy = "correct one of them" if config.model_type == "phi3" else "add head_dim"
        _check_divides(config, heads, hidden, remedy)
    return {
        "heads": heads,
        "kv_heads": config.size("num_key_value_heads", heads),
        "head_dim": config.size("head_dim") if given else hidden // heads,
    }


def _gpt(config: Config) -> dict[str, Any]:
    """Fields of a model with learned positions, LayerNorm and biases."""
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
    """Whether all linear layers have biases; Megatron has no model where only some of Llama's have."""
    attention, mlp = config.flag("attention_bias"), config.flag("mlp_bias")
    if attention != mlp:
        problem = (
            f"with mlp_bias = {str(mlp).lower()} is not supported: Megatron has biases in both or in none"
        )
        config.refuse("attention_bias", attention, "give a model with both or none", problem)
    return attention
