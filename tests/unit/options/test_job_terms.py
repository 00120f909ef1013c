"""A plan's terms against a job: the padded vocabulary, which all plans of a job share, and adapters."""

from __future__ import annotations

import math
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_hexi.errors import PlanError
from megatron_hexi.options.job_terms import keep_vocabulary, set_job_terms, vocabulary_step
from megatron_hexi.plan import (
    Domain,
    Group,
    JobTerms,
    Member,
    Plan,
    Replica,
    Stage,
    Workload,
    proportional_plan,
)


def plan_of(widths: list[int], repeated: bool) -> Plan:
    """A stage of a unit of each width; or one unit of the first of them, which the job repeats."""
    widths = widths[:1] if repeated else widths
    workload = Workload(64, 8, 8, 16, layers=len(widths), tensor_parallel=widths[0] if repeated else 0)
    stages, first = [], 0
    for layer, width in enumerate(widths):
        ranks = tuple(range(first, first + width))
        group = Group(((0, 64),), (Member(ranks, 64, (0, 8 // width)),))
        stages.append(Stage((Domain((group,)),), layers=None if repeated else (layer, layer + 1)))
        first += width
    return Plan(workload, (Replica(tuple(stages)),))


def rows(words: int, divisor: int, plan: Plan, width: int) -> int:
    """Megatron's rule (`_vocab_size_with_padding`), where each rank has its own tensor-parallel size."""
    step = divisor * width if plan.is_repeated else vocabulary_step(plan, divisor) // width * width
    return math.ceil(words / step) * step


plans = st.builds(plan_of, st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3), st.booleans())


@given(st.integers(1, 100_000), st.integers(1, 300), plans, plans)
def test_rows_are_those_of_the_first_plan(words, divisor, first, plan):
    widths = {len(member.ranks) for member in (*first.members, *plan.members)}
    assume(vocabulary_step(first, divisor) % math.lcm(*widths) == 0)
    args = Namespace(make_vocab_size_divisible_by=divisor)
    keep_vocabulary(args, first, plan)
    before = {rows(words, divisor, first, len(member.ranks)) for member in first.members}
    after = {rows(words, args.make_vocab_size_divisible_by, plan, len(m.ranks)) for m in plan.members}
    assert before == after
    assert len(before) == 1
    keep_vocabulary(again := Namespace(make_vocab_size_divisible_by=divisor), first, first)
    assert vocabulary_step(first, again.make_vocab_size_divisible_by) == vocabulary_step(first, divisor)


def test_a_plan_s_own_number_of_rows_stays():
    first = plan_of([1, 2], repeated=False)
    first = replace(first, workload=replace(first.workload, padded_vocabulary=640))
    args = Namespace(make_vocab_size_divisible_by=128)
    keep_vocabulary(args, first, plan_of([2], repeated=True))
    assert args.make_vocab_size_divisible_by == 320


@pytest.mark.parametrize(
    ("terms", "given", "found"),
    [
        (JobTerms(precision="fp8", fp8_recipe="mxfp8"), {}, (True, False, "hybrid", "mxfp8")),
        (JobTerms(precision="fp8"), {"--fp8-format": "e4m3"}, (True, False, "e4m3", "delayed")),
        (JobTerms(precision="bf16"), {}, (True, False, None, "delayed")),
        (
            JobTerms(precision="bf16"),
            {"--fp8-format": "hybrid"},
            "job.precision is bf16, .* --fp8-format hybrid;",
        ),
        (JobTerms(precision="fp8", fp8_recipe="mxfp8"), {"--fp8-recipe": "delayed"}, "is mxfp8, the command"),
    ],
)
def test_a_plan_s_precision_is_the_job_s(terms, given, found):
    plan = replace(proportional_plan(Workload(64, 4, 4, 16), [[[1, 1]]]), job=terms)
    args = Namespace(hexi_plan="plan.yaml", tensor_model_parallel_size=1)
    args.__dict__.update(bf16=False, fp16=False, fp8=given.get("--fp8-format"))
    args.fp8_recipe = given.get("--fp8-recipe", "delayed")
    if isinstance(found, str):
        with pytest.raises(PlanError, match=found):
            set_job_terms(args, set(given), plan)
    else:
        set_job_terms(args, set(given), plan)
        assert (args.bf16, args.fp16, args.fp8, args.fp8_recipe) == found


@pytest.mark.parametrize(
    ("planned", "trained", "said"),
    [
        (8, None, "job.lora_rank is 8, the job trains all weights; make a plan for it with hexi plan$"),
        (8, 16, "job.lora_rank is 8, the job trains adapters of rank 16; .* hexi plan --lora-rank 16$"),
        (8, 8, None),
        (None, 8, None),  # of which all weights fit
    ],
)
def test_a_plan_for_adapters_is_for_those_of_its_rank(planned, trained, said):
    plan = replace(proportional_plan(Workload(64, 4, 4, 16), [[[1, 1]]]), job=JobTerms(lora_rank=planned))
    args = Namespace(hexi_plan="plan.yaml", tensor_model_parallel_size=1, lora_rank=trained)
    with pytest.raises(PlanError, match=said) if said else nullcontext():
        assert set_job_terms(args, set(), plan) == []
