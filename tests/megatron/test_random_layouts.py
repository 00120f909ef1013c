"""Random layouts train as one rank: with ranks that hold nothing of something, interleaved, grouped experts.

All numbers that Megatron logs, each weight and each moment are compared with one rank's. And no collective
may be entered on a condition that differs between ranks: what each posts is compared call by call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from torch import Tensor

from megatron_hexi.plan import Plan, proportional_plan
from tests.megatron import te_emulated
from tests.megatron import test_stages_experts as experts
from tests.megatron import test_stages_training as dense
from tests.megatron.checkpoint_contents import tensors_of
from tests.megatron.conftest import References, job
from tests.megatron.forked import Forks
from tests.megatron.posting import posted
from tests.megatron.test_stages_states import CONVOLUTION
from tests.megatron.test_te_training import EmulatedTe
from tests.megatron.test_uneven_training import WORKLOAD
from tests.support.drawn_plans import FEATURES, drawn_plan
from tests.support.expert_layouts import EXPERTS
from tests.support.nccl_rules import replay

ITERATIONS = 3
WITH_EXPERTS = (*experts.MODEL, *experts.LOSSES["all"])
MODELS = {
    "tied": dense.MODEL,
    "untied": (*dense.MODEL, *dense.UNTIED),
    "experts": WITH_EXPERTS,
    "convolution": (*dense.MODEL, *CONVOLUTION),
    "convolution-experts": (*WITH_EXPERTS, *CONVOLUTION[:1], "C*CE-C", *CONVOLUTION[2:]),
    # Of Transformer Engine's layers.
    "grouped": (*WITH_EXPERTS, "--moe-grouped-gemm"),
}
OPTIMIZERS = {
    # Adam's step is not exact where a gradient is hardly more than rounding.
    "adam": ("--adam-eps", "1e-3", "--clip-grad", "0"),
    "sgd": ("--optimizer", "sgd"),
}
#: Arguments beside a plan.
JOBS = (
    (),
    ("--overlap-grad-reduce", "--ddp-num-buckets", "7"),
    dense.SEQUENCE,
    (*dense.SEQUENCE, *dense.SMALL_BUCKETS),
    ("--use-distributed-optimizer",),
)
#: All that Megatron logs and measures, with barriers between.
LOGGED = (
    *("--log-num-zeros-in-grad", "--log-throughput", "--timing-log-level", "2"),
    *("--eval-interval", "2", "--eval-iters", "1"),
)


@dataclass(frozen=True)
class Trial:
    """A training.

    Attributes:
        model: name in `MODELS`.
        optimizer: name in `OPTIMIZERS`.
        job: arguments beside the plan.
        plan: the plan; ``None``: one rank.
    """

    model: str
    optimizer: str
    job: tuple[str, ...] = ()
    plan: Plan | None = None


#: By family of layouts: models, and what draws the properties of a plan.
FAMILIES: dict[str, tuple[tuple[str, ...], Callable[[Random, str], set[str]]]] = {
    "empty": (
        ("tied", "untied", "experts"),
        lambda random, model: {
            random.choice(
                ["no tokens", "no heads", "no state", *(["no experts"] if model == "experts" else [])]
            ),
            random.choice(FEATURES),
        },
    ),
    "interleaved": (
        ("tied", "untied", "experts"),
        lambda random, _: {"interleaved", random.choice(FEATURES)},
    ),
    "grouped": (("grouped",), lambda random, _: {random.choice(FEATURES)}),
    "convolution": (
        ("convolution", "convolution", "convolution-experts"),
        lambda random, _: {random.choice(["no tokens", *FEATURES])},
    ),
}


def trial(family: str, seed: int) -> Trial:
    """Return the random training of a family with this number."""
    random, (models, wanted) = Random(seed), FAMILIES[family]
    model, optimizer, arguments = (random.choice([*options]) for options in (models, OPTIMIZERS, JOBS))
    has_experts = model in ("experts", "grouped", "convolution-experts")
    workload = replace(WORKLOAD, layers=dense.LAYERS, experts=EXPERTS if has_experts else None)
    ranks = random.choice([2, 3, 3, 4] if family == "empty" else [2, 3, 4, 5])
    if has_experts and dense.SEQUENCE[0] not in arguments:
        arguments = (*dense.SEQUENCE, *arguments)  # as Megatron asks of units of several ranks
    sizes = dense.MICRO_BATCH, ranks, dense.MICRO_BATCHES
    plan = drawn_plan(random, workload, *sizes, lambda: wanted(random, model))
    return Trial(model, optimizer, arguments, plan)


@dataclass(frozen=True)
class Trained:
    """A training's numbers of each line that Megatron logs, and the tensors that it saved in the end."""

    numbers: list[dict[str, float]]
    tensors: dict[str, Tensor]


type Train = Callable[[Path, Trial], Trained]
type Alone = Callable[[str, str], Trained]


