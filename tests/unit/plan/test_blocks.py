"""Blocks against the mask written out pair by pair; the layout of documents against its promises."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.plan import Block, Group, Mask, Member, Shape
from megatron_hexi.plan.batch_balance import packed_domain, proportional_table
from megatron_hexi.plan.blocks import exchange_blocks, own_blocks
from megatron_hexi.plan.layout import causal_segments
from megatron_hexi.plan.model import Domain
from tests.support.plans import RANDOMS, examples, masks, plans


def positions(segments):
    return [position for start, stop in segments for position in range(start, stop)]


def pairs(block):
    """The visible pairs of a block: query and key, each counted from the block's first."""
    queries, keys = (range(stop - start) for start, stop in (block.queries, block.keys))
    if block.shape is Shape.FULL:
        return list(itertools.product(queries, keys))
    assert len(queries) == len(keys)
    if block.shape is Shape.CAUSAL:
        return [(query, key) for query, key in itertools.product(queries, keys) if key <= query]
    return [(query, key) for query, key in itertools.product(queries, keys) if key >= query]


def covered_by(blocks, queries, keys):
    """The pairs of positions that blocks cover, as often as they do."""
    met: Counter[tuple[int, int]] = Counter()
    for block in blocks:
        assert pairs(block)
        assert block.area == len(pairs(block))
        assert block.queries[1] <= len(queries)
        assert block.keys[1] <= len(keys)
        met.update((queries[block.queries[0] + q], keys[block.keys[0] + k]) for q, k in pairs(block))
    return met


def visible(mask, seq_length, queries, keys):
    document = {p: n for n, rows in enumerate(mask.ranges(seq_length)) for p in range(*rows)}
    return Counter(
        (query, key)
        for query in queries
        for key in keys
        if document[query] == document[key]
        and (not mask.causal or (key <= query and (mask.window is None or key >= query - mask.window)))
    )


@st.composite
def masked_domains(draw):
    """A domain with a mask: that of the plan, or cut by documents."""
    plan = draw(plans())
    mask = draw(masks(plan.workload))
    domain = plan.replicas[0].domain
    return plan.workload.seq_length, packed_domain(domain, mask.documents) if mask.documents else domain, mask


@given(masked_domains())
@examples(150)
def test_the_own_blocks_of_a_group_are_the_mask(case):
    seq_length, domain, mask = case
    for group in domain.groups:
        if not group.tokens:
            continue
        held = positions(group.segments)
        first, beside = own_blocks(group, mask, seq_length)
        assert sorted(row for block in first for row in range(*block.queries)) == list(range(group.tokens))
        assert covered_by((*first, *beside), held, held) == visible(mask, seq_length, held, held)


@given(masked_domains())
@examples(150)
def test_the_blocks_between_two_groups_are_the_mask_and_no_key_travels_in_vain(case):
    seq_length, domain, mask = case
    for group, source in itertools.permutations(domain.groups, 2):
        queries, held = positions(group.segments), positions(source.segments)
        seen = exchange_blocks(group, source, mask, seq_length)
        keys = [held[row] for row in positions(seen.rows)]
        assert len(keys) == seen.keys
        met = covered_by(seen.blocks, queries, keys)
        assert met == visible(mask, seq_length, queries, held)
        assert {key for _, key in met} == set(keys)


@given(plans())
@examples(80)
def test_without_window_and_documents_blocks_are_as_few_as_can_be(plan):
    mask = Mask(plan.workload.causal)
    for group, source in itertools.permutations(plan.replicas[0].domain.groups, 2):
        blocks = exchange_blocks(group, source, mask, plan.workload.seq_length).blocks
        for before, after in itertools.pairwise(blocks):
            assert before.keys != after.keys or before.queries[1] < after.queries[0]
        if group.tokens:
            assert len(own_blocks(group, mask, plan.workload.seq_length)[0]) == 1


def test_a_window_by_hand():
    """Ten tokens in one group, of which each sees two before itself."""
    group = Group(((0, 10),), (Member((0,), 10, (0, 1)),))
    first, beside = own_blocks(group, Mask(window=2), 10)
    chunks = [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert first == tuple(Block(rows, rows, Shape.CAUSAL) for rows in chunks)
    # Tokens 3 and 4 see keys from 1 and 2 on; token 9 sees 7 at the edge and 8 whole.
    assert beside == (
        Block((3, 5), (1, 3), Shape.WINDOW_EDGE),
        Block((6, 8), (4, 6), Shape.WINDOW_EDGE),
        Block((9, 10), (7, 8), Shape.WINDOW_EDGE),
        Block((9, 10), (8, 9)),
    )


@given(st.lists(st.integers(0, 30), max_size=12), RANDOMS)
@examples(200)
def test_dealing_keeps_both_sums_and_stays_near_the_shares(rows, random):
    total = sum(rows)
    cuts = sorted(random.randint(0, total) for _ in range(random.randint(0, 8)))
    columns = [stop - start for start, stop in itertools.pairwise([0, *cuts, total])]
    table = proportional_table(rows, columns)
    assert [sum(row) for row in table] == rows
    assert [sum(row[place] for row in table) for place in range(len(columns))] == columns
    done, given_so_far = 0, [0] * len(columns)
    for count, row in zip(rows, table, strict=True):
        assert min(row, default=0) >= 0
        done += count
        given_so_far = [before + here for before, here in zip(given_so_far, row, strict=True)]
        for column, given_here in zip(columns, given_so_far, strict=True):
            # One for each of at most four halvings of up to nine columns.
            assert abs(given_here - (done * column / total if total else 0)) <= 4


def test_one_document_is_the_layout_of_a_sequence():
    tokens = [5, 8, 3]
    groups = tuple(
        Group(segments, (Member((rank,), count, (0, 1)),))
        for rank, (segments, count) in enumerate(zip(causal_segments(tokens), tokens, strict=True))
    )
    assert packed_domain(Domain(groups), (16,)) == Domain(groups)


@pytest.mark.parametrize("seed", range(20))
def test_every_group_has_its_share_of_the_work_whatever_the_documents_lengths_are(seed):
    """Documents of wildly different length: the busiest group does at most 5 % more than its share."""
    from random import Random

    random = Random(seed)
    lengths: list[int] = []
    while sum(lengths) < 2**15:
        lengths.append(min(int(2 ** random.uniform(3, 15)), 2**15 - sum(lengths)))
    tokens = [16384, 8192, 5000, 3192]
    groups = tuple(
        Group(segments, (Member((rank,), count, (0, 1)),))
        for rank, (segments, count) in enumerate(zip(causal_segments(tokens), tokens, strict=True))
    )
    mask = Mask(documents=tuple(lengths))
    domain = packed_domain(Domain(groups), mask.documents)
    areas = [
        sum(block.area for part in own_blocks(group, mask, 2**15) for block in part)
        + sum(
            block.area
            for source in domain.groups
            if source is not group
            for block in exchange_blocks(group, source, mask, 2**15).blocks
        )
        for group in domain.groups
    ]
    whole = sum(length * (length + 1) // 2 for length in lengths)
    assert sum(areas) == whole
    for area, count in zip(areas, tokens, strict=True):
        assert area <= 1.05 * whole * count / 2**15
