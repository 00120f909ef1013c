"""The job that a file of arguments states, and what it leaves open."""

import json
import re
from dataclasses import replace

import pytest

from benchmarks.one_gpu.cells import UNFUSED
from benchmarks.one_gpu.ranks import PLAIN
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Job, job_of_plan, job_terms, read_terms
from megatron_hexi.plan import proportional_plan, validate_plan
from tests.support.costs import TINY
from tests.unit.models.test_models import LLAMA3_8B, LLAMA3_8B_ARGUMENTS

JOB_ARGUMENTS = LLAMA3_8B_ARGUMENTS + (
    "--seq-length 8192 --micro-batch-size 2 --global-batch-size=16 --tensor-model-parallel-size 4 "
    "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --sequence-parallel"
)


def terms_of(tmp_path, text):
    (tmp_path / "job.args").write_text(text)
    terms = read_terms(tmp_path / "job.args")
    assert terms is not None
    return terms


def test_a_file_of_arguments_states_the_job(tmp_path):
    terms = terms_of(tmp_path, JOB_ARGUMENTS)
    assert terms.fields == {
        "seq_length": 8192,
        "micro_batch_size": 2,
        "global_batch_size": 16,
        "tensor_parallel": 4,
        "pipeline_parallel": 2,
        "recompute": "full",
        "precision": "bf16",
        "distributed_optimizer": True,
        "overlap_gradients": True,
        "sequence_parallel": True,
    }
    assert terms.free == ("--lr", "--use-mcore-models")


def test_what_a_job_leaves_out_is_megatron_s_default(tmp_path):
    text = LLAMA3_8B_ARGUMENTS.replace("--bf16", "") + "--seq-length 8192"
    assert terms_of(tmp_path, text).fields == {
        "seq_length": 8192,
        "precision": "fp32",
        "distributed_optimizer": False,
        "overlap_gradients": False,
        "sequence_parallel": False,
    }


def test_what_a_model_leaves_out_stays_open(tmp_path):
    assert terms_of(tmp_path, LLAMA3_8B_ARGUMENTS).fields == {"precision": "bf16"}
    assert read_terms("gpt-7b") is None
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    assert read_terms(tmp_path) is None


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--recompute-activations", "recompute", "selective"),
        ("--recompute-granularity=selective", "recompute", "selective"),
        (
            "--recompute-granularity selective --recompute-modules moe layernorm",
            "recompute",
            ("moe", "layernorm"),
        ),
        (
            "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-sq-dtype bf16",
            "state_bytes",
            4 + 4 + 2,
        ),
        ("--bf16 --grad-reduce-in-bf16", "gradient_bytes", 2),
        ("--fp16", "precision", "fp16"),
        ("--overlap-grad-reduce", "overlap_gradients", True),
        ("--overlap-grad-reduce --use-distributed-optimizer", "overlap_gradients", False),
    ],
)
def test_terms_in_megatron_s_spellings(tmp_path, flags, field, value):
    text = LLAMA3_8B_ARGUMENTS.replace("--bf16", "") + f"--seq-length 8192 {flags}"
    assert terms_of(tmp_path, text).fields[field] == value


@pytest.mark.parametrize(
    ("flags", "unfused"),
    [
        ((), None),
        (PLAIN, UNFUSED["local"]),
        (("--transformer-impl", "local"), None),  # apex adds gradients, and has norms and an optimizer
        (("--no-gradient-accumulation-fusion",), ("permutation", "experts", "loss", "gradients")),
        (
            ("--no-rope-fusion", "--no-bias-swiglu-fusion"),
            ("rotary", "activation", "permutation", "experts", "loss"),
        ),
        (("--disable-jit-fuser", "--cross-entropy-loss-fusion"), ("activation", "permutation", "experts")),
        (("--activation-func-clamp-value", "7"), ("activation", "permutation", "experts", "loss")),
        (("--moe-permute-fusion", "--moe-grouped-gemm"), ("loss",)),
    ],
)
def test_flags_say_what_is_not_fused(tmp_path, flags, unfused):
    assert terms_of(tmp_path, f"{LLAMA3_8B_ARGUMENTS} {' '.join(flags)}").fields.get("unfused") == unfused


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--fp16", "--fp16 does not work with --bf16: Megatron refuses it; leave one of them out"),
        ("--recompute-granularity some", "invalid choice: 'some'"),
        ("--seq-length 8K", "invalid int value: '8K'; correct that flag"),
    ],
)
def test_broken_terms_are_one_clear_error(tmp_path, flags, said):
    with pytest.raises(HexiError, match=re.escape(said)) as problem:
        terms_of(tmp_path, LLAMA3_8B_ARGUMENTS + flags)
    assert str(tmp_path / "job.args") in str(problem.value)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_plan_records_the_terms_that_were_stated_and_gives_them_back(tensor_parallel):
    stated = {
        "seq_length": 128,
        "tensor_parallel": tensor_parallel,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "pipeline_parallel": 2,
        "recompute": "full",
        "precision": "fp16",
        "distributed_optimizer": False,
        "overlap_gradients": False,
        "sequence_parallel": False,
    }
    job = Job(TINY, **stated)
    plan = proportional_plan(job.workload(), [[[1, 1]]])
    plan = replace(plan, job=job_terms(stated, plan))
    validate_plan(plan)
    assert plan.job.sequence_parallel is (None if tensor_parallel == 1 else False)
    found = job_of_plan(plan, TINY)
    assert replace(found, sequence_parallel=False) == job
    assert job_of_plan(plan, TINY, recompute="none", global_batch_size=8) == replace(
        found, recompute="none", global_batch_size=8
    )
