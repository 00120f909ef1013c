"""Routed experts in place of a dense MLP."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_hexi.errors import HexiError
from megatron_hexi.kinds.layer_list import layers_of, pattern_text
from megatron_hexi.kinds.mlp import Mlp
from megatron_hexi.kinds.part import WeightMatrix, check_sizes, freeze_layers

if TYPE_CHECKING:
    from megatron_hexi.kinds.decoder import Decoder


@dataclass(frozen=True)
class Experts(Mlp):
    """Routed MLPs, of which each token goes to a few.

    Args:
        count: number of experts of a layer: --num-experts.
        active: number of experts that each token is sent to: --moe-router-topk.
        ffn_hidden_size: width inside an expert: --moe-ffn-hidden-size.
        shared_ffn_hidden_size: total width inside the experts that see every token; 0: there are none
            (--moe-shared-expert-intermediate-size).
        score_bias: whether the router adds a bias to each expert's score that evens their loads
            (--moe-router-enable-expert-bias).
        shared_gate: whether a gate of one column weighs what the experts add that see every token
            (--moe-shared-expert-gate).
        layers: whether each layer has experts (--moe-layer-freq); empty: every layer has.

    Raises:
        HexiError: a size that is no whole number above 0, or more active experts than there are.
    """

    norm_apart = (True, True)

    count: int
    active: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    score_bias: bool = False
    shared_gate: bool = False
    layers: tuple[bool, ...] = ()

    @property
    def normed_copies(self) -> tuple[int, int]:
        """A copy in 16 bits for the router, and one cast for experts that see every token."""
        return 1, int(self.shared_ffn_hidden_size > 0)

    def __post_init__(self) -> None:
        check_sizes("experts", self, {"shared_ffn_hidden_size": 0})
        freeze_layers("experts", self)
        if self.shared_gate and not self.shared_ffn_hidden_size:
            raise HexiError("experts: shared_gate without shared_ffn_hidden_size; leave shared_gate out")
        if self.active > self.count:
            raise HexiError(
                f"experts: active = {self.active} of {self.count} experts; give a number up to {self.count}"
            )

    @staticmethod
    def from_arguments(args: Namespace, source: str) -> dict[str, Any] | None:
        """Return the fields of a GPT's experts by Megatron's arguments; ``None`` without any.

        Raises:
            HexiError: --moe-layer-freq does not fit the layers, or leaves none with experts.
        """
        if not args.num_experts:
            return None
        # megatron/core/models/gpt/gpt_layer_specs.py
        layers = layers_of(args, "--moe-layer-freq", source, every=lambda layer, step: layer % step == 0)
        if not any(layers):
            raise HexiError(
                f"{source}: --moe-layer-freq leaves no layer with experts; leave --num-experts out"
            )
        return {**Experts.routed(args), "layers": layers}

    @staticmethod
    def routed(args: Namespace) -> dict[str, Any]:
        """Return the fields of experts, without the layers that have them."""
        return {
            "count": args.num_experts,
            "active": args.moe_router_topk,
            "ffn_hidden_size": args.moe_ffn_hidden_size or args.ffn_hidden_size,
            "shared_ffn_hidden_size": args.moe_shared_expert_intermediate_size or 0,
            "score_bias": bool(args.moe_router_enable_expert_bias),
            "shared_gate": bool(args.moe_shared_expert_gate),
        }

    def flags(self, _: Decoder) -> dict[str, int | str]:
        """Return Megatron's flags with their values; empty for those that take none."""
        found: dict[str, int | str] = {
            "--num-experts": self.count,
            "--moe-ffn-hidden-size": self.ffn_hidden_size,
            "--moe-router-topk": self.active,
            # Megatron's default, allgather, sends every token to every rank.
            "--moe-token-dispatcher-type": "alltoall",
        }
        if self.shared_ffn_hidden_size:
            found["--moe-shared-expert-intermediate-size"] = self.shared_ffn_hidden_size
        if self.score_bias:
            found["--moe-router-enable-expert-bias"] = ""
        if self.shared_gate:
            found["--moe-shared-expert-gate"] = ""
        if self.layers:
            found["--moe-layer-freq"] = pattern_text(self.layers)
        return found

    def width_inside(self, model: Decoder) -> int:
        """Return the width inside the experts that see every token."""
        return self.shared_ffn_hidden_size

    def matrices(self, model: Decoder, width: int) -> tuple[WeightMatrix, ...]:
        """Return the matrices of experts that see every token, and the router, which every rank has whole."""
        shared = super().matrices(model, width) if self.shared_ffn_hidden_size else ()
        return *shared, WeightMatrix(model.hidden_size, self.count, is_whole=True)

    def vectors(self, model: Decoder, width: int) -> int:
        """Return the number of weights in biases and the shared experts' gate; the router's are not cut."""
        router = self.count * (model.biases + self.score_bias) + model.hidden_size * self.shared_gate
        return super().vectors(model, width) + router

    def expert_matrices(self, model: Decoder) -> int:
        """Return the number of weights of the matrices of one routed expert."""
        return (2 + model.gated) * model.hidden_size * self.ffn_hidden_size

    def expert_columns(self, model: Decoder) -> int:
        """Return the number of columns in and out of the matrices of one routed expert."""
        return 2 * model.hidden_size + (2 + model.gated) * self.ffn_hidden_size

    def expert_params(self, model: Decoder, parts: int) -> int:
        """Return the number of weights of one routed expert, or of one of `parts` slices of it."""
        biases = (1 + model.gated) * self.ffn_hidden_size // parts + model.hidden_size
        return self.expert_matrices(model) // parts + biases * model.biases

    def kept_columns(self, model: Decoder) -> int:
        """Return the number of columns that are kept of a row of a routed expert.

        Input h, first output f (gated 2 f), activation f. The second output is not kept: Megatron multiplies
        the activation by the router's probability before it.
        """
        return model.hidden_size + (2 + model.gated) * self.ffn_hidden_size
