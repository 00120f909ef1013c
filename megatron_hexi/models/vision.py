"""The encoder of a model with vision, and the images that it encodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from megatron_hexi.errors import HexiError
from megatron_hexi.kinds.part import LARGEST, check_sizes
from megatron_hexi.plan.flags import spell_flag
from megatron_hexi.yaml_schema import short


@dataclass(frozen=True)
class Vision:
    """An encoder of images: layers of attention without a mask over patches, and projectors to the decoder.

    Each image attends within itself; of a video each pair of frames is an image.

    Args:
        layers: number of layers.
        hidden_size: width of the layers.
        heads: number of heads of a layer.
        ffn_hidden_size: width inside the MLP.
        patch_values: number of values of a patch: channels x frames x height x width.
        merge: number of patches, on each side of a square, that the decoder takes as one token.
        gated: whether the MLP has a gate beside its first matrix.
        norm_biases: whether norms have biases (LayerNorm) or not (RMSNorm).
        patch_bias: whether the embedding of patches has a bias.
        positions: number of positions with a learned embedding; 0: none is learned.
        window: number of patches of a window, in which layers other than `full_layers` attend; 0: all layers
            attend to the whole image.
        full_layers: number of layers that attend to the whole image where there are windows.
        deepstack: number of further projectors, of the features that the decoder's first layers add.
        in_megatron: whether Bridge builds it of Megatron's layers, which adapters join and ranks divide.

    Raises:
        HexiError: a size is no whole number above 0, or heads do not divide the width.
    """

    layers: int
    hidden_size: int
    heads: int
    ffn_hidden_size: int
    patch_values: int
    merge: int = 2
    gated: bool = False
    norm_biases: bool = True
    patch_bias: bool = False
    positions: int = 0
    window: int = 0
    full_layers: int = 0
    deepstack: int = 0
    in_megatron: bool = False

    def __post_init__(self) -> None:
        check_sizes("vision", self, dict.fromkeys(("positions", "window", "full_layers", "deepstack"), 0))
        if self.hidden_size % self.heads:
            raise HexiError(
                f"vision: heads = {self.heads} does not divide hidden_size = {self.hidden_size}; give a "
                "number that does"
            )

    @property
    def layer_fields(self) -> dict[str, Any]:
        """Fields of a decoder whose layers have the sizes of the encoder's."""
        return {
            "layers": self.layers,
            "hidden_size": self.hidden_size,
            "heads": self.heads,
            "kv_heads": self.heads,
            "head_dim": self.hidden_size // self.heads,
            "ffn_hidden_size": self.ffn_hidden_size,
            "gated": self.gated,
            "biases": True,
            "norm_biases": self.norm_biases,
        }

    @property
    def merged_size(self) -> int:
        """Number of columns of the patches that the decoder takes as one token."""
        return self.merge**2 * self.hidden_size

    def params_outside_layers(self, hidden_size: int, parts: int = 1) -> tuple[int, int]:
        """Return the numbers of weights of the patches' embedding with the positions, and of all projectors.

        Args:
            hidden_size: width of the decoder.
            parts: number of ranks that divide the projectors' matrices.
        """
        patches = self.hidden_size * (self.patch_values + self.patch_bias + self.positions)
        width, norm = self.merged_size, 1 + self.norm_biases
        projector = width // parts * (width + 1 + hidden_size) + hidden_size
        norms = norm * (self.hidden_size + self.deepstack * width)  # further ones are over merged patches
        return patches, (1 + self.deepstack) * projector + norms

    def tokens(self, patches: float) -> float:
        """Return the number of the decoder's tokens of some patches."""
        return patches / self.merge**2


#: Fields of parts that may be frozen, as Megatron Bridge names them, and these parts.
FROZEN_PARTS: Final = {"freeze_vision_model": "encoder", "freeze_vision_projection": "projectors"}


@dataclass(frozen=True)
class Images:
    """The images of a sequence, which are alike.

    Args:
        per_sequence: number of images of a sequence.
        patches: number of patches of an image, before they are merged.
        divided: whether plans divide the images of a micro-batch among the units of a first stage; else every
            unit encodes all.
        freeze_vision_model: whether the patches' embedding, the positions and the layers are not trained.
        freeze_vision_projection: whether the projectors are not trained.

    Raises:
        HexiError: a value is no whole number above 0.
    """

    per_sequence: int
    patches: int
    divided: bool = True
    freeze_vision_model: bool = False
    freeze_vision_projection: bool = False

    @property
    def frozen(self) -> list[str]:
        """Names of the fields of the parts that are not trained."""
        return [name for name in FROZEN_PARTS if getattr(self, name)]

    def __post_init__(self) -> None:
        for field, flag in (("per_sequence", "images_per_sequence"), ("patches", "patches")):
            value = getattr(self, field)
            if type(value) is not int or not 0 < value <= LARGEST:
                raise HexiError(f"{spell_flag(flag, short(value))}: write a whole number from 1 to {LARGEST}")
