"""Training with experts where stages differ is the training on one rank, whoever holds which of them."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
import torch

from megatron_hexi.plan import Workload
from tests.megatron.checkpoint_contents import tensors_of
from tests.megatron.conftest import job
from tests.megatron.faulty import assert_fault_is_found
from tests.megatron.forked import ENTRY
from tests.megatron.option_cases import APART, PACKED, SELECTIVE
from tests.megatron.planted import EXPERT_FAULTS
from tests.megatron.routed import routed
from tests.megatron.test_uneven_training import error, largest_difference
from tests.support.expert_layouts import EXPERTS, LAYERS, LAYOUTS, MICRO_BATCH, MICRO_BATCHES, expert_layout
from tests.support.expert_plans import expert_plan

#: Small experts, of which the first layer has none.
MODEL = (
    *("--num-layers", str(LAYERS), "--micro-batch-size", str(MICRO_BATCH), "--disable-bias-linear"),
    *("--global-batch-size", str(MICRO_BATCH * MICRO_BATCHES), "--calculate-per-token-loss"),
    *("--eval-iters", "0", "--num-experts", str(EXPERTS), "--moe-router-topk", "2"),
    *("--moe-ffn-hidden-size", "64", "--moe-shared-expert-intermediate-size", "64"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-layer-freq", "[0]+[1]*5"),
)
SEQUENCE = ("--sequence-parallel",)


def balanced(*losses: str) -> tuple[str, ...]:
    """Balancing losses, large enough to be seen."""
    return ("--moe-router-load-balancing-type", *losses, "--moe-aux-loss-coeff", *("0.1" for _ in losses))


SIGMOID = ("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid")
#: With these no two experts of a token are equal to rounding, other than with `TIES`.
BIAS = (*SIGMOID, *("--moe-router-bias-update-rate", "0.02", "--moe-router-dtype", "fp64"))
TIES = (*SIGMOID, *("--moe-router-bias-update-rate", "0.01"))
Z_LOSS = ("--moe-z-loss-coeff", "0.01")
LOSSES = {
    "all": (*balanced("aux_loss", "seq_aux_loss"), *Z_LOSS, *BIAS),
    "batches": (*balanced("aux_loss"), *Z_LOSS),
    "sequences": balanced("seq_aux_loss"),
    "global": (*balanced("global_aux_loss"), *Z_LOSS),
    "bias": ("--moe-router-load-balancing-type", "none", *BIAS),
}
JOBS = {
    "moe": (*SELECTIVE, "moe"),
    "attention": (*SELECTIVE, "core_attn"),
    "overlapped": ("--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "5000"),
    "": (),
}
IN_CI = {("replicas", "all", ""), ("slices", "all", "moe"), ("nodes", "all", "")}
ALL = [
    *((layout, loss, "") for layout in LAYOUTS for loss in ("batches", "all")),
    *((layout, "all", how) for layout in ("uneven", "slices") for how in JOBS if how),
    *((layout, loss, "") for layout in ("samples", "slices") for loss in ("sequences", "bias")),
    *(("uneven", "global", ""), ("recomputed", "global", "")),
]


def case_of(*case, iterations, marks):
    name = "-".join(filter(None, (*case, "long" if iterations > 10 else "")))
    return pytest.param(*case, iterations, id=name, marks=marks)


@pytest.mark.parametrize(
    ("layout", "loss", "how", "iterations"),
    [
        *(case_of(*case, iterations=3, marks=()) for case in ALL if case in IN_CI),
        *(case_of(*case, iterations=20, marks=pytest.mark.slow) for case in ALL),
    ],
)
def test_experts_train_as_on_one_rank(layout, loss, how, iterations, forks, references, tmp_path):
    model = (*MODEL, *LOSSES[loss])
    weights, reference = references(model, iterations)
    plan = expert_layout(layout, tmp_path)
    args = words(model, iterations, weights, *SEQUENCE, *JOBS[how])
    log = forks.train(tmp_path, ranks=plan.ranks, args=args, plan=plan, timeout=600)
    difference = largest_difference(log, reference)
    print(f"{len(log.losses)} iterations, losses and gradient norms within {difference:.1e}")
    assert difference < 1e-5
    assert balances(log) == pytest.approx(balances(reference), rel=1e-5)
    assert bool(balances(log)) == (loss != "bias")


def words(model, iterations, weights, *more):
    """Arguments of a run from the common weights."""
    steps = ("--train-iters", str(iterations), "--log-interval", "1")
    return [*job(model), *steps, "--load", weights, "--finetune", *more]


def balances(log):
    """The routers' losses, as Megatron prints them."""
    kinds = ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss")
    names = (*kinds, "z_loss")
    found: dict[str, list[float]] = {name: [] for name in names}
    for line in log.output.splitlines():
        for part in line.split("|"):
            name, _, value = part.strip().partition(": ")
            if name in found:
                found[name].append(float(value))
    return [value for values in found.values() for value in values]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["uneven", "samples", "slices", "dealt"])
