"""The weights of a decoder, whose layers may differ, and of its encoder of images, if it has one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from megatron_hexi.kinds.decoder import Decoder
from megatron_hexi.kinds.part import built
from megatron_hexi.models.vision import Vision


@dataclass(frozen=True)
class Model(Decoder):
    """A decoder, and the numbers of its weights.

    Megatron gives every tensor-parallel rank at least one KV head, the whole router and shared experts' gate,
    norms of the hidden state, and biases of row-parallel matrices.

    Args:
        vision: the encoder of images, whose weights and layers are not among the decoder's; ``None``: there
            is none, or it is left out.
    """

    vision: Vision | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "vision", built(Vision, self.vision))

    @cached_property
    def encoder(self) -> Model | None:
        """The layers of the encoder of images as a model of such layers; ``None`` without an encoder."""
        if self.vision is None:
            return None
        fields = self.vision.layer_fields
        return Model(name=f"the encoder of {self.name}", vocab_size=1, tied_embeddings=True, **fields)

    def encoder_params(self, tensor_parallel: int = 1) -> tuple[int, int]:
        """Return the weights of the encoder on one rank: without projectors, and of these; 0 without."""
        if self.vision is None or self.encoder is None:
            return 0, 0
        parts = tensor_parallel if self.vision.in_megatron else 1
        layers = self.vision.layers * self.encoder.layer_params(parts)
        patches, projectors = self.vision.params_outside_layers(self.hidden_size, parts)
        return layers + patches, projectors

    @property
    def encoder_columns(self) -> float:
        """Number of columns in and out of all matrices of the encoder that adapters join; 0 without such."""
        vision = self.vision
        if vision is None or self.encoder is None or not vision.in_megatron:
            return 0
        projectors = (1 + vision.deepstack) * (3 * vision.merged_size + self.hidden_size)
        return vision.layers * self.encoder.matrix_columns + projectors

    def padded_vocab(self, tensor_parallel: int = 1) -> int:
        """Return the size of the vocabulary as Megatron pads it."""
        multiple = self.vocab_multiple * tensor_parallel
        return math.ceil(self.vocab_size / multiple) * multiple

    def vocab_params(self, tensor_parallel: int = 1) -> int:
        """Return the weights of one matrix over the padded vocabulary, input or output, on one rank."""
        return self.padded_vocab(tensor_parallel) // tensor_parallel * self.hidden_size

    def prediction_params(self, tensor_parallel: int = 1) -> int:
        """Return the weights of a block of multi-token prediction beside its layer, on one rank.

        The projection of hidden state and embedding, 2h x h, and three norms.
        """
        return self.projection_params(tensor_parallel) + 3 * self.norm_params(self.hidden_size)

    def projection_params(self, tensor_parallel: int = 1) -> int:
        """Return the weights of the projection before a layer of multi-token prediction, on one rank."""
        return 2 * self.hidden_size**2 // tensor_parallel

    def matrix_params(self, tensor_parallel: int = 1) -> int:
        """Return the weights of one layer's matrices on one tensor-parallel rank, without routed experts.

        Raises:
            ValueError: the layers are of several kinds; see `kinds`.
        """
        if not self.is_uniform:
            raise ValueError(f"the layers of {self.name} are of {len(self.kinds)} kinds; ask each of `kinds`")
        matrices = (matrix for part in self.parts for matrix in part.matrices(self, tensor_parallel))
        return int(sum(matrix.weights for matrix in matrices))

    def vector_params(self, tensor_parallel: int = 1) -> int:
        """Return the weights of one layer's norms, biases and convolutions on one rank, without experts."""
        norms = len(self.parts) * (1 + self.post_norms) * self.norm_params(self.hidden_size)
        return norms + sum(part.vectors(self, tensor_parallel) for part in self.parts)

    def layer_params(self, tensor_parallel: int = 1) -> int:
        """Return the weights of one layer on one tensor-parallel rank, without those of routed experts."""
        return self.matrix_params(tensor_parallel) + self.vector_params(tensor_parallel)

    def expert_params(self, parts: int = 1) -> int:
        """Return the weights of one routed expert, or of one of `parts` slices of it; 0 without experts."""
        return sum(experts.expert_params(self, parts) for experts in self.routed)

    @property
    def matrix_columns(self) -> float:
        """Number of columns in and out of all matrices of one layer; layers are of one kind."""
        matrices = (matrix for part in self.parts for matrix in part.matrices(self, 1))
        routed = sum(experts.count * experts.expert_columns(self) for experts in self.routed)
        return routed + sum(matrix.inputs + matrix.outputs for matrix in matrices)

    @property
    def routed_params(self) -> int:
        """Number of weights of all routed experts of one layer."""
        return sum(experts.count * experts.expert_params(self, 1) for experts in self.routed)

    @property
    def total_params(self) -> int:
        """Number of weights of the whole model, without multi-token prediction."""
        return self._params_without_experts + sum(kind.layers * kind.routed_params for kind in self.kinds)

    @property
    def active_params(self) -> int:
        """Number of weights that a token goes through, without its row of the input embedding."""
        active = [(kind, experts.active * kind.layers) for kind in self.kinds for experts in kind.routed]
        routed = sum(count * kind.expert_params() for kind, count in active)
        embedding = self.vocab_params() + self.learned_positions * self.hidden_size
        tied = self.vocab_params() * self.tied_embeddings
        return self._params_without_experts - embedding + tied + routed

    @property
    def _params_without_experts(self) -> int:
        embeddings = self.vocab_params() * (1 if self.tied_embeddings else 2)
        positions = self.learned_positions * self.hidden_size
        layers = sum(kind.layers * kind.layer_params() for kind in self.kinds)
        return layers + embeddings + positions + self.norm_params(self.hidden_size)

    @property
    def mtp_params(self) -> int:
        """Number of weights of all blocks of multi-token prediction."""
        last = self.kinds[self.kind_of_layers[-1]]
        return self.mtp_layers * (last.layer_params() + last.routed_params + self.prediction_params())
