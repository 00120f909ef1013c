"""Positions: apportioned, nested, sliced; held against lists of positions written out."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.plan import Group, Member
from megatron_hexi.plan.layout import (
    apportion,
    causal_segments,
    consecutive,
    full_segments,
    merge_segments,
    shard_segments,
    slice_segments,
)
from tests.support.plans import cuts, examples, scattered_segments

TOKENS = st.lists(st.integers(0, 40), min_size=1, max_size=7)


def positions(segments):
    return [position for start, stop in segments for position in range(start, stop)]


@st.composite
def segment_lists(draw):
    """Ascending disjoint segments of at most 60 positions, some empty, some touching."""
    return draw(scattered_segments(draw(st.integers(1, 60)), draw(st.integers(1, 4))))[0]


@pytest.mark.parametrize(
    ("total", "weights", "parts"),
    [
        (10, [1, 1], [5, 5]),
        (11, [1, 1], [6, 5]),  # a tie goes to the first
        (10, [1, 1, 1], [4, 3, 3]),
        (7, [2, 1], [5, 2]),  # 4.67, 2.33
        (100, [0.5, 0, 0.5], [50, 0, 50]),
        (0, [3, 4], [0, 0]),
        (32768, [989, 989, 312], [14152, 14152, 4464]),
    ],
)
def test_apportion_by_hand(total, weights, parts):
    assert apportion(total, weights) == parts


@given(
    st.integers(0, 10**9),
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20),
)
@examples(200)
def test_apportion_gives_all_and_no_part_is_further_than_one_from_its_share(total, weights):
    parts = apportion(total, weights)
    scale = sum(map(Fraction, weights))
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * Fraction(weight) / scale) < 1 + Fraction(1, 10**6)


@given(TOKENS)
@examples(150)
def test_causal_layouts_partition_the_sequence_and_nest(tokens):
    segments = causal_segments(tokens)
    assert sorted(position for group in segments for position in positions(group)) == list(range(sum(tokens)))
    assert [len(positions(group)) for group in segments] == tokens
    for i, count in enumerate(tokens):
        inner = [position for group in segments[i + 1 :] for position in positions(group)]
        front, back = positions(segments[i])[: count // 2], positions(segments[i])[count // 2 :]
        if inner:
            assert all(position < min(inner) for position in front)
            assert all(position > max(inner) for position in back)


@given(TOKENS)
@examples(80)
def test_a_causal_group_sees_half_of_its_tokens_times_the_sequence(tokens):
    total = sum(tokens)
    for count, segments in zip(tokens, causal_segments(tokens), strict=True):
        visible = sum(query + 1 for query in positions(segments))  # a query sees itself and all before it
        # Exact for even groups. An odd one has a token more in the back; others' shift its middle by a half.
        slack = (count % 2) * total / 2 + count * sum(size % 2 for size in tokens) / 2
        assert abs(visible - count * (total + 1) / 2) <= slack


def test_causal_segments_by_hand():
    assert causal_segments([4, 6, 2]) == [((0, 2), (10, 12)), ((2, 5), (7, 10)), ((5, 7),)]
    assert causal_segments([5]) == [((0, 5),)]
    assert causal_segments([0, 3]) == [(), ((0, 3),)]


def test_full_segments_by_hand():
    assert full_segments([4, 0, 2]) == [((0, 4),), (), ((4, 6),)]


def test_consecutive_by_hand():
    assert consecutive([2, 0, 3], start=1) == [(1, 3), (3, 3), (3, 6)]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=8))
@examples(150)
def test_merged_segments_are_the_same_positions_ascending_and_apart(pieces):
    taken: set[int] = set()
    disjoint = []
    for start, size in pieces:
        if taken.isdisjoint(range(start, start + size)):
            taken.update(range(start, start + size))
            disjoint.append((start, start + size))
    merged = merge_segments(disjoint)
    assert positions(merged) == sorted(taken)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))
    assert all(start < stop for start, stop in merged)


@given(segment_lists(), st.integers(0, 60), st.integers(0, 60))
@examples(200)
def test_a_slice_is_a_slice_of_the_positions(segments, start, stop):
    assert positions(slice_segments(segments, start, stop)) == positions(segments)[start:stop]


@given(segment_lists(), st.integers(1, 5), st.data())
@examples(100)
def test_shards_are_the_group_cut_in_member_order(segments, count, data):
    ranges = data.draw(cuts(len(positions(segments)), count))
    members = tuple(Member((rank,), stop - start, (0, 1)) for rank, (start, stop) in enumerate(ranges))
    group = Group(segments, members)
    assert [positions(shard_segments(group, i)) for i in range(count)] == [
        positions(segments)[start:stop] for start, stop in ranges
    ]
