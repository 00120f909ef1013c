"""Real processes and their groups as a job makes them; and what ranks agree on before they send anything."""

import functools
import itertools
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_hexi.errors import PlanError
from megatron_hexi.plan import Group, Member, Schedules, Workload, plan_digest, proportional_plan
from megatron_hexi.runtime import NO_PLAN, DomainAttention, agree_on_plan
from tests.support.plans import TORN, one_replica
from tests.support.processes import connect, run_processes, serve
from tests.support.reference import plain_results, positions_of, random_problem
from tests.support.threads import run_ranks

PLANS = {
    "one group of unequal ranks": proportional_plan(Workload(61, 7, 7, 8), [[[3, 2, 1, 1]]]),
    "a ring of single ranks": proportional_plan(Workload(97, 4, 2, 8), [[[1], [2], [1], [3]]], window=2),
    "two groups of two, GQA": proportional_plan(Workload(128, 8, 2, 8), [[[2, 1], [1, 3]]]),
    "a group of three and one alone, all see all": proportional_plan(
        Workload(53, 5, 1, 8, causal=False), [[[1, 1, 2], [2]]]
    ),
    "a rank without heads, one without tokens": one_replica(
        Workload(29, 6, 2, 4),
        Group(
            ((0, 5), (20, 29)), (Member((0,), 9, (0, 3)), Member((2,), 0, (3, 6)), Member((3,), 5, (6, 6)))
        ),
        Group(((5, 20),), (Member((1,), 15, (0, 6)),)),
    ),
    "a group without tokens": one_replica(
        Workload(17, 3, 1, 4),
        Group(((0, 4), (12, 17)), (Member((1,), 9, (0, 3)),)),
        Group((), (Member((0,), 0, (0, 1)), Member((3,), 0, (1, 3)))),
        Group(((4, 12),), (Member((2,), 8, (0, 3)),)),
        window=3,
    ),
    "tensor parallel": proportional_plan(Workload(64, 12, 4, 8, tensor_parallel=2), [[[1, 2], [2, 1]]]),
}


def carry_out_plans(rank, store):
    """Largest error of each plan on this rank, and what its disagreement with the others gives."""
    errors: dict[str, Any] = {}
    for name, plan in PLANS.items():
        domain = plan.replicas[0].domain
        agree_on_plan(dist.PrefixStore(name, store), rank, 4, plan_digest(plan), name, timedelta(seconds=60))
        schedules = Schedules(plan.workload, domain, rank, plan.exchange.parts)
        schedule = schedules()
        everyone = dist.new_group(list(range(4)), use_local_synchronization=True)
        # Alone or not: torch names groups by how many it was asked for, which must stay alike on all ranks.
        a2a = dist.new_group(list(schedule.members), use_local_synchronization=True)
        assert isinstance(everyone, dist.ProcessGroup)
        assert isinstance(a2a, dist.ProcessGroup)
        attention = DomainAttention(plan.workload, schedules, everyone, a2a, plan.exchange.window)
        problem = random_problem(plan.workload, batch=2)
        mine = positions_of(schedule.segments)
        inputs = [t[mine].requires_grad_() for t in (problem.query, problem.key, problem.value)]
        output = attention(*inputs)
        output.backward(problem.grad_output[mine])
        found = [output.detach(), *(tensor.grad for tensor in inputs)]
        truth = [tensor[mine] for tensor in plain_results(problem)]
        errors[name] = max(
            float((result - exact).abs().max()) if mine else 0.0
            for result, exact in zip(found, truth, strict=True)
        )
    digest = "a" * 64 if rank != 2 else "b" * 64
    try:
        agree_on_plan(
            dist.PrefixStore("odd", store), rank, 4, digest, f"/of/{rank}.yaml", timedelta(seconds=60)
        )
    except PlanError as problem:
        errors["disagreement"] = str(problem)
    return errors


