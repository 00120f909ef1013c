"""Options two by two: every combination trains as without a plan, or is refused in one line.

A sample runs always; all of them on request, in some fifteen minutes on two cores: pytest -m slow -n 2 with
this file.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hexi.options.parser import is_assumed
from megatron_hexi.options.refusals import refused
from megatron_hexi.plan import Plan, write_plan
from tests.megatron.conftest import job
from tests.megatron.option_cases import (
    APART,
    DEEPER,
    EXPERTS,
    FULL,
    FURTHER_TOKENS,
    OVERLAPPED,
    PACKED,
    PIPELINE,
    SEQUENCE,
    SINKS,
    TENSOR,
    VIRTUAL,
    WINDOW,
    Case,
    balanced,
)
from tests.megatron.option_pairs import Choice, all_pairs
from tests.megatron.test_option_refusals import OPTION_WORDS
from tests.megatron.test_unequal_replicas import plan_of
from tests.megatron.test_uneven_training import largest_difference

#: What a model may have, which the run without a plan has too.
MODELS: dict[str, dict[str, tuple[str, ...]]] = {
    "layers": {"2": (), "4": DEEPER},
    "positions": {
        "rope": (),
        "scaled": ("--use-rope-scaling", "--no-rope-freq", "2"),
        "partial": ("--rotary-percent", "0.5", "--rotary-interleaved"),
        "learned": ("--position-embedding-type", "learned_absolute", "--reset-position-ids"),
        "yarn": (
            *("--position-embedding-type", "yarn", "--rotary-scaling-factor", "4"),
            *("--yarn-original-max-position-embeddings", "64", "--yarn-beta-fast", "32"),
            *("--yarn-beta-slow", "1", "--mscale", "1", "--mscale-all-dim", "1"),
        ),
        "none": ("--position-embedding-type", "none"),
    },
    "attention": {
        "plain": (),
        "qk-norm": ("--qk-layernorm",),
        "qk-l2-norm": ("--qk-l2-norm",),
        "gated": ("--attention-output-gate", "--add-qkv-bias"),
    },
    "experts": {
        "none": (),
        "aux": balanced("aux_loss"),
        "seq": balanced("seq_aux_loss"),
        "global": balanced("global_aux_loss"),
        "z": (*balanced("aux_loss"), "--moe-z-loss-coeff", "0.01"),
        "bias": (
            *EXPERTS,
            *("--moe-router-load-balancing-type", "none", "--moe-router-enable-expert-bias"),
            *("--moe-router-score-function", "sigmoid"),
        ),
        "shared": (*balanced("aux_loss"), "--moe-shared-expert-intermediate-size", "64"),
        "some": (*balanced("aux_loss"), "--moe-layer-freq", "2"),
    },
    "further-tokens": {"0": (), "2": FURTHER_TOKENS},
    "batch": {"2 of 4": (), "1 of 8": ("--micro-batch-size", "1", "--global-batch-size", "8")},
    "output": {"tied": (), "untied": ("--untie-embeddings-and-output-weights",)},
    "loss": {"of all": (), "not of ends": ("--eod-mask-loss",)},
    "window": {
        "no": (),
        "all": WINDOW,
        "every-second": (*WINDOW, "--window-attn-skip-freq", "2"),
        "sinks": SINKS,
        "and-sinks": (*WINDOW, *SINKS),
    },
    # Which documents see each other: told in one way to the run without a plan, in another under one.
    "documents": {"one": (), "apart": ()},
}

#: How a job under a plan may carry it out.
JOBS: dict[str, dict[str, tuple[str, ...]]] = {
    "parallel": {
        "no": (),
        "tensor": TENSOR,
        "sequence": SEQUENCE,
        "pipeline": PIPELINE,
        "virtual": VIRTUAL,
        "both": (*SEQUENCE, *PIPELINE),
    },
    "expert-parallel": {
        "1": (),
        "2": ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"),
    },
    "optimizer": {"plain": (), "distributed": ("--use-distributed-optimizer",), "overlapped": OVERLAPPED},
    "recompute": {
        "no": (),
        "selective": ("--recompute-granularity", "selective"),
        "uniform": (*FULL, "uniform"),
        "block": (*FULL, "block"),
    },
}
PLANS = ("groups", "no-heads", "no-tokens", "replicas", "replicas-without", "unequal")


def possible(choice: Choice) -> bool:
    """Whether Megatron itself, without a plan, takes such a job."""
    experts, parallel = choice.get("experts"), choice.get("parallel")
    impossible = (
        # Experts beside tensor parallelism need sequence parallelism; ranks can share only experts there are.
        (parallel == "tensor" and experts not in (None, "none"))
        or (choice.get("expert-parallel") == "2" and experts == "none")
        # Two stages of two layers need four, and as many micro-batches as stages.
        or (parallel == "virtual" and choice.get("layers") == "2")
        or (
            parallel == "virtual"
            and choice.get("plan") in ("replicas", "replicas-without", "unequal")
            and choice.get("batch") == "2 of 4"
        )
        # Experts beside unequal replicas are refused.
        or (choice.get("plan") == "unequal" and experts not in (None, "none"))
        or (choice.get("plan") == "unequal" and choice.get("expert-parallel") == "2")
        # Packed samples come one by one, without further tokens; Megatron forgets documents beside a window.
        or (choice.get("documents") == "apart" and choice.get("batch") == "2 of 4")
        or (choice.get("documents") == "apart" and choice.get("further-tokens") == "2")
        or (choice.get("documents") == "apart" and choice.get("window") not in (None, "no", "sinks"))
        # Further tokens take rotary positions or none; beside a pipeline, Megatron cannot save them.
        or (choice.get("further-tokens") == "2" and choice.get("positions") in ("learned", "yarn"))
        or (choice.get("further-tokens") == "2" and parallel in ("pipeline", "virtual", "both"))
        # An odd number of ranks in a domain cannot share experts two by two.
        or (
            choice.get("expert-parallel") == "2" and choice.get("plan") == "groups" and parallel != "sequence"
        )
    )
    return not impossible


VALUES = {name: tuple(values) for name, values in {**JOBS, **MODELS}.items()}
COMBINATIONS = all_pairs({"plan": PLANS, **VALUES}, possible)
#: Of few layers and samples, so that each takes seconds.
SAMPLE = [
    row
    for row in COMBINATIONS
    if row["parallel"] in ("no", "sequence")
    and row["plan"] != "groups"
    and (row["layers"], row["batch"]) == ("2", "2 of 4")
][1:3]


def shown(row: Choice) -> str:
    """What of a combination is not usual."""
    usual = {name: values[0] for name, values in VALUES.items()}
    return " ".join(
        value if name == "plan" else f"{name}-{value}"
        for name, value in row.items()
        if usual.get(name) != value
    )


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=shown(row), marks=[] if row in SAMPLE else [pytest.mark.slow])
        for row in COMBINATIONS
    ],
)
def test_a_combination_trains_as_without_a_plan(row: Choice, forks, references, documents, tmp_path):
    apart = row["documents"] == "apart"
    model = [word for name, values in MODELS.items() for word in values[row[name]]]
    model += ["--calculate-per-token-loss", *(documents if apart else ())]
    options = [word for name, values in JOBS.items() for word in values[row[name]]]
    options += PACKED if apart else ()
    case = Case(tuple(model), tuple(options), replicas=row["plan"].startswith("replicas"))
    plan = _plan(case, row["plan"])
    told = (*model, *(APART if apart else ()))
    weights, reference = references(told, iterations=3, ranks=len(plan.replicas))
    words = [*job(model), *options, "--train-iters", "3", "--load", weights, "--finetune"]
    log = forks.train(tmp_path, ranks=plan.units * case.model_parallel, args=words, plan=plan)
    assert largest_difference(log, reference) < 1e-5


def _plan(case: Case, name: str) -> Plan:
    if name == "unequal":
        return replace(plan_of("two-and-one", case.tensor_parallel), workload=case.workload)
    return case.plans()[name]


#: Refused beside Megatron's fused rotary kernel, which there is none of on a CPU: they train.
_WITH_A_KERNEL = ("--dataloader-inter-document-masking", "--sft")
#: With the installed megatron-core.
REFUSALS = [
    (option, name)
    for option in refused()
    if option.beside not in ("planned", "script")  # of hexi plan, and of another script
    and option.name not in _WITH_A_KERNEL
    and (not option.versions or is_assumed(option.versions))
    for name in {"unequal": ("unequal",), "stages": ()}.get(option.beside, ("groups", "replicas", "unequal"))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "name"), REFUSALS, ids=[f"{option.name}-{name}" for option, name in REFUSALS]
)
def test_a_refused_option_ends_every_rank_with_one_line(option, name, forks, tmp_path):
    given = OPTION_WORDS.get(option.name, option.option).split()
    plan = _plan(Case(tuple(given), replicas=name == "replicas"), name)
    write_plan(plan, tmp_path / "plan.yaml")
    words = [*job(given), "--train-iters", "1", "--hexi-plan", tmp_path / "plan.yaml"]
    outcome = forks.launch(tmp_path, ranks=plan.units, args=words)
    assert outcome.codes == [2] * plan.units
    # Beside unequal replicas experts are refused, whatever else is asked of them.
    first = "--num-experts" if name == "unequal" and "--num-experts" in given else option.option
    for output in outcome.output:
        [line] = [line for line in output.splitlines() if line.startswith("hexi: error:")]
        assert first in line
        assert "Traceback" not in output


def test_the_sweep_is_as_wide_as_it_should_be():
    assert len(COMBINATIONS) + len(REFUSALS) >= 150
    assert len(SAMPLE) == 2
