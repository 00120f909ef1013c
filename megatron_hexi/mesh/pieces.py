"""Cut the weights of a model into pieces that each rank holds either whole or not at all.

A box is the part of a weight that one parameter of a rank holds: one layer, the rows of a tensor-parallel
rank, the gate's half of a fused projection. Megatron's `sharded_state_dict` gives the boxes of each
parameter. Cutting each box wherever another box of the weight begins or ends gives the pieces. This one rule
covers unequal stages, unequal tensor-parallel sizes (the smallest common chunk), copies, and tied embeddings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_hexi.errors import PlanError
from megatron_hexi.grouping import grouped
from megatron_hexi.plan.model import Range

#: A part of a weight: one range for each axis of the weight.
Cell = tuple[Range, ...]
#: Identity of a ministage: replica number, stage number, and number of the ministage in the stage.
MinistageId = tuple[int, int, int]


@dataclass(frozen=True)
class Box:
    """The part of a weight that one parameter of a rank holds.

    Args:
        key: name of the weight, the same on all ranks; one name may stand for all layers, stacked along the
            first axis.
        shape: shape of the whole weight.
        depth: place of the weight in the order in which the forward pass uses weights; equal on all ranks.
        ministage: the only ministage that uses the box; ``None``: no ministage or several use it.
    """

    key: str
    cell: Cell
    shape: tuple[int, ...]
    depth: int
    ministage: MinistageId | None = None


@dataclass(frozen=True)
class Piece:
    """A part of a weight that each rank holds either whole or not at all.

    Args:
        depth: smallest depth of the boxes that contain the piece; there the backward pass completes its
            gradient.
        holders: ranks that hold the piece, ascending.
        used_in: for each holder, the only ministage that uses the piece; ``None``: no ministage or several.
    """

    key: str
    cell: Cell
    shape: tuple[int, ...]
    depth: int
    holders: tuple[int, ...]
    used_in: tuple[MinistageId | None, ...]

    @property
    def size(self) -> int:
        """Number of elements of the piece."""
        return cell_size(self.cell)


def cell_size(cell: Cell) -> int:
    """Return the number of elements of a part of a weight."""
    return math.prod(stop - start for start, stop in cell)


def cell_contains(outer: Cell, inner: Cell) -> bool:
    """Whether the part `inner` of a weight lies in the part `outer`."""
    return all(low <= start and stop <= high for (low, high), (start, stop) in zip(outer, inner, strict=True))


def cut_pieces(boxes: Sequence[Sequence[Box]]) -> tuple[Piece, ...]:
    """Cut all weights, axis by axis, into pieces that each rank holds either whole or not at all.

    Returns:
        The pieces in the order in which the backward pass completes their gradients, last layer first; equal
        on all ranks.

    Raises:
        PlanError: a rank holds a part of a weight twice, ranks disagree on a weight's shape, or no rank holds
            some part; the message names the weight and the ranks.
    """
    by_key = grouped((box.key, (rank, box)) for rank, own in enumerate(boxes) for box in own)
    pieces = [piece for key in sorted(by_key) for piece in _cut_weight(key, by_key[key])]
    return tuple(sorted(pieces, key=lambda piece: (-piece.depth, piece.key, piece.cell)))


def _cut_weight(key: str, boxes: list[tuple[int, Box]]) -> list[Piece]:
    shape = boxes[0][1].shape
    for rank, box in boxes:
        if box.shape != shape:
            raise PlanError(
                f"weight {key}: rank {boxes[0][0]} knows it as {list(shape)}, rank {rank} as "
                f"{list(box.shape)}; give all stages the same model, with one padded vocabulary"
            )
    pieces = []
    for cell, inside in _refined(boxes, 0):
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


def _refined(boxes: list[tuple[int, Box]], axis: int) -> Iterator[tuple[Cell, list[tuple[int, Box]]]]:
    """Cut boxes along the given axis and all later axes; yield each cell with the boxes that contain it.

    No other box overlaps the cell. A part that is cut along one axis is cut along the next axes only by boxes
    that contain the part: a layer's weights only by the boxes of stages with this layer.
    """
    if axis == len(boxes[0][1].shape):
        yield (), boxes
        return
    ends = sorted({end for _, box in boxes for end in box.cell[axis]})
    for low, high in itertools.pairwise(ends):
        inside = [
            (rank, box) for rank, box in boxes if box.cell[axis][0] <= low and high <= box.cell[axis][1]
        ]
        if inside:
            for cell, holders in _refined(inside, axis + 1):
                yield ((low, high), *cell), holders


def spell_cell(cell: Cell) -> str:
    """Return a part of a weight as a Python slice, such as ``[0:2, 4:8]``."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in cell) + "]"
