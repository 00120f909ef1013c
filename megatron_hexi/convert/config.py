"""What a Hugging Face config.json says of a dense model, and Megatron's arguments for the same model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hexi.cost.hugging_face import model_from_config
from megatron_hexi.cost.model import Model
from megatron_hexi.errors import HexiError
from megatron_hexi.text_file import read_text

#: A field, the values that are carried over, and what another value would mean.
_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("model_type", ("llama", "qwen2", "qwen3"), "another architecture"),
    ("hidden_act", ("silu",), "another activation"),
    ("attention_bias", (None, False), "biases of attention"),
    ("mlp_bias", (None, False), "biases of the MLP"),
    ("partial_rotary_factor", (None, 1, 1.0), "rotary embeddings of a part of each head"),
    ("quantization_config", (None,), "quantized weights"),
)
#: What Megatron's --use-rope-scaling computes with; megatron-core 0.19 builds models with this factor,
#: whatever --rope-scaling-factor says (`gpt_config_from_args` in megatron/training/argument_utils.py).
_LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class DenseModel:
    """A model that is converted.

    Attributes:
        shapes: layers, heads, sizes.
        qkv_bias: whether queries, keys and values have biases (Qwen2).
        norm_epsilon: of RMSNorm.
        rotary_base: of rotary embeddings.
        rope_scaling: whether long wavelengths are scaled as in Llama 3.1.
        positions: longest sequence that the model was made for.
    """

    shapes: Model
    qkv_bias: bool
    norm_epsilon: float
    rotary_base: float
    rope_scaling: bool
    positions: int

    def megatron_arguments(self) -> list[tuple[str, str]]:
        """Megatron's arguments for the model: flag and value, which is empty where it takes none."""
        shapes = self.shapes
        sizes = {
            "--num-layers": shapes.layers,
            "--hidden-size": shapes.hidden_size,
            "--ffn-hidden-size": shapes.ffn_hidden_size,
            "--num-attention-heads": shapes.heads,
            "--kv-channels": shapes.head_dim,
            "--num-query-groups": shapes.kv_heads,
            "--max-position-embeddings": self.positions,
            "--norm-epsilon": self.norm_epsilon,
            "--rotary-base": int(self.rotary_base),
        }
        flags = {
            "--group-query-attention": True,
            "--swiglu": True,
            "--disable-bias-linear": True,
            "--add-qkv-bias": self.qkv_bias,
            "--qk-layernorm": shapes.qk_norm,
            "--use-rope-scaling": self.rope_scaling,
            "--untie-embeddings-and-output-weights": not shapes.tied_embeddings,
        }
        return [
            *((flag, str(value)) for flag, value in sizes.items()),
            ("--normalization", "RMSNorm"),
            ("--position-embedding-type", "rope"),
            *((flag, "") for flag, is_used in flags.items() if is_used),
        ]


def read_model(folder: Path) -> DenseModel:
    """The model of a folder in Hugging Face's format.

    Raises:
        HexiError: config.json is missing or malformed, or describes what is not converted.
    """
    path = folder / "config.json"
    text = read_text(path, remedy="give a folder with config.json and *.safetensors")
    shapes = model_from_config(text, path)
    config: dict[str, Any] = json.loads(text)
    for field, allowed, what in _ONLY:
        if config.get(field) not in allowed:
            known = ", ".join(json.dumps(value) for value in allowed if value is not None) or "null"
            raise HexiError(
                f"{path}: {field} = {json.dumps(config.get(field))}: {what} is not converted; only {known}"
            )
    rope = _rope(config, path)
    base = _number(rope.get("rope_theta", config.get("rope_theta", 10000.0)), "rope_theta", path)
    if base != int(base):
        raise HexiError(
            f"{path}: rope_theta = {base}: Megatron's --rotary-base is a whole number; give such a model"
        )
    return DenseModel(
        shapes,
        qkv_bias=config["model_type"] == "qwen2",
        norm_epsilon=_number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", path),
        rotary_base=base,
        rope_scaling="factor" in rope,
        positions=int(_number(config.get("max_position_embeddings", 2048), "max_position_embeddings", path)),
    )


def _rope(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The mapping that transformers 5 calls ``rope_parameters`` and earlier versions ``rope_scaling``."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(field) or {}
    if not isinstance(rope, dict):
        raise HexiError(f"{path}: {field} = {json.dumps(rope)[:40]}: write a mapping, or null")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise HexiError(f"{path}: {field}.partial_rotary_factor: is not converted; only 1")
    if kind == "default":
        return {name: value for name, value in rope.items() if name != "factor"}
    if kind != "llama3":
        raise HexiError(
            f"{path}: {field}.rope_type = {json.dumps(kind)}: is not converted; only default and llama3"
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
