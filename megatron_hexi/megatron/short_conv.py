"""LFM2's gated short convolutions as layers of Megatron's HybridModel: the letter C of its pattern.

Megatron has no such layer. The norm, projections and residual addition are those that Megatron specifies for
Mamba layers, so they are Transformer Engine's where these are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_hexi.kinds import ShortConv
from megatron_hexi.patching import Patch, patched

#: A letter of Megatron's for layers that no plan has: such a layer is built where it is asked for.
_STAND_IN = "D"


@patched(
    "megatron.core.models.hybrid.hybrid_block:HybridStack.__init__",
    only=">=0.19",
    why="builds short convolutions, layers C of a hybrid model",
)
def _with_short_convolutions(
    original: Callable[..., None], self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any
) -> None:
    letters = kwargs.get("layer_type_list") or []
    if ShortConv.letter in letters:
        from megatron_hexi.megatron.short_conv_layer import short_conv_spec  # of classes since 0.19

        assert _STAND_IN not in letters, "no plan has layers of both kinds"
        kwargs["layer_type_list"] = [_STAND_IN if one == ShortConv.letter else one for one in letters]
        submodules = replace(submodules, dsa_layer=short_conv_spec(submodules.mamba_layer))
    original(self, config, submodules, *args, **kwargs)


@patched(
    "megatron.training.training:num_floating_point_operations",
    only=">=0.19",
    why="counts short convolutions",
)
def _with_their_flops(
    original: Callable[..., float],
    args: Any,
    batch_size: int,
    seqlen_squared_sum_in_batch: float | None = None,
    total_real_tokens_in_batch: float | None = None,
) -> float:
    found = original(args, batch_size, seqlen_squared_sum_in_batch, total_real_tokens_in_batch)
    layers = (args.hybrid_layer_pattern or "").count(ShortConv.letter)
    if not layers:
        return found
    tokens = total_real_tokens_in_batch or batch_size * args.seq_length
    matrices, taps = 4 * args.hidden_size**2, args.linear_conv_kernel_dim * args.hidden_size
    return found + 3 * layers * tokens * 2 * (matrices + taps)


SHORT_CONV_PATCHES = (
    Patch(
        target="megatron.core.models.hybrid.hybrid_layer_allocation:Symbols.VALID_LAYERS",
        only=">=0.19",
        why="C is the letter of a short convolution in --hybrid-layer-pattern",
        build=lambda letters: letters | {ShortConv.letter},
    ),
    _with_short_convolutions,
    _with_their_flops,
)
