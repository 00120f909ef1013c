"""A file of Megatron's arguments as a command's job: what of it counts, and what is refused."""

from pathlib import Path

import pytest
import yaml

from megatron_hexi.cli.options import NewJob
from megatron_hexi.plan import read_plan
from tests.unit.cli.conftest import ARGUMENTS, JOB


def test_a_file_of_arguments_is_the_job(hexi, asked):
    Path("job.args").write_text(ARGUMENTS)
    done = hexi("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml")
    assert done.code == 0
    job = asked[0][0].job
    assert asked[0][0].fixed == {"micro_batch_size", "recompute"}
    assert (job.seq_length, job.micro_batch_size, job.global_batch_size) == (4096, 2, 4)
    assert (job.precision, job.recompute, job.distributed_optimizer) == ("bf16", "selective", False)
    said, left, unread, *_, lacks = done.err.splitlines()
    assert said.startswith("note: job.args says ")
    for words in ("--seq-length 4096", "--recompute-granularity selective"):
        assert words in said
    assert left == (
        "note: job.args leaves Megatron's defaults: no --use-distributed-optimizer, which saves memory with "
        "several replicas, no --overlap-grad-reduce with --overlap-param-gather, which saves time there, no "
        "--sequence-parallel, which saves memory with tensor parallelism"
    )
    assert lacks == "note: not given: --save FOLDER (nothing is saved without)"
    assert unread == "note: job.args: plans do not depend on --lr, --train-iters"
    terms = read_plan("plan.yaml").job
    assert (terms.micro_batch_size, terms.global_batch_size, terms.recompute) == (2, 4, "selective")
    assert (terms.precision, terms.distributed_optimizer, terms.sequence_parallel) == ("bf16", False, None)


@pytest.mark.parametrize(
    ("option", "refused"),
    [
        ("--sft --no-rope-fusion --micro-batch-size 1", ("unequal_replicas", "unequal_stages")),
        ("--optimizer muon", ("unequal_stages",)),
        ("--dataloader-inter-document-masking --no-rope-fusion --micro-batch-size 1", ("unequal_stages",)),
        ("--dataloader-type external", ("unequal_replicas", "unequal_stages")),
    ],
)
def test_an_option_that_leaves_some_plans_restricts_the_search(hexi, asked, option, refused):
    Path("job.args").write_text(f"{ARGUMENTS}\n{option}")
    words = ("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml")
    done = hexi(*words)
    assert asked[0][0].rules.refused == refused
    note = f"note: job.args: {option.split()[0]} trains with "
    assert note + " and ".join(f"--no-{name.replace('_', '-')}" for name in refused) in done.err
    contrary = hexi(*words, f"--{refused[-1].replace('_', '-')}")
    assert contrary.code == 2
    assert f"--unequal-stages: does not work with {option.split()[0]} of job.args" in contrary.err


def test_a_plan_for_adapters(hexi):
    done = hexi("plan", "cluster.yaml", *JOB, "--lora-rank", "16", "-o", "plan.yaml")
    assert done.code == 0, done.err
    assert "note: no lines that start the training: plan.yaml: adapters of rank 16: Mega" in done.err
    assert read_plan("plan.yaml").job.lora_rank == 16
    trained = hexi("plan", "cluster.yaml", *JOB, "-o", "whole.yaml")
    assert trained.code == 0
    assert read_plan("whole.yaml").job.lora_rank is None
    names = ("plan.yaml", "whole.yaml")
    adapted, whole = (yaml.safe_load(Path(name).read_text())["estimate"] for name in names)
    assert adapted["iteration_s"] < whole["iteration_s"]
    assert max(adapted["memory_gib"]) < max(whole["memory_gib"])
    launched = hexi("launch", "plan.yaml", "--cluster", "cluster.yaml")
    assert (launched.code, "python -m megatron_hexi.run" in launched.err) == (2, True)
    other = hexi("simulate", "plan.yaml", "--cluster", "cluster.yaml", "--lora-rank", "8")
    assert "job.lora_rank is 16, the command line has --lora-rank 8" in other.err


def test_experts_balanced_by_a_running_mean_are_planned_without_ministages(hexi, asked):
    experts = "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type"
    for kind, refused in (("global_aux_loss", ("ministages",)), ("aux_loss", ())):
        Path("job.args").write_text(f"{ARGUMENTS}\n{experts} {kind}")
        said = hexi("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml").err
        assert asked[-1][0].rules.refused == refused
        assert ("data_parallel" in asked[-1][0].fixed) is bool(refused)
        two = hexi(
            "plan", "cluster.yaml", "--model", "job.args", "--data-parallel-size", "2", "-o", "plan.yaml"
        )
        assert ("global_aux_loss of job.args trains with one replica only" in two.err) is bool(refused)
        note = f"--moe-router-load-balancing-type {kind} trains with --no-ministages only"
        assert (note in said) is bool(refused)


