"""A tensor of Megatron's checkpoint, made of Hugging Face's and taken apart into them; a layer's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_hexi.convert.config import ConvertedModel
from megatron_hexi.models import Model

#: Hugging Face's name of a tensor, and its shape.
Part = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Weight:
    """A tensor of Megatron's checkpoint, of one layer or of the whole model.

    Attributes:
        key: its name in a torch_dist checkpoint.
        parts: Hugging Face's names for what it is made of, with their shapes.
        groups: number of blocks of rows; a block has its share of each part's rows, one part after another.
        layer: number of the layer, and how many layers are stacked under the key along the first dimension;
            ``None``: the key is this tensor's alone.
        experts: routed experts that lie along the first dimension of the layer's tensor; 0: there is no such
            dimension.
        is_joined: whether there is a single part, with all experts along its first dimension.
        is_transposed: whether the single part has the inputs of each expert before its outputs.
        is_interleaved: whether outputs of the gate and of the up projection alternate in the single part.
        is_vocabulary: whether rows are tokens, which Megatron pads to a multiple.
        same_as: other names of the tensor, which Megatron gives it with or without Transformer Engine.
    """

    key: str
    parts: tuple[Part, ...]
    groups: int = 1
    layer: tuple[int, int] | None = None
    experts: int = 0
    is_joined: bool = False
    is_transposed: bool = False
    is_interleaved: bool = False
    is_vocabulary: bool = False
    same_as: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of Megatron's tensor, without padding and without the dimension of layers."""
        first, *columns = self.parts[0][1]
        if self.is_joined:
            return (first, *(columns[::-1] if self.is_transposed else columns))
        rows = sum(shape[0] for _, shape in self.parts)
        return (self.experts, rows // self.experts, *columns) if self.experts else (rows, *columns)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return Megatron's tensor, joined from its parts in their order."""
        if not self.is_joined:
            blocks = [part.unflatten(0, (self.groups, -1)) for part in parts]
            return torch.cat(blocks, dim=1).reshape(self.shape)
        (whole,) = parts
        if self.is_transposed:
            whole = whole.transpose(1, 2)
        if self.is_interleaved:
            whole = whole.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return whole.contiguous()

    def split(self, joined: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split Megatron's tensor into copies of its parts, by name; padding rows are dropped."""
        if self.is_joined:
            if self.is_interleaved:
                joined = joined.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            if self.is_transposed:
                joined = joined.transpose(1, 2)
            return {self.parts[0][0]: joined.contiguous().clone()}
        rows = [shape[0] // self.groups for _, shape in self.parts]
        matrix = joined.flatten(0, 1) if self.experts else joined[: self.shape[0]]
        blocks = matrix.unflatten(0, (self.groups, -1)).split(rows, dim=1)
        return {
            name: block.reshape(shape).clone()
            for (name, shape), block in zip(self.parts, blocks, strict=True)
        }


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
