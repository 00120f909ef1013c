"""KV heads follow query heads, whole; spans cover them in pieces that kernels take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.plan.heads import (
    HeadSpan,
    head_parts,
    head_spans,
    heads_first,
    kv_range,
    overlap,
    spans_in_two,
)
from megatron_hexi.plan.model import Domain, Group, Member, Replica, Stage
from megatron_hexi.plan.proportion import worthwhile_parts
from tests.support.plans import examples

RATIOS = st.integers(1, 9)


@st.composite
def head_ranges(draw):
    start = draw(st.integers(0, 40))
    return start, start + draw(st.integers(0, 40))


@given(head_ranges(), RATIOS)
@examples(200)
def test_kv_heads_are_those_that_the_queries_read(heads, ratio):
    assert list(range(*kv_range(heads, ratio))) == sorted({head // ratio for head in range(*heads)})


@given(head_ranges(), RATIOS)
@examples(300)
def test_spans_cover_the_heads_once_each_beside_its_own_kv_head(heads, ratio):
    first_kv = heads[0] // ratio
    pairs = []
    for span in head_spans(heads, ratio):
        queries, kv = range(*span.queries), range(*span.kv)
        assert len(queries) > 0
        assert len(queries) % len(kv) == 0
        pairs += [(query, kv[i // (len(queries) // len(kv))]) for i, query in enumerate(queries)]
    assert pairs == [(head - heads[0], head // ratio - first_kv) for head in range(*heads)]


@given(head_ranges(), RATIOS)
@examples(300)
def test_there_are_at_most_three_spans_and_one_where_nothing_is_cut(heads, ratio):
    spans = head_spans(heads, ratio)
    assert len(spans) <= 3
    if heads[0] % ratio == 0 and heads[1] % ratio == 0:
        assert len(spans) == (heads[0] < heads[1])


@pytest.mark.parametrize(
    ("heads", "ratio", "spans"),
    [
        ((0, 8), 4, [((0, 8), (0, 2))]),
        ((1, 8), 4, [((0, 3), (0, 1)), ((3, 7), (1, 2))]),
        ((3, 9), 4, [((0, 1), (0, 1)), ((1, 5), (1, 2)), ((5, 6), (2, 3))]),
        ((2, 6), 4, [((0, 4), (0, 2))]),  # two halves read one KV head each, at the same ratio
        ((5, 6), 8, [((0, 1), (0, 1))]),
        ((3, 7), 1, [((0, 4), (0, 4))]),
        ((4, 4), 4, []),
    ],
)
def test_spans_by_hand(heads, ratio, spans):
    assert head_spans(heads, ratio) == tuple(HeadSpan(*span) for span in spans)


@given(head_ranges(), RATIOS)
@examples(300)
def test_two_parts_are_cut_between_kv_heads_as_near_to_the_middle_as_can_be(heads, ratio):
    start, stop = heads
    first = heads_first(heads, ratio)
    inside = [cut - start for cut in range(start + 1, stop) if cut % ratio == 0]
    assert first in (inside or [(stop - start + 1) // 2])
    assert all(abs(first - (stop - start) / 2) <= abs(cut - (stop - start) / 2) for cut in inside)


@given(head_ranges(), RATIOS)
@examples(300)
def test_the_spans_of_two_parts_are_those_of_the_whole(heads, ratio):
    def pairs(spans):
        for span in spans:
            per_kv = (span.queries[1] - span.queries[0]) // (span.kv[1] - span.kv[0])
            yield from ((query, span.kv[0] + i // per_kv) for i, query in enumerate(range(*span.queries)))

    first, last = spans_in_two(heads, ratio)
    assert len(list(pairs(first))) == heads_first(heads, ratio)
    assert [*pairs(first), *pairs(last)] == list(pairs(head_spans(heads, ratio)))
    shared = {kv for _, kv in pairs(first)} & {kv for _, kv in pairs(last)}
    assert not shared or len(range(*kv_range(heads, ratio))) == 1


@pytest.mark.parametrize(
    ("heads", "ratio", "first", "last"),
    [
        ((0, 8), 4, [((0, 4), (0, 1))], [((4, 8), (1, 2))]),
        ((0, 12), 4, [((0, 4), (0, 1))], [((4, 12), (1, 3))]),  # 4 or 8 of 12: the earlier
        # 1, 4 and 1 heads: after 1 or 5 of 6.
        ((3, 9), 4, [((0, 1), (0, 1))], [((1, 5), (1, 2)), ((5, 6), (2, 3))]),
        ((1, 9), 4, [((0, 3), (0, 1))], [((3, 7), (1, 2)), ((7, 8), (2, 3))]),  # 3 and 7 of 8
        ((3, 7), 1, [((0, 2), (0, 2))], [((2, 4), (2, 4))]),
        ((2, 6), 4, [((0, 2), (0, 1))], [((2, 4), (1, 2))]),
        ((5, 8), 4, [((0, 2), (0, 1))], [((2, 3), (0, 1))]),  # one KV head
        ((6, 7), 4, [((0, 1), (0, 1))], []),
        ((4, 4), 4, [], []),
    ],
)
def test_two_parts_by_hand(heads, ratio, first, last):
    expected = tuple(tuple(HeadSpan(*span) for span in part) for part in (first, last))
    assert spans_in_two(heads, ratio) == expected


@given(head_ranges(), RATIOS, st.integers(1, 5))
@examples(300)
def test_parts_cover_the_heads_and_share_no_kv_head(heads, ratio, most):
    parts = head_parts(heads, ratio, most)
    assert [head for part in parts for head in range(*part)] == list(range(*heads))
    read = [set(range(*kv_range(part, ratio))) for part in parts]
    assert sum(map(len, read)) == len(set().union(*read)) == len(range(*kv_range(heads, ratio)))
    assert len(parts) == max(1, min(most, sum(map(len, read))))
    assert max(map(len, read)) - min(map(len, read)) <= 1


@pytest.mark.parametrize(
    ("groups", "parts"),
    [
        # Tokens of each group and heads of its members; a full call has 33792 rows.
        ([(33792, (4, 1)), (33792, (5,))], 4),
        ([(33792, (2, 1)), (33792, (5,))], 2),
        ([(33791, (2, 1)), (33792, (5,))], 1),
        ([(100, (8,)), (100, (8,))], 1),
        ([(0, (8,)), (100000, (8,)), (100000, (8,))], 4),  # a group without tokens computes nothing
        ([(100000, (8, 8))], 4),  # an all-to-all
        ([(100000, (16,))], 1),  # nothing travels
    ],
)
def test_parts_leave_every_call_enough_to_do(groups, parts):
    stop, built = 0, []
    for tokens, heads in groups:
        members: list[Member] = []
        for number, count in enumerate(heads):
            members.append(Member((len(members),), tokens * (number == 0), (0, count)))
        built.append(Group(((stop, stop + tokens),) if tokens else (), tuple(members)))
        stop += tokens
    assert worthwhile_parts([Replica((Stage((Domain(tuple(built)),)),))]) == parts


@given(head_ranges(), head_ranges())
@examples(100)
def test_overlap_counts_what_is_in_both(a, b):
    assert overlap(a, b) == len(set(range(*a)) & set(range(*b)))
