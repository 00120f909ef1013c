"""Read a dense model from a Hugging Face config.json, and give Megatron's arguments for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_hexi.cost.hugging_face import model_from_config
from megatron_hexi.cost.hugging_face_config import read_config
from megatron_hexi.cost.hugging_face_constants import constants_of
from megatron_hexi.cost.model import Model
from megatron_hexi.text_file import read_text

#: Types whose weights have the names of `megatron_hexi.convert.weights`.
_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class DenseModel:
    """A dense model to convert.

    Attributes:
        shapes: layers, heads, sizes.
        constants: Megatron's flags for norms, rotary embeddings and biases, each with its value, if any.
        positions: longest sequence that the model was made for.
    """

    shapes: Model
    constants: Sequence[tuple[str, str]]
    positions: int

    def megatron_arguments(self) -> list[tuple[str, str]]:
        """Return Megatron's arguments for the model: flag and value, which is empty where it takes none."""
        shapes = self.shapes
        sizes = {
            "--num-layers": shapes.layers,
            "--hidden-size": shapes.hidden_size,
            "--ffn-hidden-size": shapes.ffn_hidden_size,
            "--num-attention-heads": shapes.heads,
            "--kv-channels": shapes.head_dim,
            "--num-query-groups": shapes.kv_heads,
            "--max-position-embeddings": self.positions,
        }
        flags = {
            "--group-query-attention": True,
            "--swiglu": True,
            "--disable-bias-linear": not shapes.biases,
            "--qk-layernorm": shapes.qk_norm,
            "--untie-embeddings-and-output-weights": not shapes.tied_embeddings,
        }
        rotary = {"--position-embedding-type": "rope"} | dict(self.constants)
        return [
            *((flag, str(value)) for flag, value in sizes.items()),
            ("--normalization", "RMSNorm"),
            *rotary.items(),
            *((flag, "") for flag, is_used in flags.items() if is_used),
        ]


def read_model(folder: Path) -> DenseModel:
    """Read the model from a folder in Hugging Face's format.

    Raises:
        HexiError: config.json is missing or malformed, or describes what is not converted.
    """
    path = folder / "config.json"
    text = read_text(path, remedy="give a folder with config.json and *.safetensors")
    shapes, config = model_from_config(text, path), read_config(text, path)
    if config.model_type not in _TYPES:
        problem = "another architecture is not converted"
        config.refuse("model_type", config.model_type, f"give one of {', '.join(_TYPES)}", problem)
    if shapes.window is not None:
        problem = "attention in a window is not converted"
        config.refuse("sliding_window", shapes.window.size, "set it to null for full attention", problem)
    return DenseModel(shapes, constants_of(config), config.size("max_position_embeddings"))
