"""The attention layer in place of Megatron's core attention, under either layer spec."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_hexi.errors import PlanError, user_errors
from megatron_hexi.megatron.packing import document_ends, packed_shard
from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.patching import Patch, patched
from megatron_hexi.plan import Mask
from megatron_hexi.runtime.all_to_all import compact

_RECOMPUTED = (
    *("self", "query", "key", "value", "attention_mask", "rotary_pos_emb", "attn_mask_type"),
    *("attention_bias", "packed_seq_params"),
)


class HexiCoreAttention(MegatronModule):
    """Core attention under the active plan.

    Its only weights are sinks, under Megatron's name.

    Takes the arguments of Megatron's core attentions. Those that only theirs need are not used: the
    communication type (the plan says how ranks exchange) and process groups (the session has them). Dropout
    is refused with the other options that a plan cannot carry out. ``apply_query_key_layer_scaling`` needs
    nothing here: it divides the scores by the layer's number and multiplies them again before the softmax,
    because of fp16 scores, which our kernels never have.
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
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        session = _session()
        causal = session.given.plan.workload.causal
        if attention_type != "self":
            raise PlanError(
                f"layer {layer_number} has {attention_type} attention; a plan supports self attention only"
            )
        if attn_mask_type is not (AttnMaskType.causal if causal else AttnMaskType.no_mask):
            raise PlanError(
                f"layer {layer_number} has the mask {attn_mask_type.name}, but the plan "
                f"{session.given.path} is {'causal' if causal else 'not causal'}; use a plan for this model"
            )
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        is_windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        #: Number of keys before itself that a query sees; ``None``: all.
        self.window = config.window_size[0] if is_windowed and config.window_size[0] >= 0 else None
        self.tp_group = (
            pg_collection.tp if pg_collection else parallel_state.get_tensor_model_parallel_group()
        )
        self.softmax_offset = self._sinks(config)

    def _sinks(self, config: TransformerConfig) -> Tensor | None:
        """Return the logit of each head's sink, [H]; ``None`` without sinks."""
        if config.softmax_type == "vanilla":
            return None
        heads = config.num_attention_heads // self.tp_group.size()
        device = torch.cuda.current_device()
        if config.softmax_type == "off-by-one":
            return torch.zeros(heads, device=device, dtype=config.params_dtype)
        offset = torch.nn.Parameter(torch.empty(heads, device=device, dtype=config.params_dtype))
        return config.init_method(offset) if config.perform_initialization else offset

    @torch.compiler.disable  # It waits for other ranks, block by block.
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
        """Return the attention of this rank's rows.

        Args:
            query: [L, B, H, D], rows of the shard, padding last; [L, H, D] with documents.
            key: [L, B, K, D]; [L, K, D] with documents; [L, B, 1, C + R] where latent columns travel.
            value: values, shaped as the key but with another head size under multi-latent attention; where
                latent columns travel, the matrix [H (N + V), C] that makes keys and values of them.
            attention_mask: must be ``None``: the mask is the plan's.
            attn_mask_type: ``None``, or the type that the layer was built with.
            attention_bias: must be ``None``.
            packed_seq_params: the ends of documents, or ``None``.

        Returns:
            [L, B, H D], zero in padding rows; [L, H D] with documents.

        Raises:
            PlanError: an argument that a plan cannot carry out.
        """
        for name, argument in (("attention_mask", attention_mask), ("attention_bias", attention_bias)):
            if argument is not None:
                raise PlanError(
                    f"attention was given {name}, which a plan does not support yet; train without it"
                )
        if attn_mask_type not in (None, self.attn_mask_type):
            raise PlanError(
                f"attention was given the mask {attn_mask_type}, the layer has {self.attn_mask_type}; "
                "train without it"
            )
        session = _session()
        packed = packed_shard(session, document_ends(packed_seq_params))
        documents, shard = packed.documents, packed.shard
        if documents is not None:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        matrix, latent = None, session.given.plan.workload.latent_exchange
        if latent is not None:
            matrix = value
            key, value = key.split([latent.kv_rank, latent.rotary_dim], dim=-1)
        output = session.attention(
            query,
            key,
            value,
            self.softmax_scale,
            Mask(session.given.plan.workload.causal, self.window, documents),
            self.softmax_offset,
            padding=shard.rows - shard.tokens,
            matrix=matrix,
        ).flatten(2)
        return output if documents is None else output.squeeze(1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Return learned sinks, as Megatron's own attention stores them."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


def _session() -> Session:
    session = active_session()
    assert session is not None, "the layer is built only under a plan"
    return session


def _replaceable() -> tuple[type, ...]:
    """Return the core attentions that ours can replace: Megatron's, and ours itself."""
    try:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention
    except ImportError:
        return (HexiCoreAttention, DotProductAttention)
    return (HexiCoreAttention, DotProductAttention, TEDotProductAttention)


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


@patched(
    "megatron.core.transformer.attention:Attention._checkpointed_attention_forward",
    why="saves query, key and value to recompute attention, not the tensor that they were cut from",
    parameters={"<0.19": _RECOMPUTED, ">=0.19": (*_RECOMPUTED, "core_attention_extra_kwargs")},
)
def _with_compact_inputs(
    original: Callable[..., Tensor],
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    if active_session() is not None:
        # Where latent columns travel, the value is a weight, which must not be copied.
        moved = (query, key) if isinstance(value, torch.nn.Parameter) else (query, key, value)
        query, key, *rest = compact(moved)
        value = rest[0] if rest else value
    return original(self, query, key, value, *args, **kwargs)


_PARAMETERS = (
    *("self", "config", "submodules", "layer_number", "attn_mask_type", "attention_type"),
    *("cp_comm_type", "pg_collection"),
)


ATTENTION_PATCHES = (
    *(
        Patch(
            target=f"megatron.core.transformer.{target}.__init__",
            why="builds our core attention into every attention layer, whichever spec names Megatron's",
            build=_with_hexi_attention,
            parameters={
                "<0.18": (*_PARAMETERS, *before),
                ">=0.18": (*_PARAMETERS, "pp_layer_offset", "name"),
            },
        )
        # Multi-latent attention builds a core attention of its own, after that of its base class.
        for target, before in (
            ("attention:Attention", ("pp_layer_offset",)),
            ("multi_latent_attention:MultiLatentAttention", ()),
        )
    ),
    _with_compact_inputs,
)
