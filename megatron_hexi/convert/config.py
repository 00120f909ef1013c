"""Read a model from a Hugging Face config.json, and give Megatron's arguments for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_hexi.models.hugging_face.config import read_config
from megatron_hexi.models.hugging_face.constants import constants_of
from megatron_hexi.models.hugging_face.models import model_from_config
from megatron_hexi.models.megatron_arguments import kind_flags
from megatron_hexi.models.model import Model
from megatron_hexi.text_file import read_text

#: Types whose weights have the names of `megatron_hexi.convert.weights`.
_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3"),
    *("mixtral", "qwen3_moe", "deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss"),
)
#: Megatron's flags for an MLP with a gate, of which a model has one.
_GATES = ("--swiglu", "--quick-geglu")


@dataclass(frozen=True)
class ConvertedModel:
    """A model to convert.

    Attributes:
        shapes: layers and their kinds, heads, sizes.
        model_type: the type's name in config.json, which the names of weights depend on.
        constants: Megatron's flags for norms, rotary embeddings, routers and biases, each with its value, if
            any.
        positions: longest sequence that the model was made for.
    """

    shapes: Model
    model_type: str
    constants: Sequence[tuple[str, str]]
    positions: int

    def megatron_arguments(self) -> list[tuple[str, str]]:
        """Return Megatron's arguments for the model: flag and value, which is empty where it takes none."""
        shapes, constants = self.shapes, dict(self.constants)
        sizes = {
            "--num-layers": shapes.layers,
            "--hidden-size": shapes.hidden_size,
            "--ffn-hidden-size": shapes.ffn_hidden_size,
            "--num-attention-heads": shapes.heads,
            "--kv-channels": shapes.head_dim,
            **({"--num-query-groups": shapes.kv_heads} if shapes.kv_heads < shapes.heads else {}),
            "--max-position-embeddings": self.positions,
            **kind_flags(shapes),
        }
        flags = {
            "--group-query-attention": shapes.kv_heads < shapes.heads,
            "--swiglu": not any(gate in constants for gate in _GATES),
            "--disable-bias-linear": not shapes.biases,
            "--qk-layernorm": shapes.qk_norm,
            "--untie-embeddings-and-output-weights": not shapes.tied_embeddings,
        }
        rotary = {"--position-embedding-type": "rope"} | constants
        return [
            *((flag, str(value)) for flag, value in sizes.items()),
            ("--normalization", "RMSNorm"),
            *([("--softmax-type", "learnable")] if shapes.sinks else []),
            *rotary.items(),
            *((flag, "") for flag, is_used in flags.items() if is_used),
        ]


def read_model(folder: Path) -> ConvertedModel:
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
    if shapes.window is not None and config.model_type != "gpt_oss":
        problem = "attention in a window is not converted"
        config.refuse("sliding_window", shapes.window.size, "set it to null for full attention", problem)
    if config.values.get("quantization_config"):
        problem = "quantized weights are not converted"
        remedy = "load the model with transformers in bf16, save it, and convert that"
        config.refuse("quantization_config", config.values["quantization_config"], remedy, problem)
    if shapes.mtp_layers:
        problem = "blocks of multi-token prediction are not converted"
        remedy = "write 0 in a copy: they are left out, as transformers does"
        config.refuse("num_nextn_predict_layers", shapes.mtp_layers, remedy, problem)
    positions = config.size("max_position_embeddings")
    return ConvertedModel(shapes, config.model_type, constants_of(config), positions)
