"""Models as Hugging Face's config.json describes them: Llama, Mistral, Qwen and GPT-2 families."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from megatron_hexi.cost.hugging_face_config import Config, read_config
from megatron_hexi.cost.hugging_face_constants import NoFlagError, constants_of
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
    fields = _gpt(config) if config.model_type == "gpt2" else _decoder(config)
    vocab_size, tied = config.size("vocab_size"), config.flag("tie_word_embeddings")
    try:
        return Model(name=str(path), source=str(path), vocab_size=vocab_size, tied_embeddings=tied, **fields)
    except HexiError as problem:
        raise HexiError(f"{path}: {problem}") from None


def _decoder(config: Config) -> dict[str, Any]:
    """Fields of a model with rotary positions, RMSNorm and a gated MLP."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    _check_windows(config, config.size("num_hidden_layers"))
    if config.get("head_dim") is None:
        _check_divides(config, heads, hidden, "add head_dim")
    return {
        "layers": config.size("num_hidden_layers"),
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": config.size("num_key_value_heads", heads),
        "head_dim": config.size("head_dim", hidden // heads),
        "ffn_hidden_size": config.size("intermediate_size"),
        "gated": True,
        "biases": config.model_type == "llama" and _has_biases(config),
        "qkv_bias": config.model_type == "qwen2",
        "norm_biases": False,
        "qk_norm": config.model_type == "qwen3",
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


def _check_windows(config: Config, layers: int) -> None:
    """Refuse layers whose queries see the latest keys only.

    In Qwen's types layers from max_window_layers on have a window, or those that layer_types names, where
    use_sliding_window is true; in the others all have one.
    """
    window = config.get("sliding_window")
    if config.model_type in ("qwen2", "qwen3"):
        types = config.get("layer_types")
        known = {"full_attention", "sliding_attention"}
        if types is None:
            first = config.get("max_window_layers")
            if type(first) is not int or first < 0:
                config.refuse("max_window_layers", first, "write a whole number from 0")
            slides = first < layers
        elif isinstance(types, list) and len(types) == layers and known.issuperset(map(str, types)):
            slides = "sliding_attention" in types
        else:
            config.refuse("layer_types", types, f"write full_attention for each of the {layers} layers")
        if not (config.flag("use_sliding_window") and slides):
            return
    if window is not None:
        said = "" if "sliding_window" in config.values else " (transformers' default)"
        problem = f"attention in a window is not supported{said}"
        config.refuse("sliding_window", window, "set it to null to train with full attention", problem)