@pytest.fixture(scope="module")
def errors_of_processes():
    return run_processes(4, carry_out_plans)


@pytest.mark.parametrize("name", PLANS)
def test_processes_compute_what_one_device_does(errors_of_processes, name):
    assert max(errors[name] for errors in errors_of_processes) < 1e-10


def test_processes_with_another_plan_on_one_rank_all_say_so(errors_of_processes):
    messages = {errors["disagreement"] for errors in errors_of_processes}
    assert len(messages) == 1
    message = messages.pop()
    assert message.startswith("ranks have different plans: rank 2 on ")
    assert (
        "has /of/2.yaml (bbbbbbbbbbbb); the others have /of/0.yaml (aaaaaaaaaaaa); give all of them"
        in message
    )


# Agreement on the plan: threads with connections of their own to one store.


#: One for all tests: to take a store down takes seconds now and then.
_server = functools.cache(serve)
_numbers = itertools.count()


class Outcome:
    """What each rank was told, and after how many seconds the last one was."""

    def __init__(self, digests, timeout_s, store_of=lambda store: store):
        """Have ranks with these digests agree; ``None`` for one that never comes."""
        prefix = f"agreement-{next(_numbers)}"
        self.told: dict[int, Any] = {}

        def body(rank, digest, store):
            timeout = timedelta(seconds=timeout_s)
            try:
                agree_on_plan(
                    store, rank, len(digests), digest, f"/plans/{rank}.yaml" if digest else "", timeout
                )
                self.told[rank] = None
            except PlanError as problem:
                self.told[rank] = str(problem)

        threads = [
            threading.Thread(
                target=body,
                args=(rank, digest, store_of(dist.PrefixStore(prefix, connect(_server().port)))),
                daemon=True,
            )
            for rank, digest in enumerate(digests)
            if digest is not None
        ]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.seconds = time.monotonic() - start
        assert len(self.told) == len(threads), "a rank hangs"


def test_ranks_with_the_same_plan_agree():
    assert Outcome(["a" * 64] * 4, timeout_s=60).told == dict.fromkeys(range(4))


def test_ranks_that_all_have_no_plan_agree():
    assert Outcome([NO_PLAN] * 3, timeout_s=60).told == dict.fromkeys(range(3))


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_another_plan_on_one_rank_is_named_on_every_rank_within_seconds(odd):
    digests = ["b" * 64 if rank == odd else "a" * 64 for rank in range(4)]
    outcome = Outcome(digests, timeout_s=60)
    assert len(outcome.told) == 4
    assert len(set(outcome.told.values())) == 1
    assert f"rank {odd} on " in outcome.told[0]
    assert f"has /plans/{odd}.yaml (bbbbbbbbbbbb); the others have /plans/" in outcome.told[0]
    assert outcome.seconds < 20


def test_a_rank_without_a_plan_is_named():
    outcome = Outcome(["a" * 64, "a" * 64, NO_PLAN], timeout_s=60)
    assert set(outcome.told) == {0, 1, 2}
    for message in outcome.told.values():
        assert message.startswith("ranks have different plans: rank 2 on ")
        assert "has no plan; the others have /plans/0.yaml (aaaaaaaaaaaa)" in message


def test_where_most_have_no_plan_the_one_with_a_plan_is_named():
    (message,) = set(Outcome([NO_PLAN, "a" * 64, NO_PLAN], timeout_s=60).told.values())
    assert "rank 1 on " in message
    assert "has /plans/1.yaml (aaaaaaaaaaaa); the others have no plan" in message


def test_many_ranks_with_another_plan_are_named_in_one_short_line():
    (message,) = set(Outcome(["a" * 64] * 7 + ["b" * 64] * 6, timeout_s=60).told.values())
    assert message.count("(bbbbbbbbbbbb)") == 4
    assert " and 2 more; the others have" in message


