"""On a CPU, what Megatron does with Transformer Engine only is done in PyTorch.

It specifies the layers of hybrid models and the delta nets of a GPT so, and recomputes modules in contexts
of that library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from megatron_hexi.patching import Patch, patched
from megatron_hexi.platform import Platform


def local_layer_patches(platform: Platform) -> tuple[Patch, ...]:
    """Return the patches that a platform needs."""
    return _PATCHES if platform.name == "cpu" and not HAVE_TE else ()


def _local_stack(original: Any) -> Any:
    from megatron_hexi.megatron.local_specs import hybrid_stack  # Megatron has these layers since 0.19

    return hybrid_stack(original)


def _local_norm(original: type) -> type:
    return WrappedTorchNorm


@patched(
    "megatron.core.models.gpt.experimental_attention_variant_module_specs:"
    "get_transformer_block_with_experimental_attention_variant_spec",
    only=">=0.19",
    why="a GPT's delta nets are specified with Transformer Engine only",
)
def _local_block(
    original: Callable[..., Any], config: Any, vp_stage: int | None = None, pp_rank: int | None = None
) -> Any:
    if config.experimental_attention_variant != "gated_delta_net":
        return original(config, vp_stage, pp_rank)
    from megatron_hexi.megatron.local_specs import delta_net_block  # as above

    return delta_net_block(config, vp_stage, pp_rank)


@patched(
    "megatron.core.models.hybrid.hybrid_block:HybridStack.__init__",
    only=">=0.19",
    why="norms of a hybrid model's queries and keys are Transformer Engine's where none is specified",
)
def _with_local_norms(
    original: Callable[..., None], self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any
) -> None:
    layer = submodules.attention_layer
    if config.qk_layernorm and not config.qk_l2_norm:
        norms = {"q_layernorm": WrappedTorchNorm, "k_layernorm": WrappedTorchNorm}
        attention = layer.submodules.self_attention
        attention = replace(attention, submodules=replace(attention.submodules, **norms))
        layer = replace(layer, submodules=replace(layer.submodules, self_attention=attention))
    original(self, config, replace(submodules, attention_layer=layer), *args, **kwargs)


@patched(
    "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
    why="takes False for fp8, whose contexts are Transformer Engine's",
    parameters=("self", "fp8"),
)
def _in_other_types(original: Callable[..., None], self: Any, fp8: Any = False) -> None:
    original(self, fp8 or None)


def _shared_by_copies(original: Callable[[], Any]) -> Callable[[], Callable[..., None]]:
    def share_storage(output: Tensor, made_again: Tensor) -> None:
        storage = made_again.untyped_storage()
        output.untyped_storage().resize_(storage.size())
        output.untyped_storage().copy_(storage)

    return lambda: share_storage


_PATCHES = (
    _in_other_types,
    Patch(
        target="megatron.core.tensor_parallel.random:_get_share_storage",
        only=">=0.19",
        why="fills a released tensor without a C++ compiler",
        build=_shared_by_copies,
    ),
    Patch(
        target="megatron.core.models.hybrid.hybrid_layer_specs:hybrid_stack_spec",
        only=">=0.19",
        why="a hybrid model's layers are specified with Transformer Engine only",
        build=_local_stack,
    ),
    Patch(
        target="megatron.core.models.hybrid.hybrid_block:TENorm",
        only=">=0.19",
        why="the norm at the end of a hybrid model is Transformer Engine's, whatever is specified",
        build=_local_norm,
    ),
    _local_block,
    _with_local_norms,
)
