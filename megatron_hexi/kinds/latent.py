"""Multi-latent attention."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_hexi.errors import HexiError
from megatron_hexi.kinds.attention import SoftmaxAttention, head_counts
from megatron_hexi.kinds.part import Columns, WeightMatrix, check_sizes
from megatron_hexi.plan import LatentColumns

if TYPE_CHECKING:
    from megatron_hexi.kinds.decoder import Decoder


@dataclass(frozen=True)
class Latent(SoftmaxAttention):
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

    exchanges = (False, True)
    norm_apart = (True, True)

    kv_rank: int
    rotary_dim: int
    value_dim: int
    query_rank: int | None = None

    @property
    def normed_copies(self) -> tuple[int, int]:
        """Copies cast for two modules: the matrices to queries, and to keys and values."""
        return 0, 2

    def __post_init__(self) -> None:
        check_sizes("latent", self)

    def check(self, model: Decoder) -> None:
        """Refuse heads that latent columns do not fit.

        Raises:
            HexiError: fewer KV heads than heads, or heads without room for the rotary columns.
        """
        if model.kv_heads != model.heads:
            raise HexiError(
                f"model {model.name}: kv_heads = {model.kv_heads}: in latent attention each of the "
                f"{model.heads} heads has a key; kv_heads must be {model.heads}"
            )
        if self.rotary_dim >= model.head_dim:
            raise HexiError(
                f"model {model.name}: head_dim = {model.head_dim} counts all columns of a head's query, with "
                f"its {self.rotary_dim} rotary columns; give more than {self.rotary_dim}"
            )

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
                    f"{source}: --multi-latent-attention {words} is not supported: its weights are unknown; "
                    f"{verb} {words.partition(' ')[2]}"
                )
        return {
            "kv_rank": args.kv_lora_rank,
            "rotary_dim": args.qk_pos_emb_head_dim,
            "value_dim": args.v_head_dim,
            "query_rank": args.q_lora_rank,
        }

    def flags(self, model: Decoder) -> dict[str, int | str]:
        """Return Megatron's flags with their values; empty for those that take none."""
        found: dict[str, int | str] = {
            "--kv-lora-rank": self.kv_rank,
            "--qk-head-dim": model.head_dim - self.rotary_dim,
            "--qk-pos-emb-head-dim": self.rotary_dim,
            "--v-head-dim": self.value_dim,
            "--multi-latent-attention": "",
            "--qk-layernorm": "",
            # Beside a plan the fused kernel does not rotate latent keys (`megatron_hexi.options.attention`).
            "--no-rope-fusion": "",
        }
        if self.query_rank is not None:
            found["--q-lora-rank"] = self.query_rank
        return found

    def planned_sizes(self, sends_latent: bool) -> dict[str, Any]:
        """Return the workload fields of a plan that this attention needs besides number and size of heads."""
        columns = LatentColumns(self.kv_rank, self.rotary_dim) if sends_latent else None
        return {"value_dim": self.value_dim, "latent_exchange": columns}

    def value_size(self, model: Decoder) -> int:
        """Return the size of one head's value."""
        return self.value_dim

    def expansion(self, model: Decoder) -> WeightMatrix:
        """Return the matrix from latent columns to one head's key and value, C to N + V."""
        return WeightMatrix(self.kv_rank, model.head_dim - self.rotary_dim + self.value_dim)

    def matrices(self, model: Decoder, width: int) -> tuple[WeightMatrix, ...]:
        """Return the projection, the matrix down to latent columns, and those up from them.

        Every rank has the matrix down whole: Megatron's MLASelfAttention runs it on the rank's own rows under
        sequence parallelism. Each rank has only its own heads' part of the matrices up.
        """
        heads, hidden = model.heads // width, model.hidden_size
        down = self.kv_rank + self.rotary_dim + (self.query_rank or 0)
        return (
            WeightMatrix(heads * self.value_dim, hidden),
            WeightMatrix(hidden, down, is_whole=True),
            WeightMatrix(self.query_rank or hidden, heads * model.head_dim),
            WeightMatrix(self.kv_rank, heads * self.expansion(model).outputs, expands=True),
        )

    def matrices_up(self, model: Decoder, width: int) -> tuple[WeightMatrix, ...]:
        """Return the matrices to queries, and to keys and values."""
        return self.matrices(model, width)[2:]

    def vectors(self, model: Decoder, width: int) -> int:
        """Return the number of weights beside the matrices; latent columns have norms of their own."""
        norms = model.norm_params(self.kv_rank) + model.norm_params(self.query_rank or 0)
        return super().vectors(model, width) + norms

    def row_columns(self, model: Decoder, width: int, row_parts: int, sends_latent: bool) -> Columns:
        """Return the `Columns` of a row, with r rotary and c latent columns.

        Rotary embedding of (H + 1) r columns is not fused: plans refuse the fused kernel. Copies put columns
        together: of queries, keys and values 2 H (2 D + V) or, where latent columns travel, of queries 2 H D
        and latent columns 2 (c + r). Latent columns are kept a second time behind their norm (Megatron's
        MLASelfAttention); keys and values made of them are counted inside attention.
        """
        plain = super().row_columns(model, width, row_parts, sends_latent)
        heads, keys = (model.head_dim * count for count in head_counts(model, width))
        made = self.kv_rank + self.rotary_dim if sends_latent else keys + plain.inputs
        compressed = (self.kv_rank + (self.query_rank or 0)) / row_parts
        return replace(
            plain,
            normed=plain.normed + compressed,
            compressed=compressed,
            turned=0.0,
            turned_apart=(model.heads / width + 1) * self.rotary_dim,
            copied=2 * (heads + made),
            copied_back=2 * (heads + made),
            outputs=heads + keys + plain.inputs,
            kept=plain.kept + self.rotary_dim / row_parts,
        )
