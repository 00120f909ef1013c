"""Multi-latent attention."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from megatron_hexi.errors import HexiError
from megatron_hexi.kinds.sizes import Decoder, check_sizes


@dataclass(frozen=True)
class Latent:
    """Multi-latent attention: heads are made of a few columns that all of them share.

    Args:
        kv_rank: number of columns that keys and values are made of: --kv-lora-rank.
        rotary_dim: number of a key's rotary columns, which all heads share: --qk-pos-emb-head-dim.
        value_dim: size of one head's value: --v-head-dim.
        query_rank: number of columns that queries are made of (--q-lora-rank); ``None``: they are made of the
            hidden state itself.

    Raises:
        HexiError: a size that is no whole number above 0.
    """

    kv_rank: int
    rotary_dim: int
    value_dim: int
    query_rank: int | None = None

    def __post_init__(self) -> None:
        check_sizes("latent", self)

    @staticmethod
    def from_arguments(args: Namespace, source: str) -> dict[str, Any] | None:
        """Return the fields of a GPT's latent attention by Megatron's arguments; ``None`` without any.

        Raises:
            HexiError: the attention has weights that the cost model does not count.
        """
        if not args.multi_latent_attention:
            return None
        uncounted = {
            "without --qk-layernorm": not args.qk_layernorm,
            "without --disable-bias-linear": args.add_bias_linear,
            "with --add-qkv-bias": args.add_qkv_bias,
            "with --attention-output-gate": args.attention_output_gate,
            "with --group-query-attention": args.group_query_attention,
        }
        for words, is_so in uncounted.items():
            if is_so:
                verb = "add" if words.startswith("without") else "remove"
                raise HexiError(
                    f"{source}: --multi-latent-attention {words} is not read: its weights are not counted; "
                    f"{verb} {words.partition(' ')[2]}"
                )
        return {
            "kv_rank": args.kv_lora_rank,
            "rotary_dim": args.qk_pos_emb_head_dim,
            "value_dim": args.v_head_dim,
            "query_rank": args.q_lora_rank,
        }

    def flags(self, model: Decoder) -> dict[str, int | str]:
        """Return Megatron's flags with their values."""
        found: dict[str, int | str] = {
            "--kv-lora-rank": self.kv_rank,
            "--qk-head-dim": model.head_dim - self.rotary_dim,
            "--qk-pos-emb-head-dim": self.rotary_dim,
            "--v-head-dim": self.value_dim,
        }
        if self.query_rank is not None:
            found["--q-lora-rank"] = self.query_rank
        return found