@pytest.fixture(scope="module")
def te() -> Iterator[EmulatedTe]:
    if not te_emulated.is_available():
        pytest.skip("Transformer Engine's wheel is not unpacked: make environment")
    with EmulatedTe("tests.megatron.te_forked") as started:
        yield started


@pytest.fixture(scope="module")
def train(
    forks: Forks,
    references: References,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Train:
    grouped: list[Path] = []

    def weights_of(model: str) -> Path:
        if model != "grouped":
            return references(MODELS[model], 1)[0]
        if not grouped:
            grouped.append(tmp_path_factory.mktemp("grouped"))
            saving = ("--train-iters", "1", "--save", grouped[0], "--save-interval", "1", "--no-save-optim")
            emulated: Forks = request.getfixturevalue("te")
            emulated.train(grouped[0], ranks=1, args=[*job(MODELS[model]), *saving], plan=ONE_RANK)
        return grouped[0]

    def run(folder: Path, one: Trial) -> Trained:
        model = (*MODELS[one.model], *OPTIMIZERS[one.optimizer], *LOGGED)
        saving = ("--save", str(folder), "--save-interval", str(ITERATIONS))
        args = dense.words(model, ITERATIONS, weights_of(one.model), (*one.job, *saving))
        trainer, plan = forks, one.plan
        if one.model == "grouped":  # without a plan its attention would need a GPU
            trainer, plan = request.getfixturevalue("te"), one.plan or ONE_RANK
        ranks = 1 if plan is None else plan.ranks
        entry = "tests.megatron.posting"
        log = trainer.train(folder, ranks=ranks, args=args, plan=plan, entry=entry, timeout=250)
        replay(posted(folder, ranks), one_queue=False)
        saved = tensors_of(folder / f"iter_{ITERATIONS:07}")
        # The distributed optimizer saves the weights again.
        return Trained(
            numbers(log.output), {name: saved[name] for name in saved if ".state.param." not in name}
        )

    return run


ONE_RANK = proportional_plan(replace(WORKLOAD, layers=dense.LAYERS), [[[1]]])


@pytest.fixture(scope="module")
def alone(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    made: dict[tuple[str, str], Trained] = {}

    def of(model: str, optimizer: str) -> Trained:
        if (model, optimizer) not in made:
            folder = tmp_path_factory.mktemp(f"{model}-{optimizer}")
            made[model, optimizer] = train(folder, Trial(model, optimizer))
        return made[model, optimizer]

    return of


_LOGGED = re.compile(r"\] iteration +\d+/|validation loss at")
#: Seconds of the machine and what is computed of them, and what is logged under a plan alone.
_APART = re.compile("elapsed time|throughput|tokens/s|idle share|busy by rank|expert imbalance")

#: By how much numbers may be off beside their relative error: the last digit that is logged, and a gradient
#: of one weight, which may be exactly 0 if its parts are summed in another order. In grouped-40 the smallest
#: gradients are 1e-11, where sums of parts of 1e-4 are rounded to 7e-12.
_ROUNDED = {"grad norm": 1.001e-3, "num zeros": 1.0}


def numbers(output: str) -> list[dict[str, float]]:
    """Return the numbers of each line that Megatron logs of an iteration or an evaluation, by their names."""
    return [
        {
            name.strip(): float(value)
            for name, _, value in (part.partition(":") for part in line.split("|")[1:-1])
            if not _APART.search(name)
        }
        for line in output.splitlines()
        if _LOGGED.search(line)
    ]


#: Of each sort of empty rank and each order of ministages, by few trainings of one rank.
IN_CI = {*(("empty", seed) for seed in (14, 22, 24, 32, 35)), ("interleaved", 1), ("convolution", 0)}


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        pytest.param(family, seed, marks=() if (family, seed) in IN_CI else pytest.mark.slow)
        for family, count in {"empty": 300, "interleaved": 50, "grouped": 50, "convolution": 30}.items()
        for seed in range(count)
    ],
)
def test_training_is_that_of_one_rank(family: str, seed: int, train: Train, alone: Alone, tmp_path: Path):
    one = trial(family, seed)
    found, true = train(tmp_path, one), alone(one.model, one.optimizer)
    assert len(found.numbers) == len(true.numbers) > ITERATIONS
    for said, expected in zip(found.numbers, true.numbers, strict=True):
        assert said.keys() == expected.keys()
        for name, number in expected.items():
            assert math.isclose(said[name], number, rel_tol=1e-5, abs_tol=_ROUNDED.get(name, 0.0)), name
    off = differences(found.tensors, true.tensors)
    print(f"{one.model}, {one.optimizer}: {len(off)} tensors within {max(off.values()):.1e}")
    assert max(off.values()) < 1e-5, off


def differences(found: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, float]:
    """Return how far each tensor is off, as a part of its largest element."""
    assert found.keys() == true.keys()
    return {
        name: float((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-30))
        for name, tensor in true.items()
        if tensor.is_floating_point()
    }
