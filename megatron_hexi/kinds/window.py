"""Attention to the latest keys only."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_hexi.kinds.layer_list import layers_of, pattern_text
from megatron_hexi.kinds.part import LARGEST, check_sizes, freeze_layers

if TYPE_CHECKING:
    from megatron_hexi.kinds.decoder import Decoder


@dataclass(frozen=True)
class Window:
    """A window of attention.

    Args:
        size: number of keys that a query sees, its own among them: one more than Megatron's --window-size.
        layers: whether each layer has the window (--window-attn-skip-freq); empty: every layer has.
        in_chunks: whether the window starts again at each multiple of `size` (Llama 4), instead of sliding.

    Raises:
        HexiError: a size that is no whole number above 0.
    """

    size: int
    layers: tuple[bool, ...] = ()
    in_chunks: bool = False

    def __post_init__(self) -> None:
        check_sizes("window", self)
        freeze_layers("window", self)

    def keys_seen(self, context: float) -> float:
        """Return the mean number of keys that a query of a causal sequence sees; its own key counts half."""
        size = min(self.size, context)
        if self.in_chunks:
            whole, rest = divmod(context, size)
            return (whole * size * size + rest * rest) / (2 * context)
        # Queries from the window's size on see all of it, queries before see half of it in the mean.
        return size - size * (size - 1) / (2 * context) - 0.5

    @staticmethod
    def from_arguments(args: Namespace, source: str) -> dict[str, Any] | None:
        """Return the fields of a GPT's window by Megatron's arguments; ``None`` without any.

        Raises:
            HexiError: --window-attn-skip-freq does not fit the layers.
        """
        if not args.window_size or args.window_size[0] < 0:  # -1: as far as there are keys
            return None
        # `is_layer_window_attention` in megatron/core/transformer/utils.py
        flag = "--window-attn-skip-freq"
        layers = layers_of(args, flag, source, every=lambda layer, step: (layer + 1) % step != 0)
        return {"size": args.window_size[0] + 1, "layers": layers} if any(layers) else None

    def flags(self, _: Decoder) -> dict[str, int | str]:
        """Return Megatron's flags with their values."""
        found: dict[str, int | str] = {"--window-size": f"{self.size - 1},0"}
        if self.layers:
            found["--window-attn-skip-freq"] = pattern_text(self.layers)
        return found


#: The window of attention that sees all earlier keys: wider than any sequence.
ALL_KEYS = Window(LARGEST)
