"""Real training, ours and Megatron's communication together, goes by NCCL's rules."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_hexi.plan import Domain, Group, Member, Plan, Replica, Stage
from tests.megatron.conftest import job
from tests.megatron.option_cases import (
    DEEPER,
    DISTRIBUTED,
    FULL,
    OVERLAPPED,
    PIPELINE,
    SEQUENCE,
    VIRTUAL,
    Case,
    balanced,
)
from tests.megatron.posting import UNCHECKED, posted
from tests.megatron.test_interleaved_stages import CASES as INTERLEAVED
from tests.megatron.test_ministages import OFFLOADED
from tests.megatron.test_stages_experts import LOSSES
from tests.megatron.test_stages_experts import MODEL as EXPERTS_MODEL
from tests.megatron.test_stages_training import MODEL as STAGES_MODEL
from tests.megatron.test_unequal_replicas import BATCH, plan_of
from tests.megatron.test_uneven_training import SEQ_LENGTH, WORKLOAD
from tests.support.expert_layouts import expert_layout
from tests.support.nccl_rules import Call, replay

#: Plan, whether it has unequal replicas, and arguments.
CASES: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "sequence-parallel": ("groups", False, SEQUENCE),
    "pipeline": ("groups", False, PIPELINE),
    "distributed-optimizer": ("replicas", False, OVERLAPPED),
    "unequal-replicas": ("three-and-one", True, OVERLAPPED),
    "recompute": ("no-tokens", False, (*FULL, "uniform")),
    "virtual-pipeline": ("groups", False, (*DEEPER, *VIRTUAL)),
    "unequal-pipeline": ("two-one-one", True, PIPELINE),
    "unequal-tensor-pipeline": ("two-and-one", True, (*SEQUENCE, *PIPELINE, *DISTRIBUTED)),
    "experts": ("replicas", False, (*balanced("aux_loss"), "--expert-model-parallel-size", "2")),
}
QUICK = ("sequence-parallel", "pipeline", "unequal-replicas")


def run(forks, folder, plan: Plan, model_parallel: int, *words: str) -> list[list[Call]]:
    """What each rank of the job posts in two iterations."""
    ranks = plan.units * model_parallel
    args = [*job(words), "--train-iters", "2"]
    forks.train(folder, ranks=ranks, args=args, plan=plan, entry="tests.megatron.posting")
    return posted(folder, ranks)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]
)
def test_a_training_goes_by_nccls_rules(name, forks, tmp_path):
    plan_name, unequal, words = CASES[name]
    case = Case(job=words, replicas=plan_name.startswith("replicas"))
    plan = plan_of(plan_name, case.tensor_parallel) if unequal else case.plans()[plan_name]
    calls = run(forks, tmp_path, plan, case.model_parallel, *(BATCH if unequal else ()), *words)
    operations = replay(calls)
    kinds = Counter(call.collective or "batch" for one in calls for call in one)
    print(f"{len(calls)} ranks, {operations} operations: {dict(kinds)}")
    assert kinds["alltoall_base_"] + kinds["batch"] > 0, "the plan's own"
    assert kinds["allreduce_"] > 0, "Megatron's"


def test_the_plans_groups_are_connected_whatever_is_compared_or_sent(forks, tmp_path):
    """A rank without heads sends no messages: without the comparison of shapes it was in no call at all."""
    without_heads = Member((1,), 40, (6, 6))
    ends = Group(((0, 50), (77, SEQ_LENGTH)), (Member((0,), 60, (0, 6)), without_heads))
    middle = Group(((50, 77),), (Member((2,), 27, (0, 6)),))
    plan = Plan(WORKLOAD, (Replica((Stage((Domain((ends, middle)),)),)),))
    assert replay(run(forks, tmp_path, plan, 1, UNCHECKED)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["by-one-of-two-replicas", "by-some-of-three-replicas"])
def test_stages_that_offload_beside_others_go_by_nccls_rules(name, forks, tmp_path):
    """Sums of weights that only some holders have in host memory, among those of all others."""
    case = OFFLOADED[name]
    plan = case.plan(tmp_path)
    words = [*job((*STAGES_MODEL, *case.model)), *case.job, "--train-iters", "2"]
    forks.train(tmp_path, ranks=plan.ranks, args=words, plan=plan, entry="tests.megatron.posting")
    calls = posted(tmp_path, plan.ranks)
    assert replay(calls) > 0
    assert any(call.collective == "reduce_" for one in calls for call in one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["depths", "three-stages"])
def test_interleaved_ministages_go_by_nccls_rules(name, forks, tmp_path):
    """Both directions of the borders between two stages, each in a group of its own."""
    case = INTERLEAVED[name]
    plan = case.plan(tmp_path)
    words = [*job((*STAGES_MODEL, *case.model)), *case.job, "--train-iters", "2"]
    forks.train(tmp_path, ranks=plan.ranks, args=words, plan=plan, entry="tests.megatron.posting")
    calls = posted(tmp_path, plan.ranks)
    # Receives are posted one pass ahead in one group while the rank sends in another.
    assert replay(calls, one_queue=False) > 0
    groups = {call.communicator for one in calls for call in one if call.messages}
    borders = sum(2 * len(replica.stages) for replica in plan.replicas)
    assert len(groups) == borders


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["replicas", "slices", "nothing", "offload", "dealt"])
def test_uneven_experts_go_by_nccls_rules(layout, forks, tmp_path):
    """Tokens that travel between ranks with many, few and no experts, among sums of gradients behind them."""
    plan = expert_layout(layout, tmp_path)
    words = [*job((*EXPERTS_MODEL, *LOSSES["all"])), "--sequence-parallel", "--train-iters", "2"]
    words += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "5000"]
    forks.train(tmp_path, ranks=plan.ranks, args=words, plan=plan, entry="tests.megatron.posting")
    calls = posted(tmp_path, plan.ranks)
    # Borders, of dense stages too, receive one micro-batch ahead in one group while they send in another.
    assert replay(calls, one_queue=False) > 0
    assert any(call.collective == "alltoall_base_" for one in calls for call in one)
