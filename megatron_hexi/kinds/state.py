"""Heads that pass a state along the sequence in place of attention.

Shape letters: G tokens of a group, P inputs of a head, N size of a key, Q tokens of a chunk, e bytes an
element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from megatron_hexi.errors import HexiError
from megatron_hexi.kinds.part import Columns, LayerPart, WeightMatrix, check_sizes, freeze_layers
from megatron_hexi.plan.flags import argument_name

if TYPE_CHECKING:
    from megatron_hexi.kinds.decoder import Decoder


class TokenWork(NamedTuple):
    """FLOPs and bytes of one token, each forward and backward."""

    flops: tuple[float, float]
    bytes: tuple[float, float]


@dataclass(frozen=True)
class State(LayerPart, ABC):
    """Heads of a layer that pass a state along the sequence.

    A token's projection has gates and inputs of all heads, keys and queries of all groups, and of each head
    the numbers that steer its state (`steering`). Inputs, keys and queries go through a convolution.

    Args:
        heads: number of heads of a layer.
        head_dim: number of inputs, and of outputs, of a head.
        groups: number of groups, which divides `heads`; consecutive heads of a group share keys and queries.
        key_dim: size of a key; a head's state is this by `head_dim`.
        conv_width: taps of the convolution.
        layers: whether each layer has such heads; empty: every layer has. The letters of a model's `pattern`
            say it where it has one.

    Raises:
        HexiError: a size that is no whole number above 0, or groups that do not divide the heads.
    """

    #: Name in files of models, and so in what `dataclasses.asdict` returns.
    kind: str = field(init=False, default="")
    #: Name in tables, and letter in Megatron's --hybrid-layer-pattern.
    title: ClassVar[str]
    letter: ClassVar[str]
    #: Tokens that a scan computes at once.
    chunk: ClassVar[int]
    #: Numbers of a head and token that steer its state.
    steering: ClassVar[int]
    #: Megatron's option of each field.
    flag_of: ClassVar[Mapping[str, str]]
    #: A state does not pass between groups.
    spans_groups = False
    #: Whether all outputs of a rank go through one norm, and not each head's by itself.
    norms_all_outputs: ClassVar[bool] = False

    heads: int
    head_dim: int
    groups: int
    key_dim: int
    conv_width: int = 4
    layers: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        check_sizes("state", self)
        freeze_layers("state", self)
        if self.heads % self.groups:
            raise HexiError(
                f"state: groups = {self.groups} does not divide the {self.heads} heads; give a "
                "number that does"
            )

    @classmethod
    def from_arguments(cls, args: Namespace, source: str) -> dict[str, Any]:
        """Return the fields by Megatron's arguments, without the layers that have such heads.

        Raises:
            HexiError: arguments from which a field does not follow.
        """
        del source
        sizes = {field: getattr(args, argument_name(flag)) for field, flag in cls.flag_of.items()}
        return {"kind": cls.kind, **sizes}

    def flags(self, model: Decoder) -> dict[str, int | str]:
        """Return Megatron's flags with their values.

        Raises:
            NoFlagError: Megatron has no flag for a size.
        """
        del model
        return {flag: getattr(self, field) for field, flag in self.flag_of.items()}

    @property
    def inner(self) -> int:
        """Number of inputs of all heads, and as many outputs and gates."""
        return self.heads * self.head_dim

    @property
    def head_columns(self) -> int:
        """Output columns of one head in the projection: gates, inputs, and what steers its state."""
        return 2 * self.head_dim + self.steering

    @property
    def group_columns(self) -> int:
        """Output columns of one group in the projection: its keys and queries (Mamba's B and C)."""
        return 2 * self.key_dim

    @property
    def columns(self) -> int:
        """Output columns of the projection, of all heads and groups."""
        return self.heads * self.head_columns + self.groups * self.group_columns

    @property
    def channels(self) -> int:
        """Columns that go through the convolution."""
        return self.inner + self.groups * self.group_columns

    @abstractmethod
    def head_work(self, element: int) -> TokenWork:
        """Return the work of one head, with `element` bytes an element."""

    @abstractmethod
    def group_work(self, element: int) -> TokenWork:
        """Return the work of one group of heads that share keys and queries."""

    @abstractmethod
    def kept_columns[N](self, heads: N, groups: N) -> N:
        """Return how many columns of a token a scan keeps, for these numbers of heads and groups."""

    def matrices(self, model: Decoder, width: int) -> tuple[WeightMatrix, ...]:
        """Return both projections, hidden x columns and outputs x hidden; neither ever has biases."""
        hidden = model.hidden_size
        return WeightMatrix(hidden, self.columns / width), WeightMatrix(self.inner / width, hidden)

    def row_columns(self, model: Decoder, width: int, row_parts: int, sends_latent: bool) -> Columns:
        """Return the `Columns` of a row; in some kinds one norm sees all outputs."""
        inner = self.inner / width
        return Columns(normed=inner * self.norms_all_outputs, inputs=inner, outputs=self.columns / width)

    def mixing_flops(self, model: Decoder, keys: float) -> float:
        """Return the forward FLOPs per token of the scan, as `counted_flops` counts them."""
        return self.counted_flops

    @property
    @abstractmethod
    def counted_flops(self) -> int:
        """Forward FLOPs per token of the scan, as Megatron counts them (megatron/training/training.py)."""
