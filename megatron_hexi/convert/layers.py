"""A layer's names in both formats, and the MLP that every token goes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_hexi.convert.config import ConvertedModel
from megatron_hexi.convert.parts import Part, Weight
from megatron_hexi.models import Model


@dataclass(frozen=True)
class CheckpointLayer:
    """A layer of a model, and a model of only such layers, with its names in both formats."""

    model: ConvertedModel
    shapes: Model
    number: int
    has_own_keys: bool

    def weight(self, key: str, *parts: Part, same_as: str = "", **form: Any) -> Weight:
        """Return the names in both formats of one of this layer's tensors, from names relative to the layer.

        Args:
            parts: Hugging Face's names, and shapes.
            same_as: Megatron's other name, if there is one.
            form: way in which the parts lie in the matrix (see `Weight`).
        """
        prefix = "decoder.layers." + (f"{self.number}." if self.has_own_keys else "")
        return Weight(
            prefix + key,
            tuple((f"model.layers.{self.number}.{name}", shape) for name, shape in parts),
            layer=None if self.has_own_keys else (self.number, self.model.shapes.layers),
            same_as=(prefix + same_as,) if same_as else (),
            **form,
        )


def dense_mlp(layer: CheckpointLayer, key: str, name: str, width: int) -> list[Weight]:
    """Return the weights of an MLP with a gate that every token goes through."""
    hidden = layer.shapes.hidden_size
    weights = [
        layer.weight(
            f"{key}.linear_fc1.weight",
            (f"{name}.gate_proj.weight", (width, hidden)),
            (f"{name}.up_proj.weight", (width, hidden)),
        ),
        layer.weight(f"{key}.linear_fc2.weight", (f"{name}.down_proj.weight", (hidden, width))),
    ]
    if layer.shapes.biases:
        gate_and_up = [(f"{name}.{matrix}_proj.bias", (width,)) for matrix in ("gate", "up")]
        weights += [
            layer.weight(f"{key}.linear_fc1.bias", *gate_and_up),
            layer.weight(f"{key}.linear_fc2.bias", (f"{name}.down_proj.bias", (hidden,))),
        ]
    return weights
