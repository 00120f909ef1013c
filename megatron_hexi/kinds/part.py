"""The protocol of a layer's parts, over which the cost model sums, and checks of the sizes of a kind.

A layer has a mixer (attention, or heads with a state) and a feed-forward part (an MLP, or experts), or one of
these alone. What a part does not have is zero, so that no formula asks for a part's kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from megatron_hexi.errors import HexiError
from megatron_hexi.yaml_schema import short

#: Far above any model, and small enough that weights can be counted.
LARGEST = 2**32


def check_sizes(name: str, kind: Any, least: Mapping[str, int] | None = None) -> None:
    """Check that all sizes of a kind are whole numbers, from 1 or from the number in `least` on.

    Raises:
        HexiError: a size is no such number; the message has the size's name and the remedy.
    """
    for size in (field.name for field in fields(kind) if field.type in ("int", "int | None")):
        value, smallest = getattr(kind, size), (least or {}).get(size, 1)
        if value is None and size == "query_rank":
            continue
        if type(value) is not int or not smallest <= value <= LARGEST:
            raise HexiError(
                f"{name}: {size} = {short(value)}; write a whole number from {smallest} to {LARGEST}"
            )


def freeze_layers(name: str, kind: Any) -> None:
    """Make the list of layers that have a kind a tuple, empty where all have it.

    Raises:
        HexiError: an entry is not true or false, or no layer has the kind.
    """
    layers = tuple(kind.layers)
    if any(type(has) is not bool for has in layers):
        raise HexiError(f"{name}: layers = {short(list(layers))}; write true or false for each layer")
    if layers and not any(layers):
        raise HexiError(f"{name} is given, but no entry of its layers is true; leave {name} out")
    object.__setattr__(kind, "layers", () if all(layers) else layers)


def built[T](kind: type[T], value: T | Mapping[str, Any] | None) -> T | None:
    """Return `value` as an object of class `kind`: itself, or built from fields, as in the presets' file."""
    return kind(**value) if isinstance(value, Mapping) else value


if TYPE_CHECKING:
    from megatron_hexi.kinds.decoder import Decoder


class WeightMatrix(NamedTuple):
    """A matrix of weights on one tensor-parallel rank.

    Args:
        inputs: columns in.
        outputs: columns out.
        is_whole: whether every rank has all of it, and computes it for the rows that norms see.
        expands: whether it makes keys and values of latent columns: where these travel, the product is
            counted inside attention.
    """

    inputs: float
    outputs: float
    is_whole: bool = False
    expands: bool = False

    @property
    def weights(self) -> float:
        """Number of weights."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Columns:
    """Columns of a row on one rank, by what is done to them outside matrices and attention's kernels.

    Norms before parts and behind them, and residual additions, are counted with the layer.

    Args:
        normed: columns that a norm reads; its input is kept.
        compressed: those of them that are latent columns, which are kept behind their norm too.
        turned: columns with rotary embeddings.
        turned_apart: likewise, where no fused kernel is used.
        copied: elements that other kernels read and write forward: queries of grouped heads that are copied,
            columns that are put together, a convolution.
        copied_back: likewise backward: elements that gradients are put together from and to.
        gated: columns of a gate of attention's output; the gate and the output before it are kept.
        activated: columns that go through the MLP's activation.
        inputs: columns into the part's last matrix, which are kept; no norm casts them to fp8.
        outputs: columns out of the part's first matrices, whose gradients are cast to fp8.
        kept: columns that are kept beside those named.
    """

    normed: float = 0.0
    compressed: float = 0.0
    turned: float = 0.0
    turned_apart: float = 0.0
    copied: float = 0.0
    copied_back: float = 0.0
    gated: float = 0.0
    activated: float = 0.0
    inputs: float = 0.0
    outputs: float = 0.0
    kept: float = 0.0

    @classmethod
    def sum(cls, parts: Iterable[Columns]) -> Columns:
        """Return the sums over the parts of a layer."""
        found = [vars(part) for part in parts]
        return cls(**{field.name: sum(part[field.name] for part in found) for field in fields(cls)})


class LayerPart:
    """A part of a layer; without a subclass, the part that a layer of a hybrid does not have."""

    #: Name in tables; empty for a part that a layer does not have.
    title: ClassVar[str] = ""
    #: Whether it is attention, whose keys and values pass between ranks.
    attends: ClassVar[bool] = False
    #: Whether several groups of ranks may divide a sequence.
    spans_groups: ClassVar[bool] = True
    #: Whether its norm is a module of its own, which can be computed again: with Transformer Engine, and with
    #: Megatron's own layers.
    norm_apart: ClassVar[tuple[bool, bool]] = (False, False)

    @property
    def normed_copies(self) -> tuple[int, int]:
        """Numbers of copies kept of its norm's output where matrices are in fp8: in 16 bits, and cast."""
        return 0, 1

    def matrices(self, model: Decoder, width: int) -> tuple[WeightMatrix, ...]:
        """Return the matrices on one of `width` tensor-parallel ranks, without those of routed experts."""
        del model, width
        return ()

    def matrices_up(self, model: Decoder, width: int) -> tuple[WeightMatrix, ...]:
        """Return those of the matrices that make queries, keys and values of latent columns."""
        del model, width
        return ()

    def vectors(self, model: Decoder, width: int) -> int:
        """Return the number of weights in biases, convolutions, and norms other than the hidden state's."""
        del model, width
        return 0

    def row_columns(self, model: Decoder, width: int, row_parts: int, sends_latent: bool) -> Columns:
        """Return the columns of a row on one of `width` tensor-parallel ranks.

        Args:
            row_parts: number of ranks that share the rows of norms (`Job.row_parts`).
            sends_latent: whether latent columns travel between ranks (`Job.latent_exchange`).
        """
        del model, width, row_parts, sends_latent
        return Columns()

    def halo_elements(self, model: Decoder, width: int) -> float:
        """Return how many elements of rows before its own one of `width` ranks receives for a sample."""
        del model, width
        return 0.0

    def mixing_flops(self, model: Decoder, keys: float) -> float:
        """Return the FLOPs of a token forward as Megatron counts them; attention sees `keys` keys."""
        del model, keys
        return 0.0
