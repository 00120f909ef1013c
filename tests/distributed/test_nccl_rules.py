"""What ranks post goes together by NCCL's rules, on any plan; and the replay finds each kind of fault."""

import re
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.plan import Mask
from megatron_hexi.runtime import attention as attention_room
from tests.support.nccl_rules import BrokenRuleError, Call, Posted, replay
from tests.support.plans import RAGGED, RANDOMS, SPARSE, TORN, examples, masks, plans, workloads
from tests.support.programmed import programmed
from tests.support.training import RECOMPUTE, Job

LENGTHS = (1, 2, 3, 5, 7, 11, 13, *range(1, 60))


@st.composite
def jobs(draw):
    """Any plan, trained in any way: up to three layers with windows of their own, stages, replicas, units."""
    workload = draw(workloads(lengths=LENGTHS, value_dims=(None, None, 2, 9)))
    plan = draw(plans(st.just(workload), most_ranks=6, most_replicas=3))
    random = draw(RANDOMS)
    layers = [draw(masks(plan.workload)) for _ in range(random.randint(1, 3))]
    replicas = len(plan.replicas)
    return Job(
        plan=plan,
        masks=tuple(Mask(mask.causal, mask.window, layers[0].documents) for mask in layers),
        stages=random.choice([1, 1, 1, 2, 3]),
        batch=random.randint(1, 2),
        micro_batches=tuple(random.randint(1, 2) for _ in range(replicas)),
        recompute=random.choice(RECOMPUTE),
        reentrant=random.random() < 0.5,
        dtype=random.choice([torch.bfloat16, torch.float32]),
    )


def one_layer(plan, stages=1, mask=None):
    mask = Mask(causal=plan.workload.causal) if mask is None else mask
    return Job(plan, (mask,), stages, 1, (1,) * len(plan.replicas), "no", False, torch.float32)


def check(job):
    posted = job.post()
    operations = replay(posted)
    assert replay(posted, one_queue=False) == operations
    return operations


@given(job=jobs())
@examples(4)
def test_any_job_ends_and_its_messages_and_collectives_match(job):
    assert check(job) > 0


@st.composite
def layers(draw, most_ranks=6):
    """Any plan under any mask."""
    workload = draw(workloads(lengths=LENGTHS, value_dims=(None, None, 2, 9)))
    plan = draw(plans(st.just(workload), most_ranks=most_ranks, most_replicas=2))
    return plan, draw(masks(plan.workload))


@given(layer=layers())
@examples(12)
def test_the_runtime_posts_what_the_program_says(layer):
    plan, mask = layer
    job = one_layer(plan, mask=mask)
    for recorded, expected in zip(job.post(), programmed(plan, mask, "float32"), strict=True):
        attention = [call for call in recorded if call.messages or call.collective == "alltoall_base_"]
        assert attention == expected


