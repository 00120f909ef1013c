"""Split tables against the mask written out: nothing is missing, nothing twice, both ends agree."""

from collections import Counter

from hypothesis import given

from megatron_hexi.plan import Group, Member, Plan, Replica, Stage, Workload, build_schedule
from megatron_hexi.plan.blocks import Block
from megatron_hexi.plan.model import Domain
from megatron_hexi.plan.schedule import Transfer
from tests.support.plans import examples, plans


def positions(segments):
    return [position for start, stop in segments for position in range(start, stop)]


def schedules_of(plan):
    domain = plan.replicas[0].domain
    return [
        build_schedule(plan.workload, domain, index, plan.exchange.parts)
        for index in range(len(domain.members))
    ]


def group_of(plan, index):
    domain = plan.replicas[0].domain
    rank = domain.members[index].number
    return next(group for group in domain.groups if rank in [member.number for member in group.members])


def sees(workload, query, key):
    return key <= query or not workload.causal


@given(plans())
@examples(200)
def test_every_send_is_a_receive_of_the_other_end_in_the_same_step_and_order(plan):
    schedules = schedules_of(plan)
    steps = {len(schedule.steps) for schedule in schedules}
    assert steps == {len(plan.replicas[0].domain.groups) - 1}
    numbers = {part.number for schedule in schedules for step in schedule.steps for part in step.parts}
    for number in numbers:
        parts = [
            next((part for step in schedule.steps for part in step.parts if part.number == number), None)
            for schedule in schedules
        ]
        for sender, giver in zip(schedules, parts, strict=True):
            for receiver, taker in zip(schedules, parts, strict=True):
                sent = [
                    (send.kv, send.keys)
                    for send in (giver.sends if giver else ())
                    if send.peer == receiver.index
                ]
                received = [
                    (part.kv, part.keys)
                    for part in (taker.receives if taker else ())
                    if part.peer == sender.index
                ]
                assert sent == received


