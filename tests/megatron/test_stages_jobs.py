"""Jobs whose stages differ: documents, recomputation, evaluation, formats, checkpoints of any layout."""

from __future__ import annotations

import dataclasses
import re
from statistics import fmean
from typing import Any

import pytest
import torch

from megatron_hexi.plan import Plan
from megatron_hexi.plan.recompute import Recompute
from tests.megatron.checkpoint_contents import differences, optimizer_of, tensors_of
from tests.megatron.conftest import job, skip_what_is_not_there
from tests.megatron.forked import ENTRY
from tests.megatron.option_cases import APART, ONE_EACH, PACKED
from tests.megatron.planted_losses import RESUME_FAULTS
from tests.megatron.test_uneven_training import MODEL, largest_difference
from tests.support.stage_layouts import FOUR_LAYERS, LAYOUTS, stage_layout

SEQUENCE = ("--sequence-parallel",)
ITERATIONS = ("--train-iters", "4", "--log-interval", "1")


def recomputing(plan: Plan, *recompute: Recompute) -> Plan:
    """The plan with these recomputations of the stages of its first replica."""
    first, *others = plan.replicas
    stages = tuple(
        dataclasses.replace(stage, recompute=what)
        for stage, what in zip(first.stages, recompute, strict=True)
    )
    return dataclasses.replace(plan, replicas=(dataclasses.replace(first, stages=stages), *others))


def test_documents_travel_over_borders_of_other_domains(forks, references, documents, tmp_path):
    skip_what_is_not_there([*documents, *PACKED])
    weights, reference = references((*ONE_EACH, *FOUR_LAYERS, *documents, *APART), iterations=4)
    log = forks.train(
        tmp_path,
        ranks=5,
        args=[
            *job([*ONE_EACH, *FOUR_LAYERS, *documents, *PACKED]),
            *ITERATIONS,
            *("--load", weights, "--finetune"),
        ],
        plan=with_batch(stage_layout("domains", tmp_path, micro_batch_size=1), 4),
    )
    assert largest_difference(log, reference) < 1e-5


def test_documents_reach_stages_on_which_the_script_builds_no_data_set(
    forks, references, documents, tmp_path
):
    skip_what_is_not_there([*documents, *PACKED])
    weights, reference = references((*ONE_EACH, *FOUR_LAYERS, *documents, *APART), iterations=4)
    words = [*job([*ONE_EACH, *FOUR_LAYERS, *documents, *PACKED]), *ITERATIONS, "--load", weights]
    log = forks.train(
        tmp_path,
        ranks=5,
        args=[*words, "--finetune"],
        plan=with_batch(stage_layout("units", tmp_path, micro_batch_size=1), 4),
        entry="tests.megatron.nvidia_datasets",
    )
    assert largest_difference(log, reference) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("offload", [(), ("parameters", "optimizer", "activations")])
def test_documents_pass_ministages(offload, forks, references, documents, tmp_path):
    weights, reference = references((*ONE_EACH, *FOUR_LAYERS, *documents, *APART), iterations=4)
    plan = with_batch(stage_layout("domains", tmp_path, micro_batch_size=1), 4)
    (replica,) = plan.replicas
    stages = tuple(
        dataclasses.replace(stage, layers=layers, ministages=2, offload=offload or None)
        for stage, layers in zip(replica.stages, ((0, 2), (2, 4)), strict=True)
    )
    log = forks.train(
        tmp_path,
        ranks=5,
        args=[
            *job([*ONE_EACH, *FOUR_LAYERS, *documents, *PACKED]),
            *ITERATIONS,
            *("--load", weights, "--finetune"),
        ],
        plan=dataclasses.replace(plan, replicas=(dataclasses.replace(replica, stages=stages),)),
    )
    assert largest_difference(log, reference) < 1e-5


def with_batch(plan: Plan, micro_batches: int) -> Plan:
    """A plan of one replica, which takes so many micro-batches."""
    (replica,) = plan.replicas
    return dataclasses.replace(plan, replicas=(dataclasses.replace(replica, micro_batches=micro_batches),))


@pytest.mark.parametrize(
    "ways",
    [
        (("layernorm", "mlp"), ("mlp",), ("core_attn", "layernorm")),
        pytest.param((1, "selective", "full"), marks=pytest.mark.slow),
    ],
    ids=["modules", "layers"],
)
def test_stages_recompute_each_in_its_own_way(ways, forks, references, tmp_path):
    weights, reference = references((*FOUR_LAYERS, "--disable-bias-linear"), iterations=4)
    plan = recomputing(stage_layout("units", tmp_path), *ways)
    words = [
        *MODEL,
        *FOUR_LAYERS,
        "--disable-bias-linear",
        *ITERATIONS,
        *SEQUENCE,
        "--load",
        weights,
        "--finetune",
    ]
    log = forks.train(tmp_path, ranks=5, args=words, plan=plan)
    assert largest_difference(log, reference) < 1e-5