def test_the_imbalance_of_experts_is_a_term_of_the_job(hexi, asked):
    given = NewJob(model="mixtral-8x7b", seq_length=4096, expert_imbalance=0.6)
    assert given.request().job.expert_imbalance == 0.6
    assert NewJob(model="mixtral-8x7b", seq_length=4096).request().job.expert_imbalance == 0.2
    refused = hexi("plan", "cluster.yaml", *JOB, "--expert-imbalance", "0.6", "-o", "plan.yaml")
    assert (refused.code, refused.out) == (2, "")
    assert "--expert-imbalance 0.6: gpt-3b has no experts; leave the option out" in refused.err


def test_a_context_parallel_size_in_a_file_is_said_to_be_chosen_anew(hexi, asked):
    Path("job.args").write_text(f"{ARGUMENTS}\n--context-parallel-size 2")
    words = ("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml")
    note = (
        "note: job.args: --context-parallel-size 2 is ignored, the planner chooses it; give it on the "
        "command line"
    )
    assert note in hexi(*words).err
    assert note not in hexi(*words, "--context-parallel-size", 4).err
    assert [request.context_parallel for request, *_ in asked] == [None, 4]


def test_chunks_in_a_file_are_said_to_be_chosen_anew(hexi, asked):
    stages = "--num-layers 4 --pipeline-model-parallel-size 2"
    Path("job.args").write_text(f"{ARGUMENTS}\n{stages} --num-layers-per-virtual-pipeline-stage 1")
    words = ("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml")
    flag = "--num-virtual-stages-per-pipeline-rank"
    note = (
        "note: job.args: --num-layers-per-virtual-pipeline-stage 1 is ignored, the planner chooses; "
        f"give {flag} on the"
    )
    assert note in hexi(*words).err
    assert note not in hexi(*words, flag, 2).err
    assert [request.virtual_stages for request, *_ in asked] == [None, 2]


def test_an_expert_parallel_size_stays_and_the_command_line_goes_before_the_file(hexi, asked):
    experts = "--num-experts 4 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
    Path("job.args").write_text(f"{ARGUMENTS}\n{experts}")
    words = ("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml")
    assert "note: job.args says --expert-model-parallel-size 2" in hexi(*words).err
    hexi(*words, "--expert-model-parallel-size", 4)
    assert [request.expert_parallel for request, *_ in asked] == [2, 4]


@pytest.mark.parametrize("option", ["--use-kitchen-attention", "--fp4-format e2m1"])
def test_what_training_refuses_is_refused_before_anything_is_planned(hexi, asked, option):
    Path("job.args").write_text(f"{ARGUMENTS}{option}")
    result = hexi("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml")
    assert result.code == 2
    assert result.err.startswith(f"hexi: error: job.args, line 5: {option.split()[0]} does not work with ")
    assert asked == []


def test_what_stages_refuse_is_refused_with_experts(hexi, asked):
    """Plans say where experts are in stages with layers, whose weights have owners."""
    Path("job.args").write_text(f"{ARGUMENTS}--num-experts 8 --optimizer muon")
    result = hexi("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml")
    assert result.code == 2
    assert "job.args, line 5: --optimizer does not work with stages" in result.err
    assert asked == []


def test_what_only_chooses_speed_is_replaced_by_a_note(hexi, asked):
    Path("job.args").write_text(f"{ARGUMENTS}--attention-backend fused --cuda-graph-impl local")
    said = hexi("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml").err
    assert "note: job.args: replaced by the plan: --attention-backend fused: the plan's kernels" in said
    assert "note: job.args: replaced by the plan: --cuda-graph-impl local: kernels are launched" in said
    assert len(asked) == 1


def test_the_command_line_stands_before_the_file_of_arguments(hexi, asked):
    Path("job.args").write_text(ARGUMENTS)
    words = ("--seq-length", 8192, "--recompute-granularity", "none", "--use-distributed-optimizer")
    done = hexi("compare", "cluster.yaml", "--model", "job.args", *words)
    assert done.code == 0
    job = asked[0][0].job
    assert (job.seq_length, job.recompute, job.distributed_optimizer) == (8192, "none", True)
    assert (job.micro_batch_size, job.precision, job.overlap_gradients) == (2, "bf16", False)
    said = done.err.splitlines()[0]
    assert not {"--seq-length", "--recompute-granularity", "--no-use-distributed-optimizer"} & set(
        said.split()
    )


def test_a_length_that_nobody_states_is_asked_for(hexi, asked):
    Path("model.args").write_text(ARGUMENTS.replace("--seq-length 4096", ""))
    for model in ("model.args", "gpt-3b"):
        done = hexi("plan", "cluster.yaml", "--model", model, "-o", "plan.yaml")
        assert (done.code, asked) == (2, [])
        assert f"--seq-length is missing, and {model} does not say it; add --seq-length N" in done.err
