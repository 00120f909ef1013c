"""Gated short convolutions (LFM2)."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_hexi.kinds.part import Columns, LayerPart, WeightMatrix, check_sizes

if TYPE_CHECKING:
    from megatron_hexi.kinds.decoder import Decoder

_TAPS = "--linear-conv-kernel-dim"
#: Elements per channel, of 16 bits, that kernels read and write for three taps, in
#: runtime/short_convolution.py. Forward: gates 6, rows arranged 4, products 9 and sums 12 in fp32, own rows
#: in their type 5. Backward: gates 12, own rows 7, of each tap the gradients of rows 13 and of weights 7,
#: arranged rows 6.
_FORWARD, _BACKWARD = 36.0, 85.0
#: Elements per channel that are kept beside the result: gates, value, what is convolved, and its sum.
_KEPT = 5.0


@dataclass(frozen=True)
class ShortConv(LayerPart):
    """A convolution of the latest few tokens between two gates, in place of attention in some layers.

    It has a channel for each column of the hidden state (transformers' Lfm2ShortConv). A row reads the rows
    just before it; a rank receives those of them that it does not hold (`plan.halo`). So the channels
    of a row stay on the unit that holds the row, and a domain may have several groups.

    Args:
        taps: taps of the convolution: --linear-conv-kernel-dim.

    Raises:
        HexiError: a size that is no whole number above 0.
    """

    title: ClassVar[str] = "short convolution"
    #: Its letter in --hybrid-layer-pattern, of this package's own.
    letter: ClassVar[str] = "C"

    taps: int = 3

    def __post_init__(self) -> None:
        check_sizes("short_conv", self)

    @staticmethod
    def from_arguments(args: Namespace) -> dict[str, Any]:
        """Return the fields by Megatron's arguments."""
        return {"taps": args.linear_conv_kernel_dim}

    def flags(self, _: Decoder) -> dict[str, int | str]:
        """Return Megatron's flags with their values."""
        return {_TAPS: self.taps}

    def matrices(self, model: Decoder, width: int) -> tuple[WeightMatrix, ...]:
        """Return the projections into the channels (two gates and a value each) and out; without biases."""
        hidden = model.hidden_size
        return WeightMatrix(hidden, 3 * hidden / width), WeightMatrix(hidden / width, hidden)

    def vectors(self, model: Decoder, width: int) -> int:
        """Return the number of taps of all channels."""
        return model.hidden_size // width * self.taps

    def row_columns(self, model: Decoder, width: int, row_parts: int, sends_latent: bool) -> Columns:
        """Return the `Columns` of a row, which gates and taps read and write many times."""
        channels = model.hidden_size / width
        return Columns(
            copied=_FORWARD * channels,
            copied_back=_BACKWARD * channels,
            inputs=channels,
            outputs=3 * channels,
            kept=_KEPT * channels,
        )

    def halo_elements(self, model: Decoder, width: int) -> float:
        """Return how many elements of rows before its own a rank receives for a sample."""
        return (self.taps - 1) * model.hidden_size / width

    def mixing_flops(self, model: Decoder, keys: float) -> float:
        """Return the FLOPs of a token's taps forward, 2 each."""
        return 2.0 * self.taps * model.hidden_size