def test_gradients_are_summed_behind_the_backward_pass(forks, references, tmp_path):
    weights, reference = references(FOUR_LAYERS, iterations=4)
    words = [*MODEL, *FOUR_LAYERS, *ITERATIONS, "--load", weights, "--finetune"]
    plan = stage_layout(
        "depths", tmp_path, job="{overlap_gradients: true, distributed_optimizer: true, global_batch_size: 4}"
    )
    log = forks.train(tmp_path, ranks=4, args=[*words, "--ddp-bucket-size", "5000"], plan=plan)
    assert re.search(r"overlap_grad_reduce \.+ True", log.output)
    assert largest_difference(log, reference) < 1e-5


def test_bf16_is_no_further_from_fp32_than_one_rank_is(forks, references, tmp_path):
    weights, exact = references(FOUR_LAYERS, iterations=10)
    words = [*MODEL, *FOUR_LAYERS, "--train-iters", "10", "--load", weights, "--finetune", "--bf16"]
    log = forks.train(tmp_path, ranks=5, args=[*words, *SEQUENCE], plan=stage_layout("units", tmp_path))
    one = forks.train(tmp_path, ranks=1, args=words)

    def error(run):
        return fmean(abs(a - b) for a, b in zip(run.losses, exact.losses, strict=True))

    print(f"losses off by {error(log):.1e}, on one rank by {error(one):.1e}")
    assert error(log) < 2 * error(one)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("units", "bf16-distributed"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                *(("depths", "fp32"), ("depths", "bf16-distributed"), ("samples", "distributed")),
                *(("domains", "fp32"), ("ministages", "distributed"), ("interleaved", "bf16")),
            )
        ),
    ],
)
def test_the_norm_of_all_weights_is_that_of_one_rank(layout, kind, forks, references, tmp_path):
    words = ["--load", references(FOUR_LAYERS, iterations=4)[0], "--finetune", "--log-params-norm"]
    told = []
    for holder in (layout, "one-rank"):
        (tmp_path / holder).mkdir()
        log = go_on(forks, tmp_path / holder, holder, kind, words)
        told.append([float(norm) for norm in re.findall(r"params norm: ([\d.]+)", log.output)])
    ours, reference = told
    assert len(reference) == 4
    assert ours == pytest.approx(reference, rel=1e-3 if "bf16" in kind else 1e-4)


#: The first step is skipped, and the scale grows after two that are not.
FP16 = ("--fp16", "--initial-loss-scale", str(2**17), "--loss-scale-window", "2", "--hysteresis", "1")

# What saves, with how many ranks; None: stock Megatron.
PLAIN: tuple[str, ...] = ("--no-ckpt-fully-parallel-save",)
RESHARDABLE = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
TP_PP = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
#: The padded vocabulary of one rank, which a plan keeps, under Megatron's own tensor parallelism.
ONE_VOCABULARY = ("--make-vocab-size-divisible-by", "64")
HOLDERS = {
    "one-rank": (None, 1, ()),
    "tp-pp": (None, 4, (*TP_PP, *ONE_VOCABULARY)),
    "units": ("units", 5, SEQUENCE),
    "depths": ("depths", 4, ()),
    "samples": ("samples", 3, ()),
    "domains": ("domains", 5, ()),
    "ministages": ("ministages", 3, ()),
    "offload": ("offload", 3, ()),
    "dealt": ("dealt", 3, ()),
    "interleaved": ("interleaved", 3, SEQUENCE),
}
FORMATS = {
    "fp32": (),
    "bf16": ("--bf16",),
    "fp16": FP16,
    "distributed": RESHARDABLE,
    "bf16-distributed": (*RESHARDABLE, "--bf16"),
    "fp16-distributed": (*RESHARDABLE, *FP16),
}


@pytest.fixture(scope="module")
def trainings(forks, references, tmp_path_factory):
    """Four iterations under a layout, saved after two, by its name and the format."""
    made = {}

    def train(holder, kind):
        if (holder, kind) not in made:
            folder = tmp_path_factory.mktemp(f"{holder}-{kind}")
            words = ["--load", references(FOUR_LAYERS, iterations=4)[0], "--finetune"]
            words += ["--save", folder / "weights", "--save-interval", "2"]
            log = go_on(forks, folder, holder, kind, words)
            (folder / "weights" / "latest_checkpointed_iteration.txt").write_text("2")
            made[holder, kind] = folder / "weights", log
        return made[holder, kind]

    return train


def go_on(forks, folder, holder, kind, words, entry=ENTRY):
    layout, ranks, more = HOLDERS[holder]
    plan = stage_layout(layout, folder) if layout else None
    args = [*MODEL, *FOUR_LAYERS, *ITERATIONS, *{**FORMATS, **MORE_FORMATS}[kind], *more, *words]
    return forks.train(folder, ranks=ranks, args=args, plan=plan, entry=entry)


IN_CI = {
    ("depths", "tp-pp", "bf16-distributed"),
    ("offload", "one-rank", "distributed"),
}
LOADS_IN_CI = {("samples", "offload", "fp16")}
PAIRS = [
    pytest.param(
        *pair, id="-to-".join(pair[:2]) + f"-{pair[2]}", marks=[] if pair in IN_CI else pytest.mark.slow
    )
    for pair in ((saver, loader, kind) for saver in HOLDERS for loader in HOLDERS for kind in FORMATS)
    if LAYOUTS.keys() & {HOLDERS[name][0] for name in pair[:2]}
]


