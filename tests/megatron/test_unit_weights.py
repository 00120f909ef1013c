"""The table of how a unit's ranks hold each weight is what two ranks show beside one, for every layer.

Every training of the tests that is forked looks its weights up, too (`tests/megatron/forked.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatron_hexi.megatron.unit_weights import HOLDINGS
from megatron_hexi.plan import Domain, Group, JobTerms, Member, Plan, Replica, Stage, Workload
from tests.megatron.conftest import job
from tests.megatron.forked import Forks, Trainer
from tests.megatron.option_cases import FULL, LATENT, LATENT_SPEC, NORMED_LATENT, NORMED_LATENT_SPEC, SINKS
from tests.megatron.test_option_training import steps
from tests.megatron.test_stages_states import QWEN, ROUTED
from tests.megatron.test_state_layers import LINEAR, MAMBA
from tests.megatron.test_uneven_training import SEQ_LENGTH
from tests.megatron.unit_gradients import PLAIN, ROUNDING, Weight, rows_asked, weights_of

ENTRY = "tests.megatron.unit_gradients"
EXPERTS = 8
#: Layers of Megatron Bridge, which `test_bridge_tuning.py` and `test_bridge_models.py` show.
BRIDGE = ("ParallelLinearAdapter", "Qwen3VLVisionPatchMerger")
LAYER_NORM = ("--normalization", "LayerNorm")
NORMED = tuple(word for word in NORMED_LATENT if word != "--disable-bias-linear")


@dataclass(frozen=True)
class Model:
    """A model, and how it may be trained.

    Attributes:
        words: its arguments.
        layers: their number.
        reference: more arguments of one rank.
        without: arguments of all jobs that it has not.
        modes: with and without sequence parallelism, or one of both.
    """

    words: tuple[str, ...]
    layers: int = 1
    reference: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    modes: tuple[bool, ...] = (True, False)

    @property
    def has_experts(self) -> bool:
        return "--num-experts" in self.words


def hybrid(pattern: str, *words: str, modes: tuple[bool, ...] = (True, False)) -> Model:
    sizes = (*MAMBA[2:], *LINEAR)
    return Model(("--hybrid-layer-pattern", pattern, *sizes, *words), len(pattern), modes=modes)


GATED = (*ROUTED, "--moe-shared-expert-gate", "--disable-bias-linear")
MODELS = {
    "attention": Model(
        (
            *(
                *SINKS,
                *LAYER_NORM,
                "--qk-layernorm",
                "--add-qkv-bias",
                "--untie-embeddings-and-output-weights",
            ),
            *("--position-embedding-type", "learned_absolute"),
        ),
        without=("--swiglu",),
    ),
    "latent": Model((*NORMED, *LAYER_NORM), 1, NORMED_LATENT_SPEC),
    "latent-sinks": Model((*LATENT, *SINKS, "--no-rope-fusion"), 1, LATENT_SPEC),
    "states": hybrid("MGC*-", *LAYER_NORM),
    "experts": hybrid("*E", *GATED, modes=(True,)),
    "further-tokens": Model((*LAYER_NORM, "--mtp-num-layers", "1", "--attention-output-gate"), 1),
}
#: Only Transformer Engine's grouped experts train with biases.
BIASED = (
    *("--num-experts", str(EXPERTS), "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64"),
    *("--moe-token-dispatcher-type", "alltoall", "--no-bias-dropout-fusion", "--moe-grouped-gemm"),
)
MORE_MODELS = {
    "qwen": Model(QWEN, 3, modes=(True,)),
    "recomputed": Model((*MODELS["attention"].words, *FULL, "uniform")),
}


def plan_of(model: Model, ranks: int, is_stage: bool) -> Plan:
    """One unit for the whole model, in a stage with layers of its own or in a repeated one."""
    is_latent = "--multi-latent-attention" in model.words
    workload = Workload(
        *(SEQ_LENGTH, 6, 6 if is_latent or ranks == 3 else 2, 16),
        layers=model.layers,
        tensor_parallel=ranks,
        value_dim=24 if is_latent else None,
        experts=EXPERTS if model.has_experts and is_stage else None,
    )
    # Experts with biases cannot be cut.
    is_apart = is_stage and model.has_experts and "--disable-bias-linear" not in model.words
    bounds = [EXPERTS * rank // ranks for rank in range(ranks + 1)]
    experts = tuple(itertools.pairwise(bounds)) if is_apart else None
    member = Member(tuple(range(ranks)), SEQ_LENGTH, (0, 6 // ranks), experts=experts)
    domains = (Domain((Group(((0, SEQ_LENGTH),), (member,)),)),)
    if not is_stage:
        return Plan(workload, (Replica((Stage(domains),)),))
    replica = Replica((Stage(domains, layers=(0, model.layers)),), micro_batches=2)
    return Plan(workload, (replica,), job=JobTerms(micro_batch_size=2))


#: Gives a model's weights by name, and the rows of the table that name them.
type Compared = Callable[..., tuple[dict[str, Weight], set[tuple[str, str]]]]


def comparison(forks: Trainer, folder: Path, alone_under_plan: bool = False) -> Compared:
    """Give what compares a model on a unit with the model on one rank; each is trained once."""

    def words_of(model: Model) -> list[str | Path]:
        batches = ("--calculate-per-token-loss", "--eval-iters", "0", "--num-layers", str(model.layers))
        own = batches[:-2] if "--hybrid-layer-pattern" in model.words else batches
        return [word for word in (*job(model.words), *steps(1), *own) if word not in model.without]

    @functools.cache
    def alone(model: Model) -> Path:
        own = folder / f"{len(list(folder.iterdir()))}"
        plan = plan_of(model, 1, False) if alone_under_plan else None
        words = [*words_of(model), *(() if plan else model.reference)]
        forks.train(own, ranks=1, args=words, plan=plan, entry=ENTRY)
        return own

    @functools.cache
    def compared(
        model: Model,
        is_sequence: bool,
        ranks: int = 2,
        is_stage: bool | None = True,
        fault: str | None = None,
        more: tuple[str, ...] = (),
    ) -> tuple[dict[str, Weight], set[tuple[str, str]]]:
        one, own = alone(model), folder / f"{len(list(folder.iterdir()))}"
        words = [*words_of(model), *more, *(("--sequence-parallel",) if is_sequence else ())]
        words += [] if is_stage else ["--tensor-model-parallel-size", str(ranks)]
        words += [] if fault is None else ["--planted", fault]
        words += model.reference if is_stage is None else []  # without a plan
        plan = None if is_stage is None else plan_of(model, ranks, is_stage)
        forks.train(own, ranks=ranks, args=words, plan=plan, entry=ENTRY)
        return weights_of(one, own, ranks), rows_asked(own)

    return compared


@pytest.fixture(scope="module")
def compared(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    return comparison(forks, tmp_path_factory.mktemp("units"))


def check(found: dict[str, Weight]) -> None:
    """Weights are held as the table says, and summed so."""
    assert {name: weight for name, weight in found.items() if weight.shown != weight.said} == {}
    assert {name: weight for name, weight in found.items() if not weight.error < ROUNDING} == {}


def modes(models: dict[str, Model]) -> list[tuple[str, bool]]:
    return [(name, mode) for name, model in models.items() for mode in model.modes]


@pytest.mark.parametrize(("name", "is_sequence"), modes(MODELS))
def test_the_table_is_what_two_ranks_show(name: str, is_sequence: bool, compared: Compared):
    check(compared(MODELS[name], is_sequence)[0])


def test_each_row_is_shown_by_some_model(compared: Compared):
    """Transformer Engine's rows are shown by `test_te_training.py`, Bridge's by their own tests."""
    shown = set.union(*(compared(MODELS[name], is_sequence)[1] for name, is_sequence in modes(MODELS)))
    rows = {row for row in HOLDINGS if not row[1].startswith("te:") and row[0] not in BRIDGE}
    assert shown == rows - {("MoELayer", "router.bias")}


#: A model that shows the fault, and the names of weights that it concerns.
SHOWN_BY = {
    "sinks-as-copies": ("attention", True, ("softmax_offset",)),
    "output-layer-as-a-copy": ("attention", True, ("output_layer",)),
    "norm-of-heads-as-a-copy": ("states", False, ("out_norm",)),
    "gate-as-a-copy": ("experts", True, ("gate_weight",)),
    "a-holder-adds-nothing": ("experts", True, ("",)),
}


def test_whole_gradients_that_are_summed_show_in_each_copy(compared: Compared):
    found = compared(MODELS["attention"], False, fault="copies-unscaled")[0]
    copies = {name for name, weight in found.items() if weight.said == "whole"}
    assert copies == {name for name, weight in found.items() if weight.error > PLAIN} != set()


@pytest.mark.parametrize("fault", SHOWN_BY)
def test_a_wrong_sum_shows_in_each_weight_of_its_kind(fault: str, compared: Compared):
    name, is_sequence, words = SHOWN_BY[fault]
    found = compared(MODELS[name], is_sequence, fault=fault)[0]
    wrong = {name for name, weight in found.items() if weight.error > PLAIN}
    assert wrong == {name for name in found if any(word in name for word in words)}


@pytest.mark.parametrize(
    ("name", "is_sequence"),
    [
        pytest.param(
            name,
            mode,
            marks=[] if (name, mode) in (("latent", False), ("states", False)) else pytest.mark.slow,
        )
        for name, mode in modes(MODELS)
    ],
)
def test_a_repeated_stage_sums_by_the_table(name: str, is_sequence: bool, compared: Compared):
    check(compared(MODELS[name], is_sequence, is_stage=False)[0])


@pytest.mark.parametrize("is_stage", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_weight_that_is_not_in_the_table_is_refused_by_name(is_stage: bool, compared: Compared):
    named = r"codes \[2, 2\](.|\n)* parameter decoder.layers.0.mlp.linear_fc2.bias: it is not known how"
    with pytest.raises(AssertionError, match=named):
        compared(MODELS["attention"], True, is_stage=is_stage, fault="a-weight-unknown")


def evenly(model: Model) -> Model:
    """Give a model as many tokens as ranks can share without a plan."""
    return replace(model, words=(*model.words, "--seq-length", "128", "--max-position-embeddings", "128"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_sequence"),
    [
        (name, mode)
        for name, mode in modes(MODELS)
        if name
        != "latent-sinks"  # whose written-out attention does not say that ranks have sinks of their own
    ],
)
def test_which_gradients_megatron_sums_wrongly(name: str, is_sequence: bool, compared: Compared):
    """The claims of `docs/options.md` about trainings without a plan."""
    found = compared(evenly(MODELS[name]), is_sequence, is_stage=None)[0]
    wrong = {weight: one.error for weight, one in found.items() if not one.error < ROUNDING}
    print(f"{name}, {is_sequence=}: {max(wrong.values(), default=0.0):.2f}", *wrong)
    assert bool(wrong) == ("latent" in name or (name == "states" and not is_sequence))


@pytest.mark.slow
@pytest.mark.parametrize("is_sequence", [True, False])
def test_three_ranks_hold_weights_as_two(is_sequence: bool, compared: Compared):
    sizes = ("--num-query-groups", "6", "--ffn-hidden-size", "192", "--make-vocab-size-divisible-by", "96")
    words = (*MODELS["attention"].words, *sizes)
    check(compared(Model(words), is_sequence, ranks=3)[0])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_sequence"), modes(MORE_MODELS))
def test_further_models(name: str, is_sequence: bool, compared: Compared):
    check(compared(MORE_MODELS[name], is_sequence)[0])
