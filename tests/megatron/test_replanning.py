"""Plans swapped between two iterations of real training: the same losses as without a swap."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hexi.plan import (
    Domain,
    Group,
    Member,
    Plan,
    Replica,
    Stage,
    dump_plan,
    plan_digest,
    plan_from_yaml,
)
from megatron_hexi.record import Record, read_record
from megatron_hexi.yaml_file import yaml_from_text
from tests.megatron.conftest import job, skip_what_is_not_there
from tests.megatron.forked import Trainer
from tests.megatron.launch import REPOSITORY, TrainingLog
from tests.megatron.option_cases import FURTHER_TOKENS, NORMED_LATENT, ONE_EACH, PACKED, SINKS, WINDOW
from tests.megatron.test_stages_states import CONVOLUTION, GROUP_BEHIND_UNIT, MAMBA_PATTERN, MIXED, QWEN
from tests.megatron.test_stages_training import DENSE_HEADER
from tests.megatron.test_stages_training import MODEL as IN_SIX
from tests.megatron.test_unequal_replicas import plan_of
from tests.megatron.test_uneven_training import MODEL, SEQ_LENGTH, THREE_AND_ONE, WORKLOAD, one_domain
from tests.support.expert_layouts import EXPERTS
from tests.support.expert_layouts import HEADER as EXPERTS_HEADER

CLUSTER = REPOSITORY / "scripts/testbed/four-equal.yaml"


def three_and_one(first: int, tokens: tuple[int, int, int], cuts: tuple[int, int]) -> Plan:
    """`THREE_AND_ONE`'s groups with other segments, tokens and heads."""
    last = SEQ_LENGTH - sum(tokens)
    segments = ((0, first), (first + last, SEQ_LENGTH))
    heads = ((0, cuts[0]), cuts, (cuts[1], 6))
    members = tuple(Member((i,), t, h) for i, (t, h) in enumerate(zip(tokens, heads, strict=True)))
    groups = Group(segments, members), Group(((first, first + last),), (Member((3,), last, (0, 6)),))
    return Plan(WORKLOAD, (Replica((Stage((Domain(groups),)),)),))


#: As the planner would have it on equal ranks, but for the heads, of which there are six.
STEADY = one_domain((32, (0, 2)), (32, (2, 3)), (32, (3, 5)), (31, (5, 6)))
OTHERS = (three_and_one(20, (7, 60, 30), (1, 3)), three_and_one(11, (40, 0, 2), (0, 6)), THREE_AND_ONE)


def swapping(
    forks: Trainer, folder: Path, plan: Plan, others: tuple[Plan, ...], iterations: int, *args: str
) -> tuple[TrainingLog, TrainingLog, Record]:
    """The training under one plan, the one that swaps to the others in turn, and what that recorded."""
    words = training_words(iterations, args)
    still = forks.train(folder, ranks=plan.ranks, args=words, plan=plan, timeout=600)
    swapped = swap(forks, folder, plan, others, iterations, *args)
    return still, swapped, read_record(folder / "record.jsonl")


def training_words(iterations: int, args: tuple[str, ...]) -> tuple[str, ...]:
    return (*job(args), "--train-iters", str(iterations), "--lr-decay-iters", "1000")


def swap(
    forks: Trainer, folder: Path, plan: Plan, others: tuple[Plan, ...], iterations: int, *args: str
) -> TrainingLog:
    plans = folder / "plans.json"
    plans.write_text(json.dumps([dump_plan(other) for other in others]))
    replan = ("--hexi-replan-interval", "2", "--hexi-cluster", str(CLUSTER))
    record = ("--hexi-record", str(folder / "record.jsonl"), "--log-interval", "5")
    return forks.train(
        folder,
        ranks=plan.ranks,
        args=[plans, *training_words(iterations, args), *replan, *record],
        plan=plan,
        entry="tests.megatron.swapping",
        timeout=600,
    )


def milliseconds(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"swapped to plan \w+ in ([\d.]+) ms", output)]