def test_a_token_goes_elsewhere_only_where_its_experts_tie(layout, forks, references, tmp_path):
    """Until two experts of a token are equal to rounding, losses are those of one rank, and after it not."""
    model = (*MODEL, *balanced("aux_loss", "seq_aux_loss"), *Z_LOSS, *TIES)
    weights, _ = references(model, 3)
    plan = expert_layout(layout, tmp_path)
    entry, args = "tests.megatron.routed", words(model, 20, weights, *SEQUENCE)
    one = forks.train(tmp_path / "one", ranks=1, args=args, entry=entry)
    log = forks.train(tmp_path / "plan", ranks=plan.ranks, args=args, plan=plan, entry=entry, timeout=600)
    true, found = routed(tmp_path / "one", 1), routed(tmp_path / "plan", plan.ranks)
    assert found.keys() == true.keys()
    same_until = 20
    for iteration, layer, use in sorted(true):
        tie = rows_elsewhere(true[iteration, layer, use], found[iteration, layer, use])
        if tie is not None:
            rows, gap, error = tie
            print(f"iteration {iteration}, layer {layer}, {use}: {rows} rows, tied within {gap:.1e}")
            assert rows == 1
            assert gap < 1e-5
            assert error < 1e-5
            same_until = iteration
            break
    for number in range(same_until):
        assert log.losses[number] == pytest.approx(one.losses[number], rel=1e-6)
        assert log.grad_norms[number] == pytest.approx(one.grad_norms[number], rel=1e-6)


def rows_elsewhere(true, found):
    """Number of rows that go to other experts, largest gap of their second to their third, and the error.

    Ranks keep rows in another order and pad them, so a row is looked for by its scores. ``None``: all rows
    go where they do on one rank.
    """
    (scores, chosen), (others, theirs) = true, found
    distance, row = torch.cdist(scores.double(), others.double(), p=float("inf")).min(1)
    moved = (chosen != theirs[row]).any(1)
    if not moved.any():
        return None
    second, third = scores[moved].topk(3).values[:, 1:].unbind(1)
    return int(moved.sum()), float((second - third).max()), float(distance[moved].max())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_random_plan_trains_as_one_rank(seed, forks, references, tmp_path):
    model = (*MODEL, *LOSSES["all"])
    weights, reference = references(model, 4)
    random = Random(seed)
    workload = Workload(127, heads=6, kv_heads=2, head_dim=16, layers=LAYERS)
    plan = expert_plan(
        random, workload, MICRO_BATCH, random.randint(2, 6), EXPERTS, micro_batches=MICRO_BATCHES
    )
    log = forks.train(tmp_path, ranks=plan.ranks, args=words(model, 2, weights, *SEQUENCE), plan=plan)
    # The learning rate is decayed over all iterations of a run: only after the first step is it the same.
    pairs = [(log.losses, reference.losses), (log.grad_norms, reference.grad_norms)]
    difference = max(
        abs(here / there - 1) for found, true in pairs for here, there in zip(found, true[:2], strict=True)
    )
    print(f"seed {seed}: {plan.ranks} ranks, losses and gradient norms within {difference:.1e}")
    assert difference < 1e-5


#: The loss that shows a fault.
SHOWN_BY = {"bias-of-a-stage": "bias", "balanced-in-a-domain": "batches"}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(one, marks=[] if one == "experts-as-copies" else pytest.mark.slow)
        for one in EXPERT_FAULTS
    ],
)
def test_the_comparison_finds_a_fault(fault, forks, references, tmp_path):
    model = (*MODEL, *LOSSES[SHOWN_BY.get(fault, "all")])
    weights, reference = references(model, 3)
    plan = expert_layout("samples", tmp_path)
    args = words(model, 3, weights, *SEQUENCE)
    assert_fault_is_found(fault, args, plan, reference, forks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["replicas", "samples", "slices", "offload"])
