"""Shapes of routed experts, attention windows, multi-latent attention and layers with a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from megatron_hexi.errors import HexiError
from megatron_hexi.yaml_schema import short

#: Far above any model, and small enough that weights can be counted.
LARGEST = 2**32
#: Tokens that a scan computes at once, by kind of state: chunk_size of Megatron's MambaMixer, and of
#: flash-linear-attention's chunk_gated_delta_rule (fla/ops/gated_delta_rule/chunk.py).
CHUNKS = {"mamba": 128, "delta": 64}


@dataclass(frozen=True)
class Experts:
    """Routed MLPs, of which each token goes to a few.

    Args:
        count: number of experts of a layer: --num-experts.
        active: number of experts that each token is sent to: --moe-router-topk.
        ffn_hidden_size: width inside an expert: --moe-ffn-hidden-size.
        shared_ffn_hidden_size: total width inside the experts that see every token; 0: there are none
            (--moe-shared-expert-intermediate-size).
        score_bias: whether the router adds a bias to each expert's score that evens their loads
            (--moe-router-enable-expert-bias).
        shared_gate: whether a gate of one column weighs what the experts add that see every token
            (--moe-shared-expert-gate).
        layers: whether each layer has experts (--moe-layer-freq); empty: every layer has.

    Raises:
        HexiError: a size that is no whole number above 0, or more active experts than there are.
    """

    count: int
    active: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    score_bias: bool = False
    shared_gate: bool = False
    layers: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        _check_sizes("experts", self, {"shared_ffn_hidden_size": 0})
        _freeze_layers("experts", self)
        if self.shared_gate and not self.shared_ffn_hidden_size:
            raise HexiError("experts: shared_gate without shared experts; leave it out")
        if self.active > self.count:
            raise HexiError(
                f"experts: active = {self.active} of {self.count} experts; give a number up to {self.count}"
            )


@dataclass(frozen=True)
class Window:
    """Attention to the latest keys only.

    Args:
        size: number of keys that a query sees, its own among them: one more than Megatron's --window-size.
        layers: whether each layer has the window (--window-attn-skip-freq); empty: every layer has.
        in_chunks: whether the window begins anew at each multiple of `size` (Llama 4), instead of sliding.

    Raises:
        HexiError: a size that is no whole number above 0.
    """

    size: int
    layers: tuple[bool, ...] = ()
    in_chunks: bool = False

    def __post_init__(self) -> None:
        _check_sizes("window", self, {})
        _freeze_layers("window", self)

    def keys_seen(self, context: int) -> float:
        """Return the mean number of keys that a query of a causal sequence sees; its own key counts half."""
        size = min(self.size, context)
        if self.in_chunks:
            whole, rest = divmod(context, size)
            return (whole * size * size + rest * rest) / (2 * context)
        # Queries from the window's size on see all of it, queries before see half of it in the mean.
        return size - size * (size - 1) / (2 * context) - 0.5


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
        _check_sizes("latent", self, {})


@dataclass(frozen=True)
class State:
    """Heads that pass a state along the sequence in place of attention: Mamba-2, or a gated delta net.

    A token's projection has gates and inputs of all heads, keys and queries of all groups (in Mamba B and C),
    and of each head its step, or its decay and rate. Inputs, keys and queries go through a convolution.

    Args:
        kind: ``mamba`` or ``delta``.
        heads: number of heads of a layer (--mamba-num-heads, --linear-num-value-heads).
        head_dim: number of inputs, and of outputs, of a head (--mamba-head-dim, --linear-value-head-dim).
        groups: number of groups, which divides `heads`; consecutive heads of a group share keys and queries
            (--mamba-num-groups, --linear-num-key-heads).
        key_dim: size of a key; a head's state is this by `head_dim` (--mamba-state-dim,
            --linear-key-head-dim).
        conv_width: taps of the convolution (--linear-conv-kernel-dim; Megatron's Mamba has 4).
        layers: whether each layer has such heads (--linear-attention-freq); empty: every layer has. The
            letters of a model's `pattern` say it where it has one.

    Raises:
        HexiError: another kind, a size that is no whole number above 0, or groups that do not divide the
            heads.
    """

    kind: Literal["mamba", "delta"]
    heads: int
    head_dim: int
    groups: int
    key_dim: int
    conv_width: int = 4
    layers: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("mamba", "delta"):
            raise HexiError(f"state: kind = {short(self.kind)}; write mamba or delta")
        _check_sizes("state", self, {})
        _freeze_layers("state", self)
        if self.heads % self.groups:
            raise HexiError(
                f"state: groups = {self.groups} does not divide the {self.heads} heads; give a "
                "number that does"
            )

    @property
    def inner(self) -> int:
        """Number of inputs of all heads, and as many outputs and gates."""
        return self.heads * self.head_dim

    @property
    def head_columns(self) -> int:
        """Columns of a head in the projection: gates, inputs, and its step, or its decay and rate."""
        return 2 * self.head_dim + (1 if self.kind == "mamba" else 2)

    @property
    def group_columns(self) -> int:
        """Columns of a state group in the input projection's output: its keys and queries (Mamba's B, C)."""
        return 2 * self.key_dim

    @property
    def columns(self) -> int:
        """Columns of the projection, of all heads and groups."""
        return self.heads * self.head_columns + self.groups * self.group_columns

    @property
    def channels(self) -> int:
        """Columns that go through the convolution."""
        return self.inner + self.groups * self.group_columns


def built[T](kind: type[T], value: T | Mapping[str, Any] | None) -> T | None:
    """Return an object of a class, from the object or from its fields, as the presets' file gives them."""
    return kind(**value) if isinstance(value, Mapping) else value


def _check_sizes(name: str, kind: Any, least: Mapping[str, int]) -> None:
    for size in (field.name for field in fields(kind) if field.type in ("int", "int | None")):
        value, smallest = getattr(kind, size), least.get(size, 1)
        if value is None and size == "query_rank":
            continue
        if type(value) is not int or not smallest <= value <= LARGEST:
            raise HexiError(
                f"{name}: {size} = {short(value)}; write a whole number from {smallest} to {LARGEST}"
            )


def _freeze_layers(name: str, kind: Experts | Window | State) -> None:
    layers = tuple(kind.layers)
    if any(type(has) is not bool for has in layers):
        raise HexiError(f"{name}: layers = {short(list(layers))}; write true or false for each layer")
    if layers and not any(layers):
        raise HexiError(f"{name}: layers: no layer has any; leave {name} out")
    object.__setattr__(kind, "layers", () if all(layers) else layers)
