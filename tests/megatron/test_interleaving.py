"""Chunks of a stage, as a plan's job states them: trained as by one rank, or refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hexi.plan import JobTerms, write_plan
from tests.megatron.conftest import job
from tests.megatron.option_cases import DEEPER, Case
from tests.megatron.test_option_training import steps

#: Two ranks a stage with other tokens and heads, two stages, two chunks of each.
TERMS = JobTerms(pipeline_parallel=2, virtual_stages=2)


def planned(terms=TERMS):
    """The plan of two unequal ranks a stage, with these terms of its job."""
    return replace(Case(DEEPER).plans()["groups"], job=terms)


def test_chunks_that_a_plan_states_train_as_one_rank(forks, references, tmp_path):
    weights, reference = references(DEEPER, 4)
    plan = planned()
    words = [*job(DEEPER), *steps(4), "--load", weights, "--finetune"]
    log = forks.train(tmp_path, ranks=2 * plan.units, args=words, plan=plan)
    assert "Number of virtual stages per pipeline stage: 2" in log.output
    assert log.losses == pytest.approx(reference.losses, rel=1e-5)
    assert log.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5)


def test_micro_batches_that_make_no_group_end_every_rank_with_one_line(forks, tmp_path):
    plan = planned()
    write_plan(plan, tmp_path / "plan.yaml")
    words = [*job(DEEPER), *steps(1), "--global-batch-size", "6", "--hexi-plan", tmp_path / "plan.yaml"]
    outcome = forks.launch(tmp_path, ranks=2 * plan.units, args=words)
    assert outcome.codes == [2] * len(outcome.codes)
    for output in outcome.output:
        [line] = [line for line in output.splitlines() if line.startswith("hexi: error:")]
        assert "each replica takes 3 micro-batches, an interleaved pipeline runs 2 at a time" in line