def test_each_weight_and_its_gradient_is_that_of_one_rank(layout, forks, references, tmp_path):
    """After one step of SGD: its momentum is the gradient, clipped."""
    model = (*MODEL, *LOSSES["all"], "--optimizer", "sgd")
    weights, _ = references((*MODEL, *LOSSES["all"]), 3)
    saved = {}
    for name in (None, layout):
        folder = tmp_path / str(name)
        folder.mkdir()
        plan = name and expert_layout(name, folder)
        args = words(model, 1, weights, *SEQUENCE, "--save", folder / "saved", "--save-interval", "1")
        forks.train(folder, ranks=plan.ranks if plan else 1, args=args, plan=plan)
        saved[name] = tensors_of(folder / "saved" / "iter_0000001")
    found, true = saved[layout], saved[None]
    assert found.keys() == true.keys()
    differences = {
        key: float((found[key] - one).abs().max() / one.abs().max())
        for key, one in true.items()
        if one.is_floating_point() and one.abs().max() > 0
    }
    kinds = {".experts.", "router", "shared_experts", "momentum_buffer", "expert_bias"}
    assert {kind for kind in kinds for key in differences if kind in key} == kinds
    print(f"{len(differences)} tensors within {max(differences.values()):.1e}")
    assert max(differences.values()) < 2e-4, differences


@pytest.mark.slow
@pytest.mark.parametrize("precision", [("--bf16",), ("--fp16", "--initial-loss-scale", "16")])
def test_half_precision_is_no_further_from_fp32_than_one_rank_is(precision, forks, references, tmp_path):
    model = (*MODEL, *LOSSES["all"])
    weights, exact = references(model, 20)
    args = words(model, 20, weights, *precision)
    one = error(forks.train(tmp_path / "one", ranks=1, args=args), exact)
    for layout in ("replicas", "slices"):
        plan = expert_layout(layout, tmp_path)
        log = forks.train(tmp_path / layout, ranks=plan.ranks, args=[*args, *SEQUENCE], plan=plan)
        for what, found, allowed in zip(("losses", "norms"), error(log, exact), one, strict=True):
            print(f"{layout}: {what} off fp32 by {found:.1e}, on one rank by {allowed:.1e}")
            assert found <= 2 * allowed


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["uneven", "unstated"])
def test_documents_reach_uneven_experts(layout, forks, references, documents, tmp_path):
    own = ("--micro-batch-size", "1", "--global-batch-size", "4", *documents)
    model = (*MODEL, *balanced("aux_loss"), *Z_LOSS, *own)
    weights, reference = references((*model, *APART), 4)
    plan = expert_layout(layout, tmp_path)
    plan = dataclasses.replace(plan, job=dataclasses.replace(plan.job, micro_batch_size=1))
    log = forks.train(
        tmp_path, ranks=plan.ranks, args=words((*model, *PACKED), 4, weights, *SEQUENCE), plan=plan
    )
    assert largest_difference(log, reference) < 1e-5


#: Who saves and loads, on how many ranks without a plan.
HOLDERS = {
    "one-rank": 1,
    **dict.fromkeys(("replicas", "samples", "slices", "ministages", "offload", "dealt")),
}
OPTIMIZERS = {
    "fp32": (),
    "bf16-distributed": ("--bf16", "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"),
}


def go_on(holder, kind, iterations, words_, forks, folder):
    """Train under a layout, or on one rank."""
    plan = None if HOLDERS[holder] else expert_layout(holder, folder)
    steps = ("--train-iters", str(iterations), "--log-interval", "1")
    args = [*job((*MODEL, *LOSSES["all"])), *steps, *SEQUENCE, *OPTIMIZERS[kind], *words_]
    return forks.train(folder, ranks=plan.ranks if plan else 1, args=args, plan=plan)


