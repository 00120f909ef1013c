"""Images are divided among units by patches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.plan.images import deal_images


def test_the_largest_images_are_dealt_first_and_ties_go_to_the_first_unit():
    assert deal_images([4, 16, 4, 8], [1, 1]) == (1, 0, 1, 1)
    assert deal_images([8, 8], [1, 1]) == (0, 1)
    assert deal_images([8, 8, 8], [1, 3]) == (1, 1, 0)
    assert deal_images([], [1]) == ()


@given(
    patches=st.lists(st.integers(1, 1000), max_size=30),
    weights=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
)
def test_no_unit_that_could_take_its_last_image_earlier_is_passed_over(
    patches: list[int], weights: list[int]
):
    owners = deal_images(patches, weights)
    assert len(owners) == len(patches)
    assert all(weights[owner] for owner in owners)
    times = {
        unit: sum(size for size, owner in zip(patches, owners, strict=True) if owner == unit) / weight
        for unit, weight in enumerate(weights)
        if weight
    }
    for unit, time in times.items():
        smallest = min(
            (size for size, owner in zip(patches, owners, strict=True) if owner == unit), default=0
        )
        for other, other_time in times.items():
            assert time <= other_time + smallest / weights[other] + 1e-9
        assert (time == 0) == (smallest == 0)
