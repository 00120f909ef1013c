"""The least time of groups of many shapes: against every deal of a few heads."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.planner.bound.groups import group_rates
from megatron_hexi.planner.bound.groups.group_rates import seconds_a_token

HEADS = 4


@dataclass
class Site:
    """What is asked of a class of sites: tokens a second, tokens x heads a second, seconds a token moved."""

    token_rate: float
    head_rate: float
    each: float = 0.0

    def moving(self, units, outside):
        assert outside
        return self.each / units, 0.0


def by_every_deal(shape, sites):
    """Tokens at the best rates; the busiest unit; the site whose all-to-alls take longest."""
    members = [
        (place, sites[of_class]) for place, (of_class, units) in enumerate(shape) for _ in range(units)
    ]
    best = float("inf")
    for deal in itertools.product(range(HEADS + 1), repeat=len(members)):
        if sum(deal) != HEADS:
            continue
        busy = max(heads / site.head_rate for heads, (_, site) in zip(deal, members, strict=True))
        moved = 0.0
        for place, (of_class, units) in enumerate(shape if len(shape) > 1 else ()):
            part = sum(heads for heads, (at, _) in zip(deal, members, strict=True) if at == place) / HEADS
            moved = max(moved, sites[of_class].moving(units, True)[0] * part * (1 - part))
        best = min(best, busy + moved)
    return 1 / sum(site.token_rate for _, site in members) + best


SITES = st.lists(
    st.builds(Site, st.floats(0.5, 4), st.floats(0.5, 4), st.floats(0, 5)), min_size=2, max_size=2
)
SHAPES = st.lists(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 2)), min_size=1, max_size=3).map(tuple),
    min_size=1,
    max_size=4,
)


@given(sites=SITES, shapes=SHAPES)
def test_no_deal_of_heads_is_faster(sites, shapes):
    for shape, found in zip(shapes, seconds_a_token(shapes, sites, HEADS), strict=True):
        assert found <= by_every_deal(shape, sites) * (1 + 1e-9)


@given(sites=SITES, shape=SHAPES.map(lambda shapes: shapes[0]))
def test_where_nothing_has_to_move_it_is_the_best_deal(sites, shape):
    for site in sites:
        site.each = 0.0
    assert seconds_a_token([shape], sites, HEADS)[0] == pytest.approx(by_every_deal(shape, sites))


def test_heads_that_one_site_cannot_take_must_move_by_hand():
    # Two units that are alike on two sites: two heads each, or all on one site and nothing to move.
    sites = [Site(1.0, 1.0, each=4.0)]
    shape = ((0, 1), (0, 1))
    assert seconds_a_token([shape], sites, HEADS) == pytest.approx([1 / 2 + 2 + 4 * 0.5 * 0.5])
    sites = [Site(1.0, 1.0, each=100.0)]
    assert seconds_a_token([shape], sites, HEADS) == pytest.approx([1 / 2 + 4])


def test_many_shapes_are_looked_at_in_chunks(monkeypatch):
    sites, shapes = [Site(1.0, 2.0), Site(2.0, 1.0)], [((0, 1),), ((1, 2),), ((0, 2), (1, 1))]
    whole = seconds_a_token(shapes, sites, HEADS)
    monkeypatch.setattr(group_rates, "_CHUNK", 2)
    assert seconds_a_token(shapes, sites, HEADS) == pytest.approx(whole)