@pytest.mark.parametrize(
    ("plan", "others", "args"),
    [
        pytest.param(THREE_AND_ONE, OTHERS, (), id="groups"),
        pytest.param(
            one_domain((63, (0, 3)), (64, (3, 6))),
            (one_domain((100, (0, 1)), (27, (1, 6))), one_domain((1, (0, 5)), (126, (5, 6)))),
            ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
            id="distributed-optimizer",
            marks=pytest.mark.slow,  # what is swapped is the same
        ),
    ],
)
def test_losses_are_those_without_swaps(forks, tmp_path, plan, others, args):
    still, swapped, record = swapping(forks, tmp_path, plan, others, 20, *args)
    assert swapped.losses == pytest.approx(still.losses, rel=1e-5)
    assert swapped.grad_norms == pytest.approx(still.grad_norms, rel=1e-4)
    assert len(milliseconds(swapped.output)) == 3
    digests = [plan_digest(one) for one in (plan, *others, *others)]
    assert [leg.start.digest for leg in record.legs] == digests[:4]
    assert [leg.start.swapped_at for leg in record.legs] == [None, 6, 12, 18]
    told = [i for leg in record.legs for interval in leg.intervals for i in interval.iterations]
    assert told == list(range(1, 21))


def of_latent_heads(plan: Plan) -> Plan:
    """The plan for a model with `NORMED_LATENT`."""
    return replace(plan, workload=replace(plan.workload, kv_heads=6, value_dim=24))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["windows-sinks", "latent", "documents"])
def test_kinds_of_models_keep_their_losses_over_swaps(forks, tmp_path, documents, kind):
    args = {
        "windows-sinks": (*WINDOW, "--window-attn-skip-freq", "2", *SINKS),
        "latent": NORMED_LATENT,
        "documents": (*ONE_EACH, *documents, *PACKED),
    }[kind]
    plan, *others = (of_latent_heads(p) if kind == "latent" else p for p in (THREE_AND_ONE, *OTHERS))
    still, swapped, _ = swapping(forks, tmp_path, plan, tuple(others), 20, *args)
    assert swapped.losses == pytest.approx(still.losses, rel=1e-5)
    assert swapped.grad_norms == pytest.approx(still.grad_norms, rel=1e-4)
    assert len(milliseconds(swapped.output)) == 3


def with_shares(*shares: int) -> Plan:
    plan = plan_of("three-and-one")
    replicas = [replace(one, micro_batches=n) for one, n in zip(plan.replicas, shares, strict=True)]
    return replace(plan, replicas=tuple(replicas))


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_shares_of_the_batch_move_between_replicas_and_no_sample_is_lost(forks, tmp_path, workers):
    """Loaders with workers have drawn ahead of a swap."""
    plan, others = with_shares(3, 1), (with_shares(1, 3), with_shares(2, 2))
    args = ("--micro-batch-size", "1", "--global-batch-size", "4", "--num-workers", workers)
    still, swapped, record = swapping(forks, tmp_path, plan, others, 17 if workers == "0" else 40, *args)
    assert swapped.losses == pytest.approx(still.losses, rel=1e-5)
    assert len(milliseconds(swapped.output)) >= 2
    digests = [plan_digest(one) for one in (plan, *others)]
    assert [leg.start.digest for leg in record.legs][:3] == digests


def stages(samples: int, tokens: int, heads: int, share: int, more: str = "") -> Plan:
    """A replica whose first stage shares samples and whose second shares sequences, beside one of a unit."""
    text = f"""version: 2
workload: {{seq_length: 127, heads: 6, kv_heads: 2, head_dim: 16, layers: 4}}
job: {{micro_batch_size: 3}}
replicas:
- micro_batches: {share}
  stages:
  - layers: [0, 2]{more}
    domains: [{{ranks: [0], samples: {samples}}}, {{ranks: [1], samples: {3 - samples}, state: 2}}]
  - layers: [2, 4]{more}
    domains:
    - groups:
      - segments: [[0, 127]]
        members:
        - {{ranks: [2], tokens: {tokens}, heads: [0, {heads}]}}
        - {{ranks: [3], tokens: {127 - tokens}, heads: [{heads}, 6]}}
- micro_batches: {5 - share}
  stages: [{{layers: [0, 4], domains: [{{ranks: [4, 5]}}]}}]
"""
    return plan_from_yaml(yaml_from_text(Path("plan.yaml"), text))