def test_a_rank_that_never_comes_is_named_after_the_timeout():
    outcome = Outcome(["a" * 64, None, "a" * 64, None], timeout_s=1)
    assert set(outcome.told) == {0, 2}
    assert outcome.told[0] == outcome.told[2]
    assert outcome.told[0].startswith(
        "rank 1, 3 never said which plan it has; start every rank with the same"
    )
    assert 1 <= outcome.seconds < 20


class Impatient:
    """A store that waits for a moment only."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def wait(self, keys, timeout):
        self._store.wait(keys, timedelta(milliseconds=300))


def test_ranks_whose_first_never_comes_say_so():
    outcome = Outcome([None, "a" * 64, "a" * 64], timeout_s=1, store_of=Impatient)
    assert set(outcome.told) == {1, 2}
    for message in outcome.told.values():
        assert message == (
            "rank 0 did not answer within 0:00:01; does every rank run the same command with --hexi-plan?"
        )


# Agreement on what is about to be sent.


def told_with(shape_of):
    """What each rank of `TORN` is told when its query, key and value have these shapes and type."""

    def work(rank):
        attention = rank.attention(TORN)
        shape, dtype = shape_of(rank.rank, attention.schedules().tokens)
        tensors = [torch.zeros(*shape, heads, 4, dtype=dtype) for heads in (6, 2, 2)]
        try:
            attention(*tensors)
        except PlanError as problem:
            return str(problem)
        return None

    return run_ranks(5, work)


def test_ranks_with_the_same_kind_of_tensors_agree():
    assert told_with(lambda rank, tokens: ((tokens, 2), torch.float32)) == [None] * 5


def test_another_batch_on_one_rank_is_an_error_on_every_rank():
    told = told_with(lambda rank, tokens: ((tokens, 2 if rank == 3 else 1), torch.float32))
    assert len(set(told)) == 1
    assert "rank 2: batch 1 of torch.float32, rank 3: batch 2 of torch.float32, rank 4: batch 1" in told[0]
    assert told[0].endswith("use one micro-batch size")


def test_another_type_on_one_rank_is_an_error_on_every_rank():
    told = told_with(lambda rank, tokens: ((tokens, 1), torch.bfloat16 if rank == 0 else torch.float32))
    assert len(set(told)) == 1
    assert "(rank 0: batch 1 of torch.bfloat16, rank 1: batch 1 of torch.float32" in told[0]


def test_a_wrong_shape_on_one_rank_is_an_error_on_every_rank():
    told = told_with(lambda rank, tokens: ((tokens + (rank == 1), 1), torch.float32))
    assert told[1] == (
        "query has the shape [1, 1, 6, 4], but the plan says [0, 1, 6, 4] (tokens, batch, heads, head_dim); "
        "was the plan made for this model?"
    )
    assert len({message for rank, message in enumerate(told) if rank != 1}) == 1
    assert "rank 0: batch 1 of torch.float32, rank 1: not those of the plan, rank 2" in told[0]


@pytest.mark.parametrize("name", ["key", "value"])
def test_a_wrong_number_of_kv_heads_is_named_with_both_shapes(name):
    def work(rank):
        attention = rank.attention(TORN)
        heads = {"query": 6, "key": 2, "value": 2, name: 3}
        attention(*(torch.zeros(attention.schedules().tokens, 1, count, 4) for count in heads.values()))

    with pytest.raises(
        PlanError, match=rf"{name} has the shape \[9, 1, 3, 4\], but the plan says \[9, 1, 2, 4\]"
    ):
        run_ranks(5, work)


def test_a_kind_that_was_agreed_on_is_not_asked_for_again():
    def work(rank):
        attention = rank.attention(TORN)
        for batch in (1, 2, 1, 2):
            attention(*(torch.zeros(attention.schedules().tokens, batch, heads, 4) for heads in (6, 2, 2)))
        return len(attention._agreed)

    assert run_ranks(5, work) == [2] * 5