@given(plans())
@examples(150)
def test_only_the_first_step_comes_in_parts_and_each_has_whole_kv_heads(plan):
    ratio = plan.workload.queries_per_kv
    for schedule in schedules_of(plan):
        first = schedule.own_kv[0]
        numbers = [part.number for step in schedule.steps for part in step.parts]
        assert numbers == sorted(set(numbers))
        for place, step in enumerate(schedule.steps):
            assert 1 <= len(step.parts) <= (plan.exchange.parts if place == 0 else 1)
            assert [h for part in step.parts for h in range(*part.heads)] == list(range(schedule.own_heads))
            start = schedule.heads[schedule.position][0]
            for part in step.parts:
                heads = range(start + part.heads[0], start + part.heads[1])
                read = sorted({head // ratio for head in heads})
                assert not part.receives or list(range(*part.kv)) == read
                spans = [
                    (part.heads[0] + q, read[0] + k - first)
                    for spans in part.pieces
                    for span in spans
                    for q in range(*span.queries)
                    for k in range(*span.kv)
                    if (start + part.heads[0] + q) // ratio == read[0] + k
                ]
                assert [q for q, _ in spans] == list(range(*part.heads))


@given(plans(most_ranks=6))
@examples(15)
def test_every_query_head_meets_every_visible_key_of_its_kv_head_once(plan):
    """Follow what arrives where: own block and blocks of all ranks together are the attention of a layer."""
    workload, ratio = plan.workload, plan.workload.queries_per_kv
    met: Counter = Counter()
    schedules = schedules_of(plan)
    for schedule in schedules:
        own = group_of(plan, schedule.index)
        heads = range(*schedule.heads[schedule.position])
        queries = positions(own.segments)
        met.update(
            (head, query, key)
            for head in heads
            for query in queries
            for key in queries
            if sees(workload, query, key)
        )
        for step in schedule.steps:
            arrived = {}
            for part in step.receives:
                source = group_of(plan, part.peer)
                assert source is not own
                held = schedules[part.peer].own_kv
                assert held[0] <= part.kv[0] < part.kv[1] <= held[1], "a rank sends what it holds"
                for kv in range(*part.kv):
                    assert kv not in arrived, "one KV head arrives once"
                    arrived[kv] = [positions(source.segments)[row] for row in positions(part.rows)]
            for block in step.blocks:
                for head in heads:
                    keys = arrived[head // ratio][slice(*block.keys)]
                    assert len(keys) == block.keys[1] - block.keys[0]
                    met.update((head, query, key) for query in queries[slice(*block.queries)] for key in keys)
    everything = {
        (head, query, key)
        for head in range(workload.local_heads)
        for query in range(workload.seq_length)
        for key in range(workload.seq_length)
        if sees(workload, query, key)
    }
    assert met == Counter(dict.fromkeys(everything, 1))


@given(plans())
@examples(150)
def test_what_a_rank_receives_is_its_own_kv_heads_in_order_and_no_key_too_many(plan):
    for schedule in schedules_of(plan):
        for step in schedule.steps:
            if not step.blocks:
                assert step.receives == ()
                continue
            assert [kv for part in step.receives for kv in range(*part.kv)] == list(range(*schedule.own_kv))
            assert {part.keys for part in step.receives} == {max(block.keys[1] for block in step.blocks)}
            assert {part.keys for part in step.parts if part.receives} == {step.receives[0].keys}


@given(plans())
@examples(150)
def test_shards_of_all_ranks_are_the_sequence(plan):
    schedules = schedules_of(plan)
    held = [position for schedule in schedules for position in positions(schedule.segments)]
    assert sorted(held) == list(range(plan.workload.seq_length))
    for schedule in schedules:
        assert schedule.tokens == len(positions(schedule.segments))
        assert schedule.members[schedule.position] == schedule.index
        assert schedule.group_tokens == group_of(plan, schedule.index).tokens


def domain_of(*groups):
    return Domain(tuple(groups))


def test_two_groups_by_hand():
    """Outer group 0: 2 ranks; inner group 1: one rank. 4 heads share 2 KV heads."""
    workload = Workload(12, 4, 2, 8)
    domain = domain_of(
        Group(((0, 3), (9, 12)), (Member((0,), 4, (0, 1)), Member((1,), 2, (1, 4)))),
        Group(((3, 9),), (Member((2,), 6, (0, 4)),)),
    )
    outer, second, inner = (build_schedule(workload, domain, index, 1) for index in range(3))
    # The outer group's back half sees all of the inner keys; its front half sees none of them.
    assert outer.steps[0].blocks == (Block((3, 6), (0, 6)),)
    assert outer.steps[0].receives == (Transfer(2, (0, 1), ((0, 6),)),)
    assert second.steps[0].receives == (Transfer(2, (0, 2), ((0, 6),)),)
    # All inner queries see the outer front half: KV head 0 is held twice, and comes from the one that shares
    # the most of the query heads, or the first.
    assert inner.steps[0].blocks == (Block((0, 6), (0, 3)),)
    assert inner.steps[0].receives == (Transfer(0, (0, 1), ((0, 3),)), Transfer(1, (1, 2), ((0, 3),)))
    assert outer.steps[0].sends == (Transfer(2, (0, 1), ((0, 3),)),)
    assert inner.steps[0].sends == (Transfer(0, (0, 1), ((0, 6),)), Transfer(1, (0, 2), ((0, 6),)))
    assert (outer.kv, outer.segments, second.segments) == (((0, 1), (0, 2)), ((0, 3), (9, 10)), ((10, 12),))


def test_groups_cut_alike_are_served_by_their_counterparts():
    """One KV head for all: each rank is served by the one with the same query heads, not all by the first."""
    workload = Workload(16, 4, 1, 8, causal=False)
    domain = domain_of(
        Group(((0, 8),), (Member((0,), 4, (0, 2)), Member((1,), 4, (2, 4)))),
        Group(((8, 16),), (Member((2,), 4, (0, 2)), Member((3,), 4, (2, 4)))),
    )
    peers = [build_schedule(workload, domain, index, 1).steps[0].receives for index in range(4)]
    assert peers == [(Transfer(peer, (0, 1), ((0, 8),)),) for peer in (2, 3, 0, 1)]


@given(plans())
@examples(150)
def test_a_rank_without_heads_or_tokens_serves_nobody_and_asks_for_nothing(plan):
    for schedule in schedules_of(plan):
        if schedule.own_heads == 0 or schedule.group_tokens == 0:
            assert {(step.receives, step.sends, step.blocks) for step in schedule.steps} <= {((), (), ())}


def test_ranks_of_a_second_replica_are_counted_from_its_own_first():
    workload = Workload(8, 2, 2, 8)
    groups = Group(((0, 4),), (Member((5,), 4, (0, 2)),)), Group(((4, 8),), (Member((4,), 4, (0, 2)),))
    plan = Plan(workload, (Replica((Stage((domain_of(*groups),)),)),))
    assert [schedule.segments for schedule in schedules_of(plan)] == [((4, 8),), ((0, 4),)]
    assert build_schedule(workload, plan.replicas[0].domain, 0, 1).steps[0].receives[0].peer == 1
