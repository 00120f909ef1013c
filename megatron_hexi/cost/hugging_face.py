"""Models as Hugging Face's config.json describes them: Llama, Mistral, Qwen and GPT-2 families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_hexi.cost.model import Model
from megatron_hexi.errors import HexiError

#: Our field: its names in the Llama family, and in the GPT-2 family.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab_size": ("vocab_size", "vocab_size"),
}
_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_GPT_LIKE = ("gpt2",)

#: What changes shapes in a way that the runtime does not carry out; a false value is harmless.
_REFUSED = {
    "num_local_experts": "mixture of experts",
    "num_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "kv_lora_rank": "multi-latent attention",
}


def model_from_config(text: str, path: Path) -> Model:
    """The model of a config.json.

    Raises:
        HexiError: not JSON, an unknown family, a field that is missing or unusable, or a shape that is not
            supported; with file and field.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as problem:
        line = getattr(problem, "lineno", 1)
        raise HexiError(f"{path}:{line}: not valid JSON ({problem}); correct that line") from None
    if not isinstance(config, dict):
        raise HexiError(f"{path}: not a config.json: a mapping with model_type and num_hidden_layers")
    family = _family(config, path)
    _refuse(config, path)
    gpt = family in _GPT_LIKE
    sizes = {ours: _size(config, names[gpt], path) for ours, names in _NAMES.items()}
    hidden, heads = sizes["hidden_size"], sizes["heads"]
    if config.get("head_dim") is None and hidden % heads:
        raise HexiError(f"{path}: {heads} heads do not divide hidden size {hidden}; add head_dim")
    ffn_name = "n_inner" if gpt else "intermediate_size"
    ffn = 4 * hidden if gpt and config.get(ffn_name) is None else _size(config, ffn_name, path)
    try:
        return Model(
            name=str(path),
            **sizes,
            kv_heads=_size(config, "num_key_value_heads", path, default=heads),
            head_dim=_size(config, "head_dim", path, default=hidden // heads),
            ffn_hidden_size=ffn,
            gated=not gpt,
            tied_embeddings=_flag(config, "tie_word_embeddings", path, default=gpt),
            biases=gpt,
            qk_norm=family == "qwen3",
            learned_positions=_size(config, "n_positions", path, default=1024) if gpt else 0,
            source=str(path),
        )
    except HexiError as problem:
        raise HexiError(f"{path}: {problem}") from None


def _family(config: dict[str, Any], path: Path) -> str:
    known = (*_LLAMA_LIKE, *_GPT_LIKE)
    family = config.get("model_type")
    if family not in known:
        found = "is missing" if family is None else f"= {_short(family)} is not known"
        raise HexiError(
            f"{path}: model_type {found}; known are {', '.join(known)}: "
            "write the one with the same shapes, or give a file of Megatron's arguments"
        )
    return str(family)


def _refuse(config: dict[str, Any], path: Path) -> None:
    for field, what in _REFUSED.items():
        if config.get(field):
            raise HexiError(
                f"{path}: {field} = {_short(config[field])}: {what} is not supported; give a dense model"
            )
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise HexiError(
            f"{path}: sliding_window = {_short(config['sliding_window'])}: attention in a window is not "
            "supported; set it to null to train with full attention"
        )


def _size(config: dict[str, Any], field: str, path: Path, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        if default is None:
            raise HexiError(f"{path}: {field} is missing; add it")
        return default
    if type(value) is not int or value < 1:
        raise HexiError(f"{path}: {field} = {_short(value)}; write a whole number above 0")
    return value


def _flag(config: dict[str, Any], field: str, path: Path, default: bool) -> bool:
    value = config.get(field)
    if value is None:
        return default
    if type(value) is not bool:
        raise HexiError(f"{path}: {field} = {_short(value)}; write true or false")
    return value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
