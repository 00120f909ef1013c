"""The shapes of a plan's model and sequence."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hexi.plan.recompute import Layers
from megatron_hexi.plan.terms import Count, Experts, Heads, Positive
from megatron_hexi.yaml_schema import Strict


@dataclass(frozen=True)
class LatentColumns(Strict):
    """Numbers of columns per token from which multi-latent attention computes keys and values of all heads.

    Args:
        kv_rank: latent columns from which each head's key and value are computed (--kv-lora-rank).
        rotary_dim: key columns with rotary positions, the same for all heads (--qk-pos-emb-head-dim).
    """

    kv_rank: Positive
    rotary_dim: Positive


@dataclass(frozen=True)
class Workload(Strict):
    """The shapes of the model and of the sequence for which a plan was made.

    A job that contradicts a field given in the plan is refused.

    Args:
        seq_length: tokens of one sequence (S).
        heads: query heads of a layer, over all tensor-parallel ranks.
        kv_heads: KV heads of a layer; divides `heads`.
        head_dim: size of one head (D).
        causal: whether attention is causal; otherwise every token sees all tokens.
        layers: transformer layers of the model.
        hidden_size: hidden size of the model.
        value_dim: size of one head's value, if it differs from `head_dim` (multi-latent attention).
        padded_vocabulary: rows of the embedding, padding included.
        experts: --num-experts, if the plan states the experts of each unit.
        latent_exchange: the latent columns that are exchanged in place of keys and values; each rank computes
            the keys and values of the rank's heads from the received columns. Left out: keys and values are
            exchanged.
        tensor_parallel: tensor-parallel ranks of each member, 0 if members differ; not in the file. Head
            ranges count the heads of one tensor-parallel rank.
    """

    seq_length: Positive
    heads: Heads
    kv_heads: Heads
    head_dim: Positive
    causal: bool = True
    layers: Layers | None = None
    hidden_size: Positive | None = None
    value_dim: Positive | None = None
    padded_vocabulary: Positive | None = None
    experts: Experts | None = None
    latent_exchange: LatentColumns | None = None
    tensor_parallel: Count = 1

    @property
    def value_size(self) -> int:
        """Size of one head's value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def local_heads(self) -> int:
        """Number of query heads of a tensor-parallel rank (H), which the head ranges of a group partition."""
        return self.heads // self.tensor_parallel

    @property
    def local_kv_heads(self) -> int:
        """Number of KV heads of a tensor-parallel rank (K). Megatron gives every rank at least one.

        Exchanged latent columns count as one KV head that all query heads read.
        """
        return 1 if self.latent_exchange else max(1, self.kv_heads // self.tensor_parallel)

    @property
    def exchanged_sizes(self) -> tuple[int, int]:
        """Columns of a KV head that are exchanged: (key, value), or (latent, rotary) for latent columns."""
        latent = self.latent_exchange
        return (latent.kv_rank, latent.rotary_dim) if latent else (self.head_dim, self.value_size)

    @property
    def queries_per_kv(self) -> int:
        """Number of query heads per KV head on a tensor-parallel rank."""
        return self.local_heads // self.local_kv_heads
