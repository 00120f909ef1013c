"""Mamba-2 layers."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_hexi.errors import HexiError, NoFlagError
from megatron_hexi.kinds.state import State, TokenWork

if TYPE_CHECKING:
    from megatron_hexi.kinds.decoder import Decoder


class Mamba(State):
    """Heads of a Mamba-2 layer (Megatron's MambaMixer); a group's keys and queries are B and C.

    Work is that of mamba_ssm's ssd_combined.py, whose blocks above the diagonal are left out.
    """

    kind = "mamba"
    title = "Mamba"
    letter = "M"
    chunk = 128  # chunk_size of MambaMixer
    steering = 1  # the step
    norms_all_outputs = True
    flag_of: ClassVar = {
        "heads": "--mamba-num-heads",
        "head_dim": "--mamba-head-dim",
        "groups": "--mamba-num-groups",
        "key_dim": "--mamba-state-dim",
    }

    @classmethod
    def from_arguments(cls, args: Namespace, source: str) -> dict[str, Any]:
        """Return the fields; without a number of heads, all heads together are twice as wide as the model.

        Raises:
            HexiError: the size of a head does not divide that width.
        """
        found = super().from_arguments(args, source)
        if found["heads"] is None:
            size = found["head_dim"]
            if size < 1:
                raise HexiError(f"{source}: --mamba-head-dim {size}: give a number above 0")
            if 2 * args.hidden_size % size:
                raise HexiError(
                    f"{source}: --mamba-head-dim {size} does not divide twice the hidden size "
                    f"{args.hidden_size}; add --mamba-num-heads"
                )
            found["heads"] = 2 * args.hidden_size // size
        return found

    def flags(self, model: Decoder) -> dict[str, int | str]:
        """Return Megatron's flags with their values.

        Raises:
            NoFlagError: Megatron has no flag for the width of the convolution.
        """
        if self.conv_width != State.conv_width:
            raise NoFlagError(
                f"model {model.name}: Megatron's Mamba has a convolution of {State.conv_width} taps, and "
                f"no flag for {self.conv_width}; choose another model"
            )
        return super().flags(model)

    def head_work(self, element: int) -> TokenWork:
        """Return the work of one head.

        FLOPs, 2 a product:
        forward:  pairs Q P; the state that is left, and what is read of it, 2 N P each
        backward: states again 2 N P; gradients of states, inputs, keys and queries 8 N P; pairs 3 Q P

        Elements, c = N P / Q of a state a token:
        forward:  convolution 2 P, inputs twice, gate and output 4 P; states 8 bytes and 2 e of c
        backward: convolution again and its gradient 5 P, the kernels of a scan's gradient 16 P; states
                  28 bytes and 4 e of c
        """
        size, area = self.head_dim, self.key_dim * self.head_dim
        kept = area / self.chunk
        return TokenWork(
            (self.chunk * size + 4.0 * area, 3.0 * self.chunk * size + 10 * area),
            (6 * size * element + (8 + 2 * element) * kept, 21 * size * element + (28 + 4 * element) * kept),
        )

    def group_work(self, element: int) -> TokenWork:
        """Return the work of one group of heads that share keys and queries.

        Queries by keys Q N forward, three times that backward; keys and queries through the convolution
        4 N forward, 10 N backward, in kernels 4 N and 8 N, their products in fp32 8 Q and 16 Q bytes.
        """
        key, chunk = self.key_dim, self.chunk
        return TokenWork(
            (1.0 * chunk * key, 3.0 * chunk * key),
            (8.0 * key * element + 8 * chunk, 18.0 * key * element + 16 * chunk),
        )

    def kept_columns(self, heads: Any, groups: Any) -> Any:
        """Return the number of columns kept of a token: all that arrived, and the outputs before the gate.

        As in mamba_ssm's mamba_split_conv1d_scan_combined.
        """
        return heads * (self.head_columns + self.head_dim) + groups * self.group_columns

    def vectors(self, model: Decoder, width: int) -> int:
        """Return the number of weights beside the projections.

        Each channel has the taps of the convolution and a bias, each head a decay, a step and a skip; and all
        outputs have a norm.
        """
        channels, heads = self.channels // width, self.heads // width
        return channels * (self.conv_width + 1) + heads * (3 + self.head_dim)

    @property
    def counted_flops(self) -> int:
        """Forward FLOPs per token of the scan, as `mamba_layer_flops` counts them."""
        return 7 * self.inner * self.key_dim
