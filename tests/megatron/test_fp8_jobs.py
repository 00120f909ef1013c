"""fp8 in packed documents, where a job repeats one stage, and in a loop of one's own, beside one rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_hexi.plan import (
    Domain,
    Group,
    Member,
    Plan,
    Replica,
    Stage,
    Workload,
    dump_plan,
    proportional_plan,
    write_plan,
)
from tests.megatron import te_emulated
from tests.megatron.conftest import job
from tests.megatron.forked import Outcome
from tests.megatron.fp8_cases import CASES, SIZES, Case, fp8
from tests.megatron.half_precision import Errors, Gradients, Trial, ratios
from tests.megatron.option_cases import DEALT, PACKED, unit_rates
from tests.megatron.test_option_training import steps
from tests.megatron.test_replanning import CLUSTER
from tests.megatron.test_te_training import EmulatedTe

pytestmark = pytest.mark.skipif(
    not te_emulated.is_available(), reason="Transformer Engine's wheel is not unpacked: make environment"
)
#: A stage of two members, of which one computes in bf16, repeated.
REPEATED = """\
- stages:
  - domains:
    - groups:
      - segments: [[0, 127]]
        members:
        - {ranks: [0], tokens: 90, heads: [0, 5]}
        - {ranks: [1], tokens: 37, heads: [5, 8], precision: bf16}
"""


@pytest.fixture(scope="module")
def te() -> Iterator[EmulatedTe]:
    with EmulatedTe("tests.megatron.te_forked") as started:
        yield started


def check(found: Gradients, alone: Gradients, true: Gradients) -> None:
    """Check that gradients are as near to fp32 as those of one rank in fp8."""
    errors = [Errors.of(one, true) for one in (found, alone)]
    together, each = ratios(errors[:1], errors[1:])
    print(f"{together:.2f} times one rank's error, the worst {max(each.values()):.2f} times")
    assert errors[1].together ** 0.5 > 0.02  # of fp8; bf16 is off by 0.005
    assert together < 1.2
    assert max(each.values()) < 1.2


@pytest.mark.parametrize(
    "dealt", [pytest.param(False, id="cut", marks=pytest.mark.slow), pytest.param(True, id="dealt")]
)
def test_packed_documents(dealt: bool, te: EmulatedTe, documents: tuple[str, ...], tmp_path: Path):
    case, plan = CASES["mixed-groups"], CASES["mixed-groups"].plan(tmp_path)
    trial = Trial(te, tmp_path / "trial", (*SIZES, *documents, *PACKED, "--no-rope-fusion"), case.alone)
    if dealt:
        plan = replace(plan, rates=unit_rates(plan.units))
    words = (*fp8("tensorwise"), *(DEALT if dealt else ()))
    check(trial.gradients("plan", words, plan), trial.gradients("alone", fp8("tensorwise")), trial.true)


def test_a_repeated_stage(te: EmulatedTe, tmp_path: Path):
    case = Case(REPEATED)
    plan = case.plan(tmp_path)
    trial = Trial(te, tmp_path / "trial", SIZES, case.alone)
    words = (*fp8("blockwise"), "--pipeline-model-parallel-size", "2")
    check(
        trial.gradients("plan", words, plan, stages=2), trial.gradients("alone", fp8("blockwise")), trial.true
    )


OWN = Workload(101, heads=8, kv_heads=4, head_dim=16, layers=2, hidden_size=128)
OWN_STAGE = Stage(
    (Domain((Group(((0, 101),), (Member((0,), 71, (0, 5)), Member((1,), 30, (5, 8), precision="bf16"))),)),)
)


def own_loop(te: EmulatedTe, folder: Path, plan: Plan, precision: str, stages: int = 1) -> Outcome:
    folder.mkdir()
    write_plan(plan, folder / "plan.yaml")
    args: list[str | Path] = [folder / "plan.yaml", precision, str(stages)]
    return te.launch(folder, ranks=stages * plan.ranks, args=args, entry="tests.megatron.fp8_own_loop")


@pytest.mark.slow
def test_a_loop_of_ones_own(te: EmulatedTe, tmp_path: Path):
    alone, plan = proportional_plan(OWN, [[[1]]]), Plan(OWN, (Replica((OWN_STAGE,)),))
    found: dict[str, Gradients] = {}
    for name, used, precision, stages in (
        ("true", alone, "fp32", 1),
        ("alone", alone, "tensorwise", 1),
        ("plan", plan, "tensorwise", 2),
    ):
        outcome = own_loop(te, tmp_path / name, used, precision, stages)
        assert outcome.succeeded, outcome.why()
        saved = sorted((tmp_path / name).glob("own-*.pt"))
        found[name] = {key: one for path in saved for key, one in torch.load(path).items()}
    check(found["plan"], found["alone"], found["true"])


def test_a_loop_of_ones_own_has_no_delayed_scales(te: EmulatedTe, tmp_path: Path):
    outcome = own_loop(te, tmp_path / "delayed", proportional_plan(OWN, [[[1]]]), "delayed")
    assert "fp8_recipe delayed: Megatron-LM's loop alone saves its scales" in outcome.why()


@pytest.mark.slow
def test_scales_follow_over_a_swap_of_plans(te: EmulatedTe, tmp_path: Path):
    case = CASES["groups"]
    other = replace(
        case, replicas=case.replicas.replace("tokens: 51", "tokens: 20").replace("tokens: 36", "tokens: 67")
    )
    plan = case.plan(tmp_path)
    plans = tmp_path / "plans.json"
    plans.write_text(json.dumps([dump_plan(other.plan(tmp_path))]))
    words = [*job(SIZES), *steps(8), "--sequence-parallel", *fp8("delayed")]
    replan = ("--hexi-replan-interval", "2", "--hexi-cluster", CLUSTER, "--swap", plans)
    found = {}
    for name, more in (("still", ()), ("swapped", replan)):
        log = te.train(
            tmp_path / name, ranks=4, args=[*words, *more], plan=plan, entry="tests.megatron.fp8_ranks"
        )
        products = [torch.load(tmp_path / name / f"fp8-{rank}.pt") for rank in range(4)]
        for key in products[0]:
            assert all(torch.equal(one[key]["scales"], products[0][key]["scales"]) for one in products)
        found[name] = torch.cat([one["scales"] for one in products[0].values()]), log
    assert "swapped to plan" in found["swapped"][1].output
    scales, others = found["still"][0], found["swapped"][0]
    assert float((scales / others).log().abs().median()) < 0.05
    assert float(scales.log().abs().median()) > 1  # of scales that begin again it would be 0
    assert found["swapped"][1].losses == pytest.approx(found["still"][1].losses, rel=1e-2)
