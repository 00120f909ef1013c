"""Shares of one batch: every token and head is somebody's, nobody is over its memory, work is even."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from megatron_hexi.plan import Domain, Mask, Plan, UnitRates, Workload, proportional_plan
from megatron_hexi.plan.batch_balance import EVEN, balanced_domain, even_seconds, packed_domain, unit_seconds
from megatron_hexi.plan.blocks import exchange_blocks, own_blocks
from megatron_hexi.plan.file import validate_plan

#: The aim: no unit is busy for longer than this part above its share of a batch's work.
_AIM = 0.03


def drawn_documents(random_: random.Random, total: int, median: float) -> tuple[int, ...]:
    """Log-normal lengths, as of text: the last one is cut off."""
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(max(1, min(left, int(random_.lognormvariate(math.log(median), 1.0)))))
    return tuple(lengths)


def two_to_one(seq_length: int = 8192) -> tuple[Plan, UnitRates]:
    """Two pairs of ranks, the second half as fast, and what they take of a model of 16 heads."""
    plan = proportional_plan(Workload(seq_length, 16, 4, 64), [[[2.0, 2.0], [1.0, 1.0]]])
    slow = (1.0, 1.0, 2.0, 2.0)
    return plan, UnitRates(tuple(1e-6 * one for one in slow), tuple(1e-9 * one for one in slow), (8192,) * 4)


@pytest.mark.parametrize("seed", range(10))
def test_the_busiest_rank_of_a_two_to_one_cluster_is_within_3_per_cent_of_its_share(seed):
    plan, rates = two_to_one()
    domain = plan.replicas[0].domain
    documents = drawn_documents(random.Random(seed), 8192, 300)
    dealt = balanced_domain(domain, documents, rates)
    busiest = max(unit_seconds(dealt, documents, rates))
    assert busiest <= (1 + _AIM) * even_seconds(domain, documents, rates)
    assert keys_between_groups(dealt, documents) <= 0.7 * keys_between_groups(
        packed_domain(domain, documents), documents
    )


@pytest.mark.parametrize("seed", range(60))
def test_a_dealt_domain_is_a_plan_within_memory_with_the_work_that_was_computed(seed):
    random_ = random.Random(seed)
    workload = Workload(random_.choice([257, 1024]), 6, 2, 16)
    speeds = [
        [random_.uniform(0.5, 3) for _ in range(random_.randint(1, 3))] for _ in range(random_.randint(1, 3))
    ]
    plan = proportional_plan(workload, [speeds])
    domain, units = plan.replicas[0].domain, plan.units
    fair = 2.5 * workload.seq_length / units
    rates = UnitRates(
        tuple(random_.uniform(1, 4) * 1e-6 for _ in range(units)),
        tuple(random_.uniform(1, 4) * 1e-8 for _ in range(units)),
        tuple(int(random_.uniform(0.8, 1.5) * fair) for _ in range(units)),
        attended=0.25,
    )
    documents = drawn_documents(random_, workload.seq_length, random_.choice([5, 60, 500]))
    dealt = balanced_domain(domain, documents, rates)
    validate_plan(replace(plan, replicas=(replace(plan.replicas[0], stages=(stage(plan, dealt),)),)))
    for group in dealt.groups:
        for member in group.members:
            part = (member.heads[1] - member.heads[0]) / workload.heads
            used = member.tokens + rates.attended * part * group.tokens
            assert used <= rates.room[member.number] or dealt == packed_domain(domain, documents)
    assert unit_seconds(dealt, documents, rates) == pytest.approx(counted(dealt, documents, rates, workload))


def test_documents_that_fit_no_memory_whole_are_cut():
    plan, rates = two_to_one(1024)
    rates = replace(rates, room=(400, 400, 300, 300))
    dealt = balanced_domain(plan.replicas[0].domain, (1000, 24), rates)
    assert all(member.tokens <= rates.room[member.number] for member in dealt.members)
    assert max(unit_seconds(dealt, (1000, 24), rates)) <= (1 + EVEN) * even_seconds(dealt, (1000, 24), rates)


def test_without_room_for_anything_else_the_plans_shares_stay():
    plan, rates = two_to_one(1024)
    domain = plan.replicas[0].domain
    rates = replace(rates, room=(1, 1, 1, 1))
    assert balanced_domain(domain, (1000, 24), rates) == packed_domain(domain, (1000, 24))


def test_a_unit_whose_memory_is_full_takes_heads_in_place_of_tokens():
    plan = proportional_plan(Workload(1000, 100, 100, 16), [[[1.0, 1.0]]])
    rates = UnitRates((1e-6, 1e-6), (1e-8, 1e-8), (1000, 100))
    (first, second) = balanced_domain(plan.replicas[0].domain, (500, 500), rates).members
    assert second.tokens in (99, 100)
    assert first.tokens == 1000 - second.tokens
    assert second.heads[1] - second.heads[0] > 60


def stage(plan: Plan, domain: Domain):
    return replace(plan.replicas[0].stages[0], domains=(domain,))


def keys_between_groups(domain: Domain, documents: tuple[int, ...]) -> int:
    """Keys that groups are sent by others."""
    mask, total = Mask(documents=documents), sum(documents)
    return sum(
        exchange_blocks(group, other, mask, total).keys
        for group in domain.groups
        for other in domain.groups
        if group is not other
    )


def counted(domain: Domain, documents: tuple[int, ...], rates: UnitRates, workload: Workload) -> list[float]:
    """Each unit's work by the blocks that it computes."""
    mask, total, seconds = Mask(documents=documents), workload.seq_length, {}
    for group in domain.groups:
        blocks = list(own_blocks(group, mask, total)[0]) if group.tokens else []
        for other in domain.groups:
            if other is not group:
                blocks += exchange_blocks(group, other, mask, total).blocks
        pairs = sum(block.area for block in blocks)
        for member in group.members:
            part = (member.heads[1] - member.heads[0]) / workload.heads
            number = member.number
            seconds[number] = member.tokens * rates.row_s[number] + part * pairs * rates.pair_s[number]
    return [seconds[number] for number in sorted(seconds)]