@pytest.fixture(scope="module")
def trainings(forks, references, tmp_path_factory):
    """Four iterations under a layout, saved after two, by its name and the format."""
    made = {}

    def train(holder, kind):
        if (holder, kind) not in made:
            folder = tmp_path_factory.mktemp(f"{holder}-{kind}")
            start = references((*MODEL, *LOSSES["all"]), 3)[0]
            saving = ["--load", start, "--finetune", "--save", folder / "weights", "--save-interval", "2"]
            log = go_on(holder, kind, 4, saving, forks, folder)
            (folder / "weights" / "latest_checkpointed_iteration.txt").write_text("2")
            made[holder, kind] = folder / "weights", log
        return made[holder, kind]

    return train


@pytest.mark.slow  # always: `test_checkpoint_chains.py` compares what is loaded bit by bit
@pytest.mark.parametrize(
    ("saver", "loader", "kind"),
    [
        pytest.param(*pair, kind, id="-to-".join(pair) + f"-{kind}")
        for pair in ((saver, loader) for saver in HOLDERS for loader in HOLDERS if saver != loader)
        for kind in OPTIMIZERS
    ],
)
def test_any_layout_goes_on_from_any_other(saver, loader, kind, trainings, forks, tmp_path):
    weights, whole = trainings(saver, kind)
    log = go_on(loader, kind, 4, ["--load", weights], forks, tmp_path)
    assert log.iterations == [3, 4]
    tolerance = 2e-3 if "16" in kind else 1e-5  # products are rounded in another order
    assert log.losses == pytest.approx(whole.losses[2:], rel=tolerance)
    assert log.grad_norms == pytest.approx(whole.grad_norms[2:], rel=10 * tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["one-rank", "slices"])
def test_weights_of_megatrons_expert_parallelism_are_loaded(loader, forks, references, tmp_path):
    model = (*MODEL, *LOSSES["all"])
    start, _ = references(model, 3)
    parallel = ("--expert-model-parallel-size", "2", "--save", tmp_path / "weights", "--save-interval", "2")
    forks.train(tmp_path, ranks=2, args=words(model, 2, start, *parallel))
    again = words(model, 2, tmp_path / "weights", *SEQUENCE)
    plan = None if HOLDERS[loader] else expert_layout(loader, tmp_path)
    true = forks.train(tmp_path / "one", ranks=1, args=again)
    log = forks.train(tmp_path / loader, ranks=plan.ranks if plan else 1, args=again, plan=plan)
    assert largest_difference(log, true) < 1e-5
    assert log.losses[0] != pytest.approx(references(model, 3)[1].losses[0], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["one-rank", "slices"])
def test_its_optimizer_state_is_refused(loader, forks, references, tmp_path):
    start, _ = references((*MODEL, *LOSSES["all"]), 3)
    parallel = ("--expert-model-parallel-size", "2", "--save", tmp_path / "weights", "--save-interval", "2")
    forks.train(tmp_path, ranks=2, args=words((*MODEL, *LOSSES["all"]), 2, start, *parallel))
    with pytest.raises(AssertionError, match="--expert-model-parallel-size 2, this job has 1; above 1"):
        go_on(loader, "fp32", 4, ["--load", tmp_path / "weights"], forks, tmp_path)


@pytest.mark.slow
def test_what_is_loaded_is_what_was_saved(trainings, forks, tmp_path):
    """Each weight and each moment: saved again under another layout without a step between."""
    weights, _ = trainings("samples", "fp32")
    saving = ["--load", weights, "--save", tmp_path, "--save-interval", "3", "--override-opt-param-scheduler"]
    go_on("replicas", "fp32", 2, saving, forks, tmp_path)
    before, after = (tensors_of(folder / "iter_0000002") for folder in (weights, tmp_path))
    assert before.keys() == after.keys()
    assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []


def test_a_plan_says_who_holds_the_experts(forks, references, tmp_path):
    """Megatron's flags for it are refused beside a plan whose stages differ, before anything is allocated."""
    plan = expert_layout("uneven", tmp_path)
    outcome = forks.launch(
        tmp_path,
        ranks=plan.ranks,
        args=[
            *job((*MODEL, *LOSSES["all"])),
            *("--train-iters", "1", "--hexi-plan", tmp_path / "uneven.yaml"),
            *("--expert-model-parallel-size", "2"),
        ],
        entry=ENTRY,
    )
    assert set(outcome.codes) == {2}
    assert "--expert-model-parallel-size does not work with" in "".join(outcome.output)
