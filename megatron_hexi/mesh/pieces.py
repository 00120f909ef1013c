"""Pieces of the weights: where ranks hold different parts of one weight, the parts that all of them share.

Megatron says of each parameter which boxes of which weights it holds (its `sharded_state_dict`): a layer, the
rows of a tensor-parallel rank, the gate's half of a fused projection. Cutting each box wherever another
begins or ends gives pieces: whoever holds a part of a piece holds all of it. One rule covers unequal stages,
unequal tensor-parallel sizes (the smallest common chunk), copies, and tied embeddings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_hexi.errors import PlanError
from megatron_hexi.plan.model import Range

#: A part of a weight: a range of each of its axes.
Cell = tuple[Range, ...]
#: The ministage that uses a part of a weight: replica, stage, and number in it.
MinistageId = tuple[int, int, int]


@dataclass(frozen=True)
class Box:
    """A part of a weight that one parameter holds.

    Args:
        key: name of the weight, the same on all ranks; all layers may share one, along their first axis.
        cell: the part.
        shape: of the whole weight.
        depth: how early the forward pass uses it, the same on all ranks that hold it there: layers in order.
        ministage: the one that uses it; ``None``: no one alone.
    """

    key: str
    cell: Cell
    shape: tuple[int, ...]
    depth: int
    ministage: MinistageId | None = None


@dataclass(frozen=True)
class Piece:
    """A part of a weight that some ranks hold, all of them whole.

    Args:
        key: name of the weight.
        cell: the part.
        shape: of the whole weight.
        depth: the least depth at which any of them uses it: its gradient is complete last.
        holders: the ranks, ascending.
        used_in: the only ministage in which each of them uses it; ``None``: it has none.
    """

    key: str
    cell: Cell
    shape: tuple[int, ...]
    depth: int
    holders: tuple[int, ...]
    used_in: tuple[MinistageId | None, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return cell_size(self.cell)


def cell_size(cell: Cell) -> int:
    """Elements of a part of a weight."""
    return math.prod(stop - start for start, stop in cell)


def cell_contains(outer: Cell, inner: Cell) -> bool:
    """Whether one part lies in another."""
    return all(low <= start and stop <= high for (low, high), (start, stop) in zip(outer, inner, strict=True))


def cut_pieces(boxes: Sequence[Sequence[Box]]) -> tuple[Piece, ...]:
    """A cut of all weights, axis by axis, such that each rank holds each piece whole or not at all.

    Args:
        boxes: of each rank, by its number.

    Returns:
        The pieces, in the order in which the backward pass completes their gradients, last layer first; the
        same on all ranks.

    Raises:
        PlanError: a rank holds a part twice, ranks do not agree on a weight's shape, or a part is held by
            nobody; with the weight, and the ranks where there are any.
    """
    by_key: dict[str, list[tuple[int, Box]]] = {}
    for rank, own in enumerate(boxes):
        for box in own:
            by_key.setdefault(box.key, []).append((rank, box))
    pieces = [piece for key in sorted(by_key) for piece in _cut_weight(key, by_key[key])]
    return tuple(sorted(pieces, key=lambda piece: (-piece.depth, piece.key, piece.cell)))


def _cut_weight(key: str, held: list[tuple[int, Box]]) -> list[Piece]:
    shape = held[0][1].shape
    for rank, box in held:
        if box.shape != shape:
            raise PlanError(
                f"weight {key}: rank {held[0][0]} knows it as {list(shape)}, rank {rank} as "
                f"{list(box.shape)}; give all stages the same model, with one padded vocabulary"
            )
    pieces = []
    for cell, inside in _refined(held, 0):
        ranks = sorted(rank for rank, _ in inside)
        for rank, following in itertools.pairwise(ranks):
            if rank == following:
                raise PlanError(
                    f"weight {key}: rank {rank} holds {spell_cell(cell)} twice; a weight that a rank shares "
                    "between layers is not known under a plan with stages"
                )
        by_rank = {rank: box.ministage for rank, box in inside}
        used_in = tuple(by_rank[rank] for rank in ranks)
        pieces.append(Piece(key, cell, shape, min(box.depth for _, box in inside), tuple(ranks), used_in))
    missing = math.prod(shape) - sum(piece.size for piece in pieces)
    if missing:
        raise PlanError(
            f"weight {key}: {missing} of {math.prod(shape)} elements are held by no rank; the stages of some "
            "replica do not build the whole model"
        )
    return pieces


def _refined(held: list[tuple[int, Box]], axis: int) -> Iterator[tuple[Cell, list[tuple[int, Box]]]]:
    """Cells from an axis on that lie wholly in some of the boxes and touch no other, with these boxes.

    What is cut along an axis is only cut further by the boxes that hold it: a layer's weights by those of its
    own stages.
    """
    if axis == len(held[0][1].shape):
        yield (), held
        return
    ends = sorted({end for _, box in held for end in box.cell[axis]})
    for low, high in itertools.pairwise(ends):
        inside = [(rank, box) for rank, box in held if box.cell[axis][0] <= low and high <= box.cell[axis][1]]
        if inside:
            for cell, holders in _refined(inside, axis + 1):
                yield ((low, high), *cell), holders


def spell_cell(cell: Cell) -> str:
    """A part as Python would slice it."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in cell) + "]"
