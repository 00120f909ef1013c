"""What a Hugging Face config.json says of a dense model, and Megatron's arguments for the same model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hexi.cost.hugging_face import model_from_config
from megatron_hexi.cost.hugging_face_constants import Constants, constants_from_config
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


@dataclass(frozen=True)
class DenseModel:
    """A model that is converted.

    Attributes:
        shapes: layers, heads, sizes.
        constants: of norms, rotary embeddings and biases.
        positions: longest sequence that the model was made for.
    """

    shapes: Model
    constants: Constants
    positions: int

    def megatron_arguments(self) -> list[tuple[str, str]]:
        """Megatron's arguments for the model: flag and value, which is empty where it takes none."""
        shapes, constants = self.shapes, self.constants
        sizes = {
            "--num-layers": shapes.layers,
            "--hidden-size": shapes.hidden_size,
            "--ffn-hidden-size": shapes.ffn_hidden_size,
            "--num-attention-heads": shapes.heads,
            "--kv-channels": shapes.head_dim,
            "--num-query-groups": shapes.kv_heads,
            "--max-position-embeddings": self.positions,
            "--norm-epsilon": constants.norm_epsilon,
            "--rotary-base": constants.rotary_base,
        }
        flags = {
            "--group-query-attention": True,
            "--swiglu": True,
            "--disable-bias-linear": True,
            "--add-qkv-bias": constants.qkv_bias,
            "--qk-layernorm": shapes.qk_norm,
            "--use-rope-scaling": constants.rope_scaling,
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
    positions = config.get("max_position_embeddings", 2048)
    if type(positions) is not int or positions < 1:
        said = json.dumps(positions)[:40]
        raise HexiError(f"{path}: max_position_embeddings = {said}; write a whole number above 0")
    return DenseModel(shapes, constants_from_config(config, path), positions)
