"""Counts of the wire against every element that must travel, one by one."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.plan import Traffic, attention_traffic, build_schedule
from megatron_hexi.plan.heads import kv_range
from tests.support.plans import TORN, examples, plans

SIZES = {"head_dim": 8, "batch": 3, "element_bytes": 2}
ELEMENT = 8 * 3 * 2


def held_kv(member, ratio):
    return range(*kv_range(member.heads, ratio))


def elsewhere(group, rank):
    return [member for member in group.members if member.number != rank]


@given(plans())
@examples(200)
def test_bytes_between_members_are_the_heads_that_move_for_each_token(plan):
    ratio = plan.workload.queries_per_kv
    domain = plan.replicas[0].domain
    for group in domain.groups:
        for member in group.members:
            schedule = build_schedule(
                plan.workload, domain, domain.members.index(member), plan.exchange.parts
            )
            heads, kv = len(range(*member.heads)), len(held_kv(member, ratio))
            others = elsewhere(group, member.number)
            query_out = sum(member.tokens * len(range(*other.heads)) for other in others)
            keys_out = sum(2 * member.tokens * len(held_kv(other, ratio)) for other in others)
            back = sum(other.tokens * heads for other in others)
            keys_back = sum(2 * other.tokens * kv for other in others)
            forward, backward = (
                attention_traffic(schedule, **SIZES).forward,
                attention_traffic(schedule, **SIZES).backward,
            )
            assert forward.all_to_all_bytes == (query_out + keys_out + back) * ELEMENT
            # The output's gradient goes where the queries went; three gradients come back.
            assert backward.all_to_all_bytes == (query_out + back + keys_back) * ELEMENT
            halves = 2 if plan.exchange.parts > 1 else 1
            calls = 2 * halves if len(group.members) > 1 and group.tokens else 0
            assert forward.all_to_alls == backward.all_to_alls == calls


@given(plans())
@examples(200)
def test_what_is_sent_between_groups_is_what_the_users_hold_for_it(plan):
    """Over all ranks: forward the keys and values that users receive; backward their gradients too."""
    domain = plan.replicas[0].domain
    schedules = [
        build_schedule(plan.workload, domain, index, plan.exchange.parts)
        for index in range(len(domain.members))
    ]
    received = sum(
        2 * len(range(*part.kv)) * part.keys
        for schedule in schedules
        for step in schedule.steps
        for part in step.parts
    )
    forward = [attention_traffic(schedule, **SIZES).forward for schedule in schedules]
    backward = [attention_traffic(schedule, **SIZES).backward for schedule in schedules]
    assert sum(traffic.message_bytes for traffic in forward) == received * ELEMENT
    assert sum(traffic.message_bytes for traffic in backward) == 2 * received * ELEMENT
    assert sum(traffic.messages for traffic in backward) == 2 * sum(traffic.messages for traffic in forward)


@given(plans(), st.integers(1, 4), st.sampled_from([2, 4, 8]))
@examples(50)
def test_bytes_grow_with_batch_head_size_and_element(plan, batch, element_bytes):
    schedule = build_schedule(plan.workload, plan.replicas[0].domain, 0, plan.exchange.parts)
    one = attention_traffic(schedule, 1, 1, 1).forward
    many = attention_traffic(schedule, 5, batch, element_bytes).forward
    factor = 5 * batch * element_bytes
    assert many == Traffic(
        one.all_to_alls, one.all_to_all_bytes * factor, one.messages, one.message_bytes * factor
    )


def test_by_hand():
    domain = TORN.replicas[0].domain
    # Rank 0: 9 of 14 tokens, 2 of 6 heads, KV head 0 of 2. Members 1 and 2 hold 4 query heads, and KV heads
    # 0, 1 and 1: 9 x (4 + 2 x 3) out; 2 heads of 5 tokens back. Group 1 sees its front half, 5 tokens, of
    # which the rank's KV head is asked for by rank 4 only.
    schedule = build_schedule(TORN.workload, domain, 0, 1)
    assert attention_traffic(schedule, 1, 1, 1).forward == Traffic(2, 9 * 10 + 2 * 5, 1, 2 * 1 * 5)
    # The gradient of rank 4's 15 keys goes back to it beside that.
    assert attention_traffic(schedule, 1, 1, 1).backward == Traffic(2, 9 * 4 + (2 + 2) * 5, 2, 2 * 5 + 2 * 15)
