"""Pieces partition every weight, and a rank holds each of them whole or not at all."""

import itertools
import re
from dataclasses import replace

import numpy
import pytest
from hypothesis import given

from megatron_hexi.errors import EXIT_USER_ERROR, PlanError
from megatron_hexi.mesh import Box, cut_pieces
from tests.support.plans import RANDOMS, examples
from tests.support.stage_plans import boxes_of, meshes


def index_of(cell):
    return tuple(slice(*span) for span in cell)


def holders_of(boxes):
    """For each weight, who holds each of its elements: a mask for each rank."""
    masks: dict[str, numpy.ndarray] = {}
    for rank, own in enumerate(boxes):
        for box in own:
            mask = masks.setdefault(box.key, numpy.zeros((len(boxes), *box.shape), dtype=int))
            mask[(rank, *index_of(box.cell))] += 1
    return masks


def check_pieces(boxes, pieces):
    masks = holders_of(boxes)
    counts = {key: numpy.zeros(mask.shape[1:], dtype=int) for key, mask in masks.items()}
    for piece in pieces:
        counts[piece.key][index_of(piece.cell)] += 1
        held = masks[piece.key][(slice(None), *index_of(piece.cell))]
        assert held[0].size == piece.size > 0
        assert piece.shape == masks[piece.key].shape[1:]
        for rank, mask in enumerate(held):
            assert mask.all() if rank in piece.holders else not mask.any()
    for count in counts.values():
        assert (count == 1).all()


@examples(150)
@given(mesh=meshes())
def test_pieces_of_a_model_have_the_holders_of_all_their_elements(mesh):
    boxes = boxes_of(mesh)
    check_pieces(boxes, cut_pieces(boxes))


def random_boxes(random):
    """Boxes of one weight for some ranks: any grid of cells, each with any holders."""
    shape = tuple(random.randint(1, 5) for _ in range(random.randint(1, 3)))
    boxes: list[list[Box]] = [[] for _ in range(random.randint(1, 5))]
    for rank, own in enumerate(boxes):
        axes = []
        for size in shape:
            cuts = sorted(random.sample(range(1, size), random.randint(0, size - 1)))
            axes.append(list(itertools.pairwise([0, *cuts, size])))
        own += [
            Box("weight", cell, shape, 0)
            for cell in itertools.product(*axes)
            if rank == 0 or random.random() < 0.5  # the first holds everything
        ]
    return boxes


@examples(200)
@given(random=RANDOMS)
def test_pieces_of_any_boxes_have_the_holders_of_all_their_elements(random):
    boxes = random_boxes(random)
    check_pieces(boxes, cut_pieces(boxes))


@examples(100)
@given(mesh=meshes())
def test_pieces_come_in_the_order_of_the_backward_pass(mesh):
    boxes = boxes_of(mesh)
    pieces = cut_pieces(boxes)
    assert [piece.depth for piece in pieces] == sorted((piece.depth for piece in pieces), reverse=True)
    for piece in pieces:
        least = min(
            box.depth
            for own in boxes
            for box in own
            if box.key == piece.key and box.cell[0][0] <= piece.cell[0][0] < box.cell[0][1]
        )
        assert piece.depth == least


def test_a_layer_is_cut_by_its_own_holders_only():
    """Layer 0 on two tensor-parallel ranks, layer 1 on one: that one's weight stays in one piece."""
    shape = (2, 4, 3)
    halves = [Box("weight", ((0, 1), half, (0, 3)), shape, 1) for half in ((0, 2), (2, 4))]
    whole = Box("weight", ((1, 2), (0, 4), (0, 3)), shape, 2)
    pieces = cut_pieces([[halves[0]], [halves[1]], [whole]])
    assert [(piece.cell, piece.holders) for piece in pieces] == [
        (whole.cell, (2,)),
        (halves[0].cell, (0,)),
        (halves[1].cell, (1,)),
    ]


def doubled(boxes):
    boxes[1] = [*boxes[1], boxes[1][0]]
    return rf"weight {boxes[1][0].key}: rank 1 holds \[.*\] twice"


def overlapping(boxes):
    """The whole of a weight beside the part that is held already."""
    box = boxes[1][0]
    boxes[1] = [*boxes[1], replace(box, cell=tuple((0, size) for size in box.shape))]
    return rf"weight {box.key}: rank 1 holds \[.*\] twice"


def missing(boxes):
    box = boxes[0][0]
    for own in boxes:
        own[:] = [one for one in own if one.key != box.key or one.cell[0] != box.cell[0]]
    boxes[0].append(replace(box, cell=(*box.cell[:-1], (0, 1))))
    return rf"weight {box.key}: \d+ of \d+ elements are held by no rank"


def other_shape(boxes):
    box = boxes[-1][0]
    boxes[-1][0] = replace(box, shape=(*box.shape[:-1], box.shape[-1] + 1))
    return rf"weight {box.key}: rank \d knows it as \[.*\], rank \d as \[.*\]; give all stages the same model"


@pytest.mark.parametrize("mistake", [doubled, overlapping, missing, other_shape])
def test_boxes_that_do_not_fit_together_are_a_named_error(mistake):
    @examples(20)
    @given(mesh=meshes())
    def refused(mesh):
        boxes = boxes_of(mesh)
        says = mistake(boxes)
        with pytest.raises(PlanError) as error:
            cut_pieces(boxes)
        assert re.match(says, str(error.value))
        assert error.value.exit_code == EXIT_USER_ERROR
        assert "\n" not in str(error.value)

    refused()


@examples(20)
@given(mesh=meshes(most_replicas=3).filter(lambda mesh: len(mesh.plan.replicas) > 1))
def test_the_check_finds_a_holder_that_is_forgotten(mesh):
    boxes = boxes_of(mesh)
    pieces = list(cut_pieces(boxes))
    number = next(i for i, piece in enumerate(pieces) if len(piece.holders) > 1)
    pieces[number] = replace(pieces[number], holders=pieces[number].holders[1:])
    with pytest.raises(AssertionError):
        check_pieces(boxes, pieces)
