"""A plan that does not fit the job, and options that a plan does not carry out: refused, with both values."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import torch

from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.megatron.plan_arguments import take_plan
from megatron_hexi.megatron.session import given_plan
from megatron_hexi.plan import (
    JobTerms,
    Plan,
    Replica,
    Share,
    Stage,
    Workload,
    proportional_domain,
    proportional_plan,
    write_plan,
)
from tests.megatron.test_uneven_training import MODEL, THREE_AND_ONE, WORKLOAD
from tests.support.fake_cuda import gpu

DATA = (*MODEL, "--train-iters", "1")


@pytest.fixture
def take(monkeypatch, tmp_path):
    """Take a plan as a job of four ranks with these arguments would."""

    def run(plan: Plan, *words: str, ranks: int = 4, device: str = "cpu"):
        from megatron.training.arguments import parse_args

        from megatron_hexi.megatron.arguments import add_hexi_arguments

        path = tmp_path / "plan.yaml"
        write_plan(plan, path)
        argv = ["pretrain_gpt.py", *DATA, "--hexi-plan", str(path), *words]
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        args = parse_args(add_hexi_arguments)
        given = {word for word in argv if word.startswith("--")}
        changed = take_plan(args, given, torch.device(device)).added
        return args, changed

    return run


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num-virtual-stages-per-pipeline-rank", "4"], "job.virtual_stages is 2, the command line has"),
        (
            ["--num-layers-per-virtual-pipeline-stage", "1"],
            "job.virtual_stages is 2, the command line has --num-layers-per-virtual-pipeline-stage",
        ),
        (
            ["--num-layers", "2"],
            "2 layers cannot be cut into 2 stages of 2 equal chunks; give a divisor of 1",
        ),
    ],
)
def test_chunks_that_contradict_the_command_line(take, words, says):
    plan = proportional_plan(replace(WORKLOAD, layers=None), [[[3.0, 1.0]]])
    plan = replace(plan, job=JobTerms(pipeline_parallel=2, virtual_stages=2))
    taken, changed = take(plan, "--num-layers", "4")
    assert taken.num_virtual_stages_per_pipeline_rank == 2
    assert "--num-virtual-stages-per-pipeline-rank 2" in changed
    with pytest.raises(HexiError, match=re.escape(says)):
        take(plan, "--num-layers", "4", *words)


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ((1, 0, 2), "rank 0 is in a stage that reads no data"),
        ((0, 2, 1), "rank 2, the job's last, logs the loss and does not compute it"),
    ],
)
def test_the_first_and_the_last_rank_of_a_job_have_places_that_megatron_asks_of_them(take, ranks, says):
    workload = replace(WORKLOAD, layers=3)
    domains = [proportional_domain(workload, [[1]], first_unit=rank) for rank in ranks]
    stages = tuple(Stage((domain,), layers=(layer, layer + 1)) for layer, domain in enumerate(domains))
    with pytest.raises(PlanError) as refused:
        take(Plan(workload, (Replica(stages),)), "--num-layers", "3", ranks=3)
    assert says in str(refused.value)


def test_a_fitting_plan_is_taken_and_sets_what_it_decides(take):
    args, changed = take(THREE_AND_ONE)
    assert args.context_parallel_size == 4
    assert args.calculate_per_token_loss
    assert not args.create_attention_mask_in_dataloader
    given = given_plan()
    assert given is not None
    assert (given.plan, given.kernel) == (THREE_AND_ONE, "aten-cpu")
    assert changed == [
        "--context-parallel-size 4",
        "--calculate-per-token-loss",
        "--no-create-attention-mask-in-dataloader",
    ]


def test_unequal_replicas_lie_in_one_context_parallel_group(take):
    args, changed = take(two_replicas(3, 1), "--global-batch-size", "8")
    assert args.context_parallel_size == 4
    assert "--context-parallel-size 4" in changed
    given = given_plan()
    assert given is not None
    assert given.shares == (Share(0, 3, 4), Share(3, 1, 4))


@pytest.mark.parametrize(
    ("shares", "batch"),
    [((3, 1), 8), ((2, 2), 8), ((None, None), None)],
    ids=["unequal", "equal", "unstated"],
)
def test_a_batch_that_only_the_plan_states_is_the_plans(shares, batch, take, monkeypatch):
    at = DATA.index("--global-batch-size")
    monkeypatch.setattr(f"{__name__}.DATA", (*DATA[:at], *DATA[at + 2 :]))
    args, changed = take(two_replicas(*shares))
    assert args.global_batch_size == batch
    assert (f"--global-batch-size {batch}" in changed) == (batch is not None)


def two_replicas(*shares: int | None) -> Plan:
    domains = [proportional_domain(WORKLOAD, [[1, 1]], first_unit=first) for first in (0, 2)]
    return Plan(
        WORKLOAD,
        tuple(Replica((Stage((domain,)),), share) for domain, share in zip(domains, shares, strict=True)),
    )


def workload(**changes) -> Plan:
    values = {"seq_length": 127, "heads": 6, "kv_heads": 2, "head_dim": 16, **changes}
    return proportional_plan(Workload(**values), [[[1, 1, 1, 1]]])


MISMATCHES = {
    "sequence length": (workload(seq_length=128), (), ("seq_length is 128", "--seq-length 127")),
    "heads": (workload(heads=12), (), ("heads is 12", "--num-attention-heads 6")),
    "KV heads": (workload(kv_heads=3), (), ("kv_heads is 3", "--num-query-groups 2")),
    "head size": (workload(head_dim=32), (), ("head_dim is 32", "--kv-channels 16")),
    "layers": (workload(layers=3), (), ("layers is 3", "--num-layers 2")),
    "hidden size": (workload(hidden_size=64), (), ("hidden_size is 64", "--hidden-size 96")),
    "tensor parallel": (
        workload(tensor_parallel=2),
        ("--tensor-model-parallel-size", "1"),
        ("tensor-parallel size is 2", "--tensor-model-parallel-size 1"),
    ),
    "mask": (workload(causal=False), (), ("causal is false", "a GPT is causal")),
    "context parallel size": (THREE_AND_ONE, ("--context-parallel-size", "2"), ("4 ranks", "leave it out")),
    "too few ranks": (proportional_plan(WORKLOAD, [[[1, 1]]]), (), ("2 ranks", "the job has 4")),
    "too many ranks": (proportional_plan(WORKLOAD, [[[1] * 8]]), (), ("8 ranks", "the job has 4")),
    "unequal replicas in another size": (
        proportional_plan(WORKLOAD, [[[1, 1, 1]], [[1]]]),
        ("--context-parallel-size", "3"),
        ("group of all 4 ranks", "--context-parallel-size 3", "leave it out"),
    ),
    "unequal replicas, a rank too few": (
        proportional_plan(WORKLOAD, [[[1, 1]], [[1]]]),
        (),
        ("replicas of 2 + 1 ranks", "need 3 ranks, but the job has 4"),
    ),
    "more shares than the batch": (
        two_replicas(3, 1),
        (),
        ("take 4 micro-batches of 2, 8 sequences", "--global-batch-size 4, --micro-batch-size 2"),
    ),
    "equal shares, another batch": (two_replicas(2, 2), (), ("8 sequences", "the global batch has 4")),
    "a batch that replicas cannot share": (
        proportional_plan(WORKLOAD, [[[1, 1]], [[1]], [[1]]]),
        (),
        ("3 replicas cannot share 2 micro-batches of 2 equally", "state each micro_batches"),
    ),
    "a batch that is no whole micro-batches": (
        two_replicas(1, None),
        ("--global-batch-size", "5"),
        ("4 sequences, the global batch has 5",),
    ),
    "a batch that grows": (
        two_replicas(1, 1),
        ("--step-batch-size-schedule", "0:2 1016:4"),
        ("the job has --step-batch-size-schedule", "leave it out"),
    ),
    "no micro-batch": (
        two_replicas(1, 1),
        ("--micro-batch-size", "0"),
        ("--micro-batch-size does not work with a number below 1", "give 1 or more"),
    ),
    "kernel": (THREE_AND_ONE, ("--hexi-kernel", "cudnn"), ("kernel cudnn", "use: aten-cpu")),
    "option": (THREE_AND_ONE, ("--qk-clip",), ("--qk-clip does not work", "train without --qk-clip")),
}


@pytest.mark.parametrize(("plan", "words", "fragments"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_is_refused_with_both_values(plan, words, fragments, take):
    with pytest.raises(HexiError) as refused:
        take(plan, *words)
    message = str(refused.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message
    assert given_plan() is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("kernel", "math"),
        ("record", "record.jsonl"),
        ("replan_interval", 10),
        ("cluster", "cluster.yaml"),
        ("batch_shares", True),
        ("metrics_interval", 1),
    ],
)
def test_options_of_a_plan_are_refused_without_one(take, option, value):
    args, _ = take(THREE_AND_ONE)
    args.hexi_plan, args.hexi_metrics_interval = None, None
    take_plan(args, set(), torch.device("cpu"))
    setattr(args, f"hexi_{option}", value)
    with pytest.raises(HexiError, match=f"--hexi-{option.replace('_', '-')}.*: .*; add --hexi-plan"):
        take_plan(args, set(), torch.device("cpu"))


def test_deterministic_mode_is_honoured_by_the_choice_of_a_kernel(take):
    """Megatron tells torch of it only after the plan is taken."""
    try:
        with gpu((9, 0)):
            take(THREE_AND_ONE, "--deterministic-mode", "--bf16", device="cuda")
            given = given_plan()
            assert given is not None
            assert given.kernel == "aten-flash"
            with pytest.raises(HexiError, match="kernel cudnn: its backward is not deterministic; for"):
                take(
                    *(THREE_AND_ONE, "--deterministic-mode", "--bf16", "--hexi-kernel", "cudnn"),
                    device="cuda",
                )
    finally:
        torch.use_deterministic_algorithms(False)


def test_every_rank_says_what_is_wrong_and_ends_with_exit_code_2(forks, tmp_path):
    (tmp_path / "plan.yaml").write_text("version: 2\nworkload: {seq_length: 0}\n")
    outcome = forks.launch(tmp_path, ranks=2, args=[*DATA, "--hexi-plan", "plan.yaml"], timeout=250)
    assert outcome.codes == [2, 2]
    for rank, output in enumerate(outcome.output):
        [line] = [line for line in output.splitlines() if line.startswith("hexi: error:")]
        assert line == (
            f"hexi: error: [rank {rank}] plan.yaml:2: workload.seq_length = 0 is too small; the least is 1"
        )
        assert "Traceback" not in output


def test_what_megatron_refuses_of_a_model_is_one_line(forks, tmp_path):
    """Its configuration is checked after its arguments, and first of all that is built of them."""
    write_plan(proportional_plan(WORKLOAD, [[[1]]]), tmp_path / "plan.yaml")
    words = [*DATA, "--hexi-plan", "plan.yaml", "--no-rope-freq", "[1]*3"]
    outcome = forks.launch(tmp_path, ranks=1, args=words, timeout=250)
    assert outcome.codes == [2]
    [output] = outcome.output
    [line] = [line for line in output.splitlines() if line.startswith("hexi: error:")]
    assert line == (
        "hexi: error: [rank 0] Megatron refuses the arguments: Length of no_rope list (3) must match the "
        "number of layers (2); correct them"
    )
    assert "Traceback" not in output


@pytest.mark.parametrize("other", [[[[2, 1]]], [[[1], [1]]], None], ids=["shards", "groups", "no plan"])
def test_a_rank_with_another_plan_is_named_by_every_rank(other, forks, tmp_path):
    write_plan(proportional_plan(WORKLOAD, [[[3, 1]]]), tmp_path / "plan.yaml")
    if other is not None:
        write_plan(proportional_plan(WORKLOAD, other), tmp_path / "elsewhere.yaml")
    odd = "no plan" if other is None else "plan"
    words = ["1", odd, *DATA, "--hexi-plan", "plan.yaml"]
    outcome = forks.launch(tmp_path, ranks=2, args=words, entry="tests.megatron.odd_rank", timeout=250)
    assert outcome.codes == [2, 2]
    for output in outcome.output:
        [line] = [line for line in output.splitlines() if line.startswith("hexi: error:")]
        assert "ranks have different plans: rank 1 on" in line
        assert ("has no plan" if other is None else "has elsewhere.yaml") in line
