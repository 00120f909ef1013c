"""Which micro-batches of a global batch each replica takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.errors import PlanError
from megatron_hexi.plan import (
    Plan,
    Replica,
    Share,
    Workload,
    assign_micro_batches,
    has_equal_replicas,
    proportional_plan,
)

WORKLOAD = Workload(64, heads=4, kv_heads=2, head_dim=8)


def plan(*shares: int | None, sizes: tuple[int, ...] = ()) -> Plan:
    speeds = [[[1.0] * size] for size in sizes or (1,) * len(shares)]
    bare = proportional_plan(WORKLOAD, speeds)
    replicas = (Replica(one.stages, share) for one, share in zip(bare.replicas, shares, strict=True))
    return replace(bare, replicas=tuple(replicas))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_every_micro_batch_of_every_global_batch_is_taken_by_one_replica(counts, micro_batch):
    shares = assign_micro_batches(plan(*counts), sum(counts) * micro_batch, micro_batch)
    assert [share.count for share in shares] == counts
    for number in range(3 * sum(counts)):
        assert sum(number in share for share in shares) == 1


def test_replicas_that_state_nothing_take_equal_shares():
    assert assign_micro_batches(plan(None, None), 8, 2) == (Share(0, 2, 4), Share(2, 2, 4))
    assert assign_micro_batches(plan(2, None), 8, 2) == (Share(0, 2, 4), Share(2, 2, 4))


@pytest.mark.parametrize(
    ("shares", "batch", "micro_batch", "message"),
    [
        ((3, 1), 6, 2, "take 4 micro-batches of 2, 8 sequences, the global batch has 6; make the two equal"),
        ((3, 1), 9, 2, "take 4 micro-batches of 2, 8 sequences, the global batch has 9; make the two equal"),
        ((None, None, None), 8, 2, "3 replicas cannot share 4 micro-batches of 2 equally"),
        ((3, None), 8, 2, "take 5 micro-batches of 2, 10 sequences, the global batch has 8"),
        ((1, 1), 2, 4, "take 2 micro-batches of 4, 8 sequences, the global batch has 2"),
    ],
)
def test_shares_that_are_not_the_batch_are_refused(shares, batch, micro_batch, message):
    with pytest.raises(PlanError, match=message):
        assign_micro_batches(plan(*shares), batch, micro_batch)


def test_equal_replicas_are_megatrons_rectangle():
    assert has_equal_replicas(plan(None))
    assert has_equal_replicas(plan(2, 2, sizes=(3, 3)))
    assert not has_equal_replicas(plan(2, 1))
    assert not has_equal_replicas(plan(1, None))
    assert not has_equal_replicas(plan(None, None, sizes=(2, 1)))
    backwards = plan(None, None)
    assert not has_equal_replicas(replace(backwards, replicas=backwards.replicas[::-1]))