@given(layer=layers(most_ranks=16))
@examples(100)
def test_the_program_of_any_plan_ends_and_its_messages_and_collectives_match(layer):
    plan, mask = layer
    posted = programmed(plan, mask, "float32")
    made = sorted({(call.communicator, call.ranks) for calls in posted for call in calls})
    for name, ranks in made:
        for rank in ranks:
            posted[rank].insert(0, Call(name, ranks, collective="connect"))
    assert replay(posted) == replay(posted, one_queue=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_jobs_end_and_their_messages_and_collectives_match():
    counts = []

    @given(job=jobs())
    @examples(600)
    def try_all(job):
        counts.append((check(job), job.stages * job.plan.ranks))

    try_all()
    operations, ranks = (sum(column) for column in zip(*counts, strict=True))
    print(f"{len(counts)} jobs, {ranks} ranks, {operations} operations replayed")
    assert len(counts) >= 500


@pytest.mark.parametrize("plan", [TORN, RAGGED, SPARSE], ids=["torn", "ragged", "sparse"])
def test_a_domain_is_connected_by_a_collective_of_all_its_ranks_whatever_they_exchange(plan):
    """Without the comparison of shapes, too: a rank without heads posts no messages at all."""
    with mock.patch.object(attention_room, "agree_on_shapes"):
        posted = one_layer(plan).post()
    assert replay(posted) > 0
    for calls in posted:
        first: dict[str, Call] = {}
        for call in calls:
            first.setdefault(call.communicator, call)
        assert all(call.collective for call in first.values())


def ring(*, members=3, before=("all_reduce",)):
    """Each rank sends to the next and receives from the one before, after a collective."""
    ranks = tuple(range(members))
    return [
        [
            *(Call("ring", ranks, collective=name, terms="1 float32") for name in before),
            Call(
                "ring",
                ranks,
                (message("receive", (rank - 1) % members), message("send", (rank + 1) % members)),
            ),
        ]
        for rank in ranks
    ]


def message(kind, peer, count=4, dtype="float32", tag=0):
    return Posted(kind, peer, count, dtype, tag)


PAIR = (0, 1)
MAKE = Call("pair", PAIR, collective="all_reduce", terms="1 float32")


def batch(*messages, on="pair"):
    return Call(on, PAIR, messages)


def found(posted, says, **mode):
    with pytest.raises(BrokenRuleError, match=re.escape(says)):
        replay(posted, **mode)


def test_a_ring_of_batches_ends():
    assert replay(ring()) == 9


def test_batches_may_be_cut_otherwise_on_the_other_side():
    """Two batches of one rank are one of the other: all that counts is that each can end."""
    apart = [MAKE, batch(message("send", 1, 4)), batch(message("send", 1, 5))]
    at_once = [MAKE, batch(message("receive", 0, 4), message("receive", 0, 5))]
    assert replay([apart, at_once]) == 6


@pytest.mark.parametrize("cut", [False, True], ids=["in-one-batch", "in-two"])
def test_two_sends_that_are_swapped_are_found(cut):
    sends = message("send", 1, 4), message("send", 1, 6)
    receives = message("receive", 0, 6), message("receive", 0, 4)
    first = [batch(send) for send in sends] if cut else [batch(*sends)]
    found(
        [[MAKE, *first], [MAKE, batch(*receives)]],
        "of 6 float32 (tag 0) of rank 1 meets a send of 4 float32 (tag 0)",
    )


@pytest.mark.parametrize(
    ("send", "says"),
    [
        (message("send", 1, 5), "meets a send of 5 float32"),
        (message("send", 1, 4, "bfloat16"), "meets a send of 4 bfloat16"),
        (message("send", 1, 4, tag=2), "meets a send of 4 float32 (tag 2)"),
    ],
    ids=["count", "type", "tag"],
)
def test_a_message_of_another_size_type_or_tag_is_found(send, says):
    posted = [[MAKE, batch(send)], [MAKE, batch(message("receive", 0))]]
    found(posted, says)


def test_a_message_that_nobody_takes_is_found():
    found([[MAKE, batch(message("send", 1))], [MAKE]], "rank 0 waits for rank 1 with a send of 4 float32")
    found([[MAKE], [MAKE, batch(message("receive", 0))]], "rank 0 posts nothing more")


def test_a_batch_that_is_split_is_found():
    """Each sends first and receives then: nobody ever comes to its receive."""
    split = [
        [*calls[:-1], *(Call("ring", calls[-1].ranks, (one,)) for one in reversed(calls[-1].messages))]
        for calls in ring()
    ]
    found(split, "deadlock: rank 0 waits for rank 1 with a send of 4 float32")


def test_a_rank_that_is_left_out_of_a_first_call_is_found():
    posted = [
        [Call("domain", (0, 1, 2), (message("send", 1),))],
        [Call("domain", (0, 1, 2), (message("receive", 0),))],
        [],
    ]
    found(posted, "first call: rank 0 makes a batch of messages on 'domain', ranks [2] none")


def test_a_rank_that_comes_too_late_to_a_first_call_is_found():
    """It waits for what another rank would send it only after that call."""
    three = (0, 1, 2)
    make = [Call("other", three, collective="all_reduce")]
    posted = [
        [*make, Call("domain", three, (message("send", 1),)), Call("other", three, (message("send", 2),))],
        [*make, Call("domain", three, (message("receive", 0),))],
        [*make, Call("other", three, (message("receive", 0),)), Call("domain", three, collective="barrier")],
    ]
    found(posted, "deadlock: rank 0 waits for rank 2 in a batch of messages on 'domain'")


def test_a_circle_over_two_communicators_is_found_where_a_rank_has_one_queue():
    make = [Call(name, PAIR, collective="all_reduce") for name in ("one", "two")]
    calls = {
        rank: [batch(message(kind, 1 - rank), on=name) for name in ("one", "two")]
        for rank, kind in ((0, "send"), (1, "receive"))
    }
    posted = [[*make, *calls[0]], [*make, *reversed(calls[1])]]
    found(
        posted,
        "with a send of 4 float32 (tag 0) in a batch of messages on 'one'; rank 1 waits for rank 0",
    )
    assert replay(posted, one_queue=False) == 8


def test_a_collective_in_another_order_or_of_another_size_is_found():
    posted = ring(before=("all_reduce", "all_gather"))
    posted[2][:2] = reversed(posted[2][:2])
    found(posted, "rank 0 calls all_reduce(1 float32) on 'ring', rank 2 all_gather(1 float32)")
    posted = ring()
    posted[1][0] = Call("ring", (0, 1, 2), collective="all_reduce", terms="2 float32")
    found(posted, "rank 0 calls all_reduce(1 float32) on 'ring', rank 1 all_reduce(2 float32)")


def test_a_collective_that_meets_a_batch_is_found():
    posted = ring(before=("all_reduce", "all_gather"))
    posted[1].reverse()
    posted[1].insert(0, posted[1].pop())
    found(posted, "deadlock: rank 0 waits for rank 1 in all_gather(1 float32) on 'ring'")


def test_an_all_to_all_in_which_one_expects_what_another_does_not_send_is_found():
    def call(sent, received):
        return [Call("pair", PAIR, collective="all_to_all", sent=sent, received=received)]

    assert replay([call((1, 2), (1, 3)), call((3, 0), (2, 0))]) == 2
    found([call((1, 2), (1, 3)), call((4, 0), (2, 0))], "rank 1 sends 4 elements to rank 0, which expects 3")


@pytest.mark.parametrize("plan", [TORN, RAGGED], ids=["torn", "ragged"])
def test_a_fault_in_what_the_runtime_posts_is_found(plan):
    """Whichever call of whichever rank is lost."""
    posted = one_layer(plan).post()
    assert replay(posted) > 0
    tried = 0
    for rank, calls in enumerate(posted):
        for place, call in enumerate(calls):
            if len(call.ranks) == 1:
                continue
            without = [*calls[:place], *calls[place + 1 :]]
            found_in = [*posted[:rank], without, *posted[rank + 1 :]]
            with pytest.raises(BrokenRuleError):
                replay(found_in)
            tried += 1
    assert tried > 30
