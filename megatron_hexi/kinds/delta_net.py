"""Gated delta nets."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_hexi.errors import HexiError
from megatron_hexi.kinds.layer_list import layers_of, pattern_text
from megatron_hexi.kinds.state import State, TokenWork

if TYPE_CHECKING:
    from megatron_hexi.kinds.decoder import Decoder

_VARIANT, _LAYERS = "--experimental-attention-variant", "--linear-attention-freq"


class DeltaNet(State):
    """Heads of a gated delta net (Megatron's GatedDeltaNet); each has a value, each group a key.

    Work is that of flash-linear-attention's chunk_gated_delta_rule (fla/ops/gated_delta_rule/chunk.py).
    """

    kind = "delta"
    title = "gated delta net"
    letter = "G"
    chunk = 64  # of chunk_gated_delta_rule
    steering = 2  # decay and rate
    flag_of: ClassVar = {
        "heads": "--linear-num-value-heads",
        "head_dim": "--linear-value-head-dim",
        "groups": "--linear-num-key-heads",
        "key_dim": "--linear-key-head-dim",
        "conv_width": "--linear-conv-kernel-dim",
    }

    @classmethod
    def in_gpt(cls, args: Namespace, source: str) -> dict[str, Any] | None:
        """Return the fields of delta nets in place of attention in some layers of a GPT; ``None``: in none.

        Raises:
            HexiError: the option that says which layers these are is missing, or does not fit the layers.
        """
        if getattr(args, "experimental_attention_variant", None) != "gated_delta_net":
            return None
        if args.linear_attention_freq is None:
            raise HexiError(f"{source}: {_LAYERS} is missing: it says which layers are delta nets; add it")
        # `get_linear_attention_pattern` in Megatron's attention variants
        layers = layers_of(args, _LAYERS, source, every=lambda layer, step: (layer + 1) % step != 0)
        return {**cls.from_arguments(args, source), "layers": layers} if any(layers) else None

    def flags(self, model: Decoder) -> dict[str, int | str]:
        """Return Megatron's flags with their values; in a pattern its letters say which layers these are."""
        found: dict[str, int | str] = {}
        if not model.pattern:
            layers = self.layers or (True,) * model.layers
            found = {_VARIANT: "gated_delta_net", _LAYERS: pattern_text(layers)}
        return found | super().flags(model)

    def head_work(self, element: int) -> TokenWork:
        """Return the work of one head, whose sequence is computed in blocks of Q tokens.

        FLOPs, 2 a product:
        forward:  keys by keys 2 Q N, solved for inputs and keys 2 Q (N + P); the state by keys, what is left
                  of it and what is read of it 6 N P; pairs 2 Q (N + P)
        backward: solved, and states, once more 2 Q (N + P) + 4 N P; gradients 12 N P + Q (14 N + 8 P) + 4 Q^2

        Elements, c = N P / Q of a state a token:
        forward:  convolution 2 P, keys and queries repeated 2 N, values copied 2 P, kernels 7 N + 6 P,
                  the matrix of pairs 8 bytes and 2 e of Q, states 2 c, gated norm 3 P
        backward: 19 N + 25 P, 2 Q, 4 c likewise
        """
        size, key, chunk = self.head_dim, self.key_dim, self.chunk
        area, kept = key * size, key * size / chunk
        forward = 6.0 * area + chunk * (6 * key + 4 * size)
        backward = 16.0 * area + chunk * (16 * key + 10 * size) + 4 * chunk**2
        return TokenWork(
            (forward, backward),
            (
                element * (9 * key + 13 * size + 2 * chunk + 2 * kept) + 8.0 * chunk,
                element * (19 * key + 25 * size + 2 * chunk + 4 * kept),
            ),
        )

    def group_work(self, element: int) -> TokenWork:
        """Return the work of one group of heads that share keys and queries.

        Convolution 4 N and 6 N, norm 4 N and 6 N, read to be repeated 2 N each way.
        """
        return TokenWork((0.0, 0.0), (10.0 * self.key_dim * element, 14.0 * self.key_dim * element))

    def kept_columns(self, heads: Any, groups: Any) -> Any:
        """Return the number of columns kept of a token (Megatron's GatedDeltaNet, flash-linear-attention).

        Kept are the columns that arrived; keys and queries after the convolution; and of each head repeated
        keys and queries, values, the matrix of pairs, and outputs before the norm: 2 N + 3 P + Q.
        """
        more = 2 * self.key_dim + 3 * self.head_dim + self.chunk
        return heads * (self.head_columns + more) + groups * 2 * self.group_columns

    def vectors(self, model: Decoder, width: int) -> int:
        """Return the number of weights beside the projections.

        Each channel has the taps of the convolution, each head a decay and a step, and every rank one norm of
        a head's output.
        """
        return (
            self.channels // width * self.conv_width
            + 2 * (self.heads // width)
            + model.norm_params(self.head_dim)
        )

    @property
    def counted_flops(self) -> int:
        """Forward FLOPs per token, as `gdn_layer_flops`: the convolution, and 4 products per head."""
        return 2 * (self.conv_width * self.channels + 4 * self.inner * self.key_dim)
