"""What a Hugging Face config.json says of a model besides its shapes: norms, rotary embeddings, biases."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hexi.errors import HexiError

#: What Megatron's --use-rope-scaling computes with; megatron-core 0.19 builds models with this factor,
#: whatever --rope-scaling-factor says (`gpt_config_from_args` in megatron/training/argument_utils.py).
_LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Constants:
    """Constants of a dense model.

    Attributes:
        norm_epsilon: of its norms.
        rotary_base: of rotary embeddings; ``None``: positions are learned.
        rope_scaling: whether long wavelengths are scaled as in Llama 3.1.
        qkv_bias: whether queries, keys and values have biases (Qwen2).
    """

    norm_epsilon: float
    rotary_base: int | None
    rope_scaling: bool
    qkv_bias: bool

    def flags(self) -> list[str]:
        """Megatron's flags for them."""
        rotary = [] if self.rotary_base is None else ["--rotary-base", str(self.rotary_base)]
        return [
            *("--norm-epsilon", str(self.norm_epsilon)),
            *rotary,
            *(["--use-rope-scaling"] if self.rope_scaling else []),
            *(["--add-qkv-bias"] if self.qkv_bias else []),
        ]


def constants_from_config(config: Mapping[str, Any], path: Path) -> Constants:
    """The constants of a config.json that `model_from_config` took.

    Args:
        config: its document.
        path: its file, for messages.

    Raises:
        HexiError: a value that is unusable, or that Megatron has no flag for; with file and field.
    """
    if config["model_type"] == "gpt2":
        epsilon = _number(config.get("layer_norm_epsilon", 1e-5), "layer_norm_epsilon", path)
        return Constants(epsilon, rotary_base=None, rope_scaling=False, qkv_bias=False)
    rope = _rope(config, path)
    base = _number(rope.get("rope_theta", config.get("rope_theta", 10000.0)), "rope_theta", path)
    if base != int(base):
        raise HexiError(
            f"{path}: rope_theta = {base}: Megatron's --rotary-base is a whole number; give such a model"
        )
    return Constants(
        norm_epsilon=_number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", path),
        rotary_base=int(base),
        rope_scaling="factor" in rope,
        qkv_bias=config["model_type"] == "qwen2",
    )


def _rope(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The mapping that transformers 5 calls ``rope_parameters`` and earlier versions ``rope_scaling``."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(field) or {}
    if not isinstance(rope, dict):
        raise HexiError(f"{path}: {field} = {json.dumps(rope)[:40]}: write a mapping, or null")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise HexiError(f"{path}: {field}.partial_rotary_factor: is not supported; only 1")
    if kind == "default":
        return {name: value for name, value in rope.items() if name != "factor"}
    if kind != "llama3":
        raise HexiError(
            f"{path}: {field}.rope_type = {json.dumps(kind)}: is not supported; only default and llama3"
        )
    for name, value in _LLAMA3_ROPE.items():
        if rope.get(name) != value:
            raise HexiError(
                f"{path}: {field}.{name} = {json.dumps(rope.get(name))}: Megatron's --use-rope-scaling "
                f"has {value} built in; give a model with that"
            )
    return rope


def _number(value: Any, field: str, path: Path) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise HexiError(f"{path}: {field} = {json.dumps(value)[:40]}; write a number above 0")
    return float(value)