@pytest.mark.parametrize(("saver", "loader", "kind"), PAIRS)
def test_any_layout_goes_on_from_any_other(saver, loader, kind, trainings, forks, tmp_path):
    weights, whole = trainings(saver, kind)
    log = go_on(forks, tmp_path, loader, kind, ["--load", weights])
    assert log.iterations == [3, 4]
    assert log.skipped == whole.skipped[2:]
    assert log.loss_scales == whole.loss_scales[2:]
    is_half = "16" in kind
    tolerance = 2e-3 if is_half else 1e-5  # products are rounded in another order
    assert log.losses == pytest.approx(whole.losses[2:], rel=tolerance)
    assert log.grad_norms == pytest.approx(whole.grad_norms[2:], rel=10 * tolerance if is_half else 1e-5)


#: Beside `FORMATS`: what stock Megatron does not load.
MORE_FORMATS = {
    "sgd": ("--optimizer", "sgd"),
    "nothing-stepped-yet": ("--fp16",),
    # Two of three steps before the scale grows.
    "growing": ("--fp16", "--initial-loss-scale", "16", "--loss-scale-window", "3"),
}
LOADS = [
    pytest.param(
        *one, id="-to-".join(one[:2]) + f"-{one[2]}", marks=[] if one in LOADS_IN_CI else pytest.mark.slow
    )
    for one in (
        (saver, loader, kind)
        for saver in ("one-rank", "tp-pp", "units", "depths", "samples", "offload")
        for loader in ("one-rank", "units", "samples", "ministages", "offload")
        for kind in (*FORMATS, *MORE_FORMATS)
        if kind in FORMATS or ("one-rank" not in (saver, loader) and saver != "tp-pp")
    )
]
#: After two iterations.
STEPS = {"fp16": 1, "fp16-distributed": 1, "nothing-stepped-yet": 0}


@pytest.mark.parametrize(("saver", "loader", "kind"), LOADS)
def test_what_is_loaded_is_what_was_saved(saver, loader, kind, trainings, forks, tmp_path):
    """Each weight, each fp32 weight, each moment: saved again without a step between."""
    weights, _ = trainings(saver, kind)
    words = ["--load", weights, "--save", tmp_path, "--save-interval", "3"]
    words += ["--train-iters", "2", "--override-opt-param-scheduler"]
    go_on(forks, tmp_path, loader, kind, words)
    saved, again = (folder / "iter_0000002" for folder in (weights, tmp_path))
    before, after = tensors_of(saved), tensors_of(again)
    assert before.keys() == after.keys()
    assert len([name for name in before if name.startswith("optimizer.state.")]) >= 10
    assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []
    common = [optimizer_of(saved), optimizer_of(again)]
    assert steps(common[1]) == steps(common[0]) == STEPS.get(kind, 2)
    assert common[1].get("grad_scaler") == common[0].get("grad_scaler")


def steps(optimizer: dict[str, Any]) -> float:
    """The step count of an optimizer's common state."""
    inner = optimizer.get("optimizer", optimizer)
    return float(inner["state"]["common_step"] if "state" in inner else inner["param_groups"][0]["step"])


#: With trainings that other tests have made.
RESUMED_IN_CI = {("offload", "distributed"), ("samples", "fp16")}
#: What shows a fault, where it is not offload in fp16.
FAULTY = {"a-step-short": ("offload", "distributed"), "growth-from-the-start": ("offload", "growing")}


@pytest.mark.parametrize(
    ("holder", "kind"),
    [
        pytest.param(holder, kind, marks=[] if (holder, kind) in RESUMED_IN_CI else pytest.mark.slow)
        for holder, (layout, *_) in HOLDERS.items()
        if layout
        for kind in (*FORMATS, "sgd")
    ],
)
def test_a_job_that_goes_on_is_the_job_without_a_break(holder, kind, trainings, forks, tmp_path):
    assert broken_and_whole(holder, kind, trainings, forks, tmp_path) == []


@pytest.mark.parametrize(
    "fault",
    [pytest.param(one, marks=[] if one == "a-step-short" else pytest.mark.slow) for one in RESUME_FAULTS],
)
def test_the_comparison_finds_what_is_lost(fault, trainings, forks, tmp_path):
    holder, kind = FAULTY.get(fault, ("offload", "fp16"))
    lost = broken_and_whole(
        holder, kind, trainings, forks, tmp_path, ("--planted", fault), "tests.megatron.planted"
    )
    print(f"{fault}: {len(lost)} differences, {lost[:2]}")
    assert lost


def broken_and_whole(holder, kind, trainings, forks, folder, words=(), entry=ENTRY):
    """Return the tensors that differ after four iterations if the job is interrupted after two."""
    weights, _ = trainings(holder, kind)
    saving = ["--load", weights, "--save", folder / "again", "--save-interval", "4", *words]
    go_on(forks, folder, holder, kind, saving, entry)
    return differences(weights / "iter_0000004", folder / "again" / "iter_0000004")
