"""The setting `recompute` of a job or a stage: which modules and layers the backward pass computes again."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field

Layers = Annotated[int, Field(strict=True, ge=1, le=10_000)]
#: Parts of a layer that may be recomputed by themselves, by Megatron's names (--recompute-modules).
Module = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
MODULES: tuple[Module, ...] = get_args(Module)
Amount = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Amount, ...] = get_args(Amount)
#: Activations that the backward pass recomputes: none, core attention, every layer, the first n layers, or
#: some modules of every layer.
Recompute = Amount | Layers | Annotated[tuple[Module, ...], Field(min_length=1)]
#: Megatron's options of recomputation.
RECOMPUTE_FLAGS: Final = (
    *("--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
    "--recompute-modules",
)


@dataclass(frozen=True)
class Again:
    """Work of layers that the backward pass computes again; false where there is none.

    Args:
        modules: modules of every layer that are computed again by themselves.
        is_whole: whether layers are computed again as a whole.
        first: number of these layers, the first of each chunk of a stage; 0: all.
    """

    modules: frozenset[Module] = frozenset()
    is_whole: bool = False
    first: int = 0

    @staticmethod
    @lru_cache(maxsize=256)
    def of(recompute: Recompute | None) -> Again:
        """Return the work of a setting; ``None``: nothing."""
        if isinstance(recompute, tuple):
            return Again(frozenset(recompute))
        if isinstance(recompute, int):
            return Again(is_whole=True, first=recompute)
        modules: tuple[Module, ...] = ("core_attn",) if recompute == "selective" else ()
        return Again(frozenset(modules), recompute == "full")

    def __bool__(self) -> bool:
        return self.is_whole or bool(self.modules)

    def __contains__(self, module: Module) -> bool:
        return self.is_whole or module in self.modules

    def layers(self, count: int, chunks: int = 1) -> int:
        """Return how many of a stage's layers, in so many chunks, are computed again, in whole or in part."""
        return min(count, chunks * self.first) if self.first else count * bool(self)


def of_layer(recompute: Recompute) -> Recompute:
    """Return the setting of a layer that is computed again: ``full`` for a number of layers."""
    return "full" if isinstance(recompute, int) else recompute


def spell_recompute(recompute: Recompute) -> str:
    """Return recomputation as text."""
    if isinstance(recompute, int):
        return f"{recompute} layer{'' if recompute == 1 else 's'}"
    return recompute if isinstance(recompute, str) else ", ".join(recompute)


def recompute_settings(recompute: Recompute | None) -> dict[str, Any]:
    """Return Megatron's arguments of recomputation, by flag."""
    again, values = Again.of(recompute), tuple[Any, ...]((None,) * 4)
    if again.is_whole:
        values = "full", "block" if again.first else "uniform", again.first or 1, None
    elif again:
        values = "selective", None, None, list(recompute) if isinstance(recompute, tuple) else None
    return dict(zip(RECOMPUTE_FLAGS, values, strict=True))


def stated_recompute(args: Namespace) -> Recompute | None:
    """Return what a job recomputes by its arguments, other than the number of layers; ``None``: nothing."""
    modules = tuple(name for name in args.recompute_modules or () if name != "gdn_norm_out")
    if args.recompute_granularity == "selective" and modules not in ((), ("core_attn",)):
        return modules
    return args.recompute_granularity
