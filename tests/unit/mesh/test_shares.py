"""Buckets hold every piece once, and owners have their shares of what the same ranks hold."""

import itertools
from collections import Counter

import numpy
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.mesh import Box, Piece, cut_pieces, make_buckets
from tests.support.plans import RANDOMS, examples
from tests.support.stage_plans import boxes_of, meshes


def states_of(mesh):
    return {rank: unit.state for rank, unit in enumerate(mesh.units)}


def check_buckets(pieces, buckets, states):
    """Everything that must hold of buckets, counted element by element."""
    assert sorted((piece for bucket in buckets for piece in bucket.pieces), key=repr) == sorted(
        pieces, key=repr
    )
    owned: dict[tuple[int, ...], Counter[int]] = {}
    for bucket in buckets:
        check_bucket(bucket)
        for slab in bucket.slabs:
            owned.setdefault(bucket.holders, Counter())[slab.owner] += slab.stop - slab.start
    for holders, counts in owned.items():
        own = [piece for piece in pieces if piece.holders == holders]
        row = max(piece.size // rows_of(piece) for piece in own)
        together, total = sum(counts.values()), sum(states[rank] for rank in holders)
        assert together == sum(piece.size for piece in own)
        for rank in holders:
            # What a bucket gives too much the next ones give less, but never less than nothing.
            rows = 1 if sum(bucket.holders == holders for bucket in buckets) == 1 else 2
            assert abs(counts[rank] - together * states[rank] / total) <= rows * row


def rows_of(piece):
    return next((stop - start for start, stop in piece.cell if stop - start > 1), 1)


def check_bucket(bucket):
    """Slabs are its pieces' elements, in the order in which these lie there; each owner's are one run."""
    place = 0
    elements = {}
    for piece, start in zip(bucket.pieces, bucket.starts, strict=True):
        assert piece.holders == bucket.holders
        assert start == place
        place += piece.size
        shape = [stop - first for first, stop in piece.cell]
        elements[piece.key, piece.cell] = start + numpy.arange(piece.size).reshape(shape)
    assert bucket.size == place
    assert bucket.depth == min(piece.depth for piece in bucket.pieces)
    reached = 0
    for slab in bucket.slabs:
        assert slab.start == reached
        reached = slab.stop
        (cell, numbers) = next(
            (cell, numbers)
            for (key, cell), numbers in elements.items()
            if key == slab.key
            and all(a <= c and d <= b for (a, b), (c, d) in zip(cell, slab.cell, strict=True))
        )
        inside = tuple(
            slice(low - first, high - first) for (first, _), (low, high) in zip(cell, slab.cell, strict=True)
        )
        assert numbers[inside].ravel().tolist() == list(range(slab.start, slab.stop))
    assert reached == bucket.size
    owners = [owner for owner, _ in itertools.groupby(slab.owner for slab in bucket.slabs)]
    assert len(owners) == len(set(owners))
    assert set(owners) <= set(bucket.holders)
    for owner in bucket.holders:
        own = [
            number for slab in bucket.slabs if slab.owner == owner for number in range(slab.start, slab.stop)
        ]
        assert list(range(*bucket.run(owner))) == own


@examples(150)
@given(mesh=meshes(), size=st.sampled_from([None, 1, 10, 40, 1000]))
def test_buckets_hold_every_piece_once_and_shares_are_met_within_rows(mesh, size):
    pieces, states = cut_pieces(boxes_of(mesh)), states_of(mesh)
    check_buckets(pieces, make_buckets(pieces, states, size), states)


def random_pieces(random):
    """Whole weights of one set of holders, of wildly different size, with shares as different."""
    holders = tuple(range(random.randint(1, 6)))
    shapes = [
        tuple(random.choice([1, 1, 2, 3, 7, random.randint(1, 60)]) for _ in range(random.randint(1, 3)))
        for _ in range(random.randint(1, 12))
    ]
    pieces = cut_pieces(
        [
            [
                Box(f"weight {i}", tuple((0, size) for size in shape), shape, i // 3)
                for i, shape in enumerate(shapes)
            ]
        ]
        * len(holders)
    )
    return pieces, {rank: random.choice([1, 1, 2, 5, 100]) for rank in holders}


@examples(400)
@given(random=RANDOMS, size=st.sampled_from([None, 1, 10, 100, 1000]))
def test_shares_are_met_for_weights_of_any_size(random, size):
    pieces, states = random_pieces(random)
    check_buckets(pieces, make_buckets(pieces, states, size), states)


@examples(100)
@given(mesh=meshes(), size=st.sampled_from([None, 1, 40]))
def test_every_rank_reduces_its_buckets_in_the_order_of_all(mesh, size):
    """No two buckets are in another order on some rank, and none waits for a layer before those behind it."""
    pieces = cut_pieces(boxes_of(mesh))
    buckets = make_buckets(pieces, states_of(mesh), size)
    keys = [(-bucket.depth, bucket.holders) for bucket in buckets]
    assert keys == sorted(keys)
    if size is not None:
        for bucket in buckets:
            assert sum(piece.size for piece in bucket.pieces[:-1]) < size


def test_without_a_size_each_set_of_holders_has_one_bucket():
    def piece(key, holders):
        return Piece(key, ((0, 4),), (4,), 1, holders, (None,) * len(holders))

    pieces = [piece("a", (0, 1)), piece("b", (0,)), piece("c", (0, 1))]
    buckets = make_buckets(pieces, {0: 1, 1: 3}, None)
    assert [(bucket.holders, [one.key for one in bucket.pieces]) for bucket in buckets] == [
        ((0,), ["b"]),
        ((0, 1), ["a", "c"]),
    ]
    assert [bucket.run(rank) for bucket in buckets for rank in bucket.holders] == [(0, 4), (0, 2), (2, 8)]
