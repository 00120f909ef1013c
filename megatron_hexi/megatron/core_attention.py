"""The attention layer: in place of Megatron's core attention, under either layer spec."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_hexi.errors import PlanError, user_errors
from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.patching import Patch


class HexiCoreAttention(MegatronModule):
    """Attention under the active plan. Has no weights, so checkpoints do not know it.

    Takes what Megatron's own core attentions take; arguments that only theirs need are accepted and
    not used: no communication type (the plan says how ranks exchange) and no process groups (the
    session has them). Dropout is refused with the other options that a plan cannot carry out.
    ``apply_query_key_layer_scaling`` asks for nothing here: it divides the scores by the layer's number
    and multiplies them again before the softmax, for the sake of fp16 scores, which our kernels never have.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        session = _session()
        causal = session.given.plan.workload.causal
        if attention_type != "self":
            raise PlanError(
                f"layer {layer_number} has {attention_type} attention; a plan carries out self attention only"
            )
        if attn_mask_type is not (AttnMaskType.causal if causal else AttnMaskType.no_mask):
            raise PlanError(
                f"layer {layer_number} has the mask {attn_mask_type.name}, the plan {session.given.path} is "
                f"{'causal' if causal else 'not causal'}; use a plan for this model"
            )
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attention of this rank's rows.

        Args:
            query: [L, B, H, D], rows of the shard, padding last.
            key: [L, B, K, D].
            value: [L, B, K, D].
            attention_mask: must be ``None``: the mask is the plan's.
            attn_mask_type: ``None``, or the one that the layer was built with.
            attention_bias: must be ``None``.
            packed_seq_params: must be ``None``.

        Returns:
            [L, B, H D], zero in padding rows.

        Raises:
            PlanError: an argument that a plan cannot carry out.
        """
        for name, given in (
            ("attention_mask", attention_mask),
            ("attention_bias", attention_bias),
            ("packed_seq_params", packed_seq_params),
        ):
            if given is not None:
                raise PlanError(
                    f"attention was given {name}, which a plan cannot carry out yet; train without it"
                )
        if attn_mask_type not in (None, self.attn_mask_type):
            raise PlanError(
                f"attention was given the mask {attn_mask_type}, the layer has {self.attn_mask_type}; "
                "train without it"
            )
        session = _session()
        tokens = session.shard.tokens
        output = session.attention(query[:tokens], key[:tokens], value[:tokens], self.softmax_scale)
        output = output.flatten(2)
        padding = session.shard.rows - tokens
        return torch.cat([output, output.new_zeros(padding, *output.shape[1:])]) if padding else output


def _session() -> Session:
    session = active_session()
    assert session is not None, "the layer is built only under a plan"
    return session


def _replaceable() -> tuple[type, ...]:
    """Megatron's core attentions that ours stands in for."""
    try:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention
    except ImportError:
        return (DotProductAttention,)
    return (DotProductAttention, TEDotProductAttention)


def _with_hexi_attention(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(
        self: Any, config: TransformerConfig, submodules: Any, layer_number: int, *args: Any, **kwargs: Any
    ) -> None:
        if active_session() is not None:
            with user_errors():
                if submodules.core_attention not in _replaceable():
                    raise PlanError(
                        f"layer {layer_number} has the core attention {submodules.core_attention!r}, which a "
                        "plan cannot replace; use the local or the Transformer Engine layer spec"
                    )
            submodules = dataclasses.replace(submodules, core_attention=HexiCoreAttention)
        with user_errors():
            original(self, config, submodules, layer_number, *args, **kwargs)

    return __init__


ATTENTION_PATCHES = (
    Patch(
        target="megatron.core.transformer.attention:Attention.__init__",
        why="builds our core attention into every attention layer, whichever spec names Megatron's",
        build=_with_hexi_attention,
        parameters=(
            "self",
            "config",
            "submodules",
            "layer_number",
            "attn_mask_type",
            "attention_type",
            "cp_comm_type",
            "pg_collection",
            "pp_layer_offset",
            "name",
        ),
    ),
)