#: Heads of prediction follow two ranks that share tokens and heads.
HEADS = """\
- stages:
  - {layers: [0, 4], domains: [{ranks: [0, 1]}]}
  - layers: [4, 6]
    domains:
    - groups:
      - segments: [[0, 127]]
        members: [{ranks: [2], tokens: 70, heads: [0, 4]}, {ranks: [3], tokens: 57, heads: [4, 6]}]
"""
#: Delta nets and experts. Each token goes to all of these, as ties are decided by rounding.
ALL_EXPERTS = tuple(
    str(EXPERTS) if word == "2" and QWEN[i - 1] == "--moe-router-topk" else word
    for i, word in enumerate(QWEN)
)
MINISTAGES = "\n    ministages: 2"
HOST = f"{MINISTAGES}\n    offload: [parameters, optimizer, activations]"
IN_STAGES = ("--num-layers", "4", "--micro-batch-size", "3", "--global-batch-size", "15")


def of_layers(kind: str, tokens: int, heads: int) -> Plan:
    """Return the plan for a kind of layers, with these tokens and heads on the first of two ranks."""
    text, shared = {
        "mamba": (GROUP_BEHIND_UNIT, (90, 4)),
        "convolution": (GROUP_BEHIND_UNIT, (90, 4)),
        "experts": (MIXED, (80, 4)),
        "prediction": (HEADS, (70, 4)),
    }[kind]
    for old, new in (
        (f"tokens: {shared[0]}", f"tokens: {tokens}"),
        (f"tokens: {127 - shared[0]}", f"tokens: {127 - tokens}"),
        (f"heads: [0, {shared[1]}]", f"heads: [0, {heads}]"),
        (f"heads: [{shared[1]}, 6]", f"heads: [{heads}, 6]"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    header = EXPERTS_HEADER if kind == "experts" else DENSE_HEADER
    return plan_from_yaml(yaml_from_text(Path("plan.yaml"), header + text))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mamba", "convolution", "experts", "prediction"])
def test_kinds_of_layers_keep_their_losses_in_stages(forks, tmp_path, kind):
    """Heads of layers with a state move by the plan's heads of attention; experts stay where they are."""
    args = {
        "mamba": MAMBA_PATTERN,
        "convolution": CONVOLUTION,
        "experts": (*ALL_EXPERTS, "--sequence-parallel"),
        "prediction": FURTHER_TOKENS,
    }[kind]
    args = (*IN_SIX, *args)
    skip_what_is_not_there(args)
    first, *others = (of_layers(kind, *shares) for shares in ((90, 4), (20, 1), (127, 5)))
    still, swapped, record = swapping(forks, tmp_path, first, tuple(others), 25, *args)
    assert swapped.losses == pytest.approx(still.losses, rel=1e-5)
    assert swapped.grad_norms == pytest.approx(still.grad_norms, rel=1e-4)
    assert len(milliseconds(swapped.output)) >= 2
    assert [leg.start.digest for leg in record.legs][:3] == [plan_digest(one) for one in (first, *others)]


@pytest.mark.parametrize(
    ("more", "args"),
    [
        pytest.param("", (), id="layers"),
        pytest.param("", ("--num-workers", "2"), marks=pytest.mark.slow, id="workers"),
        pytest.param("", (*WINDOW, *SINKS), marks=pytest.mark.slow, id="windows-sinks"),
        pytest.param(MINISTAGES, (), marks=pytest.mark.slow, id="ministages"),
        pytest.param(HOST, ("--sequence-parallel",), marks=pytest.mark.slow, id="offload"),
    ],
)
def test_tokens_samples_and_micro_batches_move_in_stages(forks, tmp_path, more, args):
    plan, others = stages(2, 70, 4, 3, more), (stages(1, 13, 2, 3, more), stages(2, 127, 1, 1, more))
    still, swapped, record = swapping(forks, tmp_path, plan, others, 16, *IN_STAGES, *args)
    assert swapped.losses == pytest.approx(still.losses, rel=1e-5)
    assert swapped.grad_norms == pytest.approx(still.grad_norms, rel=1e-4)
    assert len(milliseconds(swapped.output)) >= 2
    assert [leg.start.digest for leg in record.legs][:3] == [plan_digest(one) for one in (plan, *others)]


def test_layers_do_not_move(forks, tmp_path):
    plan = stages(2, 70, 4, 3)
    replica = plan.replicas[0]
    moved = tuple(
        replace(stage, layers=layers) for stage, layers in zip(replica.stages, ((0, 1), (1, 4)), strict=True)
    )
    other = replace(plan, replicas=(replace(replica, stages=moved), plan.replicas[1]))
    with pytest.raises(AssertionError, match="has other groups or another workload"):
        swap(forks, tmp_path, plan, (other,), 8, *IN_STAGES)


def test_a_rank_with_another_plan_stops_the_job_by_name(forks, tmp_path):
    wrong = replace(OTHERS[0], replicas=one_domain((63, (0, 3)), (64, (3, 6))).replicas)
    with pytest.raises(AssertionError, match="has other groups or another workload"):
        swap(forks, tmp_path, THREE_AND_ONE, (wrong,), 8)


def two_stages() -> Plan:
    """The first replica of `stages`, alone."""
    plan = stages(2, 70, 4, 3)
    replicas = (replace(plan.replicas[0], micro_batches=5),)
    return replace(plan, replicas=replicas, workload=replace(plan.workload, tensor_parallel=1))


@pytest.mark.parametrize(
    ("plan", "args"),
    [
        pytest.param(THREE_AND_ONE, (), id="groups"),
        pytest.param(two_stages(), IN_STAGES, marks=pytest.mark.slow, id="stages"),
    ],
)
def test_the_planner_is_asked_and_says_its_numbers(forks, tmp_path, plan, args):
    replan = ("--hexi-replan-interval", "3", "--hexi-cluster", str(CLUSTER))
    words = (*MODEL, *args, "--train-iters", "24", "--log-interval", "24")
    still = forks.train(tmp_path, ranks=4, args=words, plan=plan)
    # Its iterations are slow, so that the planner answers before the last one.
    paced = "tests.megatron.paced"
    led = forks.train(tmp_path, ranks=4, args=(*words, *replan), plan=plan, entry=paced)
    assert led.losses == pytest.approx(still.losses, rel=1e-5)
    decisions = re.findall(r"hexi: replan: iteration (\d+): .*gain (-?[\d.]+)%", led.output)
    assert decisions


def test_a_plan_for_another_cluster_stops_the_job(forks, tmp_path):
    plan = one_domain((63, (0, 3)), (64, (3, 6)))
    replan = ("--hexi-replan-interval", "2", "--hexi-cluster", str(CLUSTER))
    words = (*MODEL, "--train-iters", "100000", *replan)
    with pytest.raises(AssertionError, match="the plan is for 2"):
        forks.train(tmp_path, ranks=2, args=words, plan=plan)


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_a_steady_cluster_keeps_its_plan(forks, tmp_path):
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        pytest.skip("other programs take the cores, so ranks are not steady")
    replan = ("--hexi-replan-interval", "10", "--hexi-cluster", str(CLUSTER))
    words = (*MODEL, "--train-iters", "200", "--lr-decay-iters", "1000", "--log-interval", "50")
    led = forks.train(tmp_path, ranks=4, args=(*words, *replan), plan=STEADY, timeout=1200)
    decisions = re.findall(r"hexi: replan: iteration \d+: keeps its plan", led.output)
    assert len(decisions) >= 10
    assert not milliseconds(led.output), re.findall(r"hexi: replan: .*", led.output)


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_memory_does_not_grow_over_a_hundred_swaps(forks, tmp_path):
    # Slowly, so that the loss does not come near zero, where any noise is a jump that ends all swaps.
    slowly = ("--lr", "1e-5", "--min-lr", "1e-5")
    still, swapped, record = swapping(forks, tmp_path, THREE_AND_ONE, OTHERS, 620, *slowly)
    assert swapped.losses == pytest.approx(still.losses, rel=1e-4)
    times = milliseconds(swapped.output)
    assert len(times) >= 100
    assert sorted(times)[len(times) // 2] < 100
    peaks = [max(interval.ranks.peak_bytes) for leg in record.legs for interval in leg.intervals]
    assert peaks[-1] < 1.02 * peaks[len(peaks) // 5]
