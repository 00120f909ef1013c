"""Multi-token prediction on the last stage of replicas whose stages differ trains as on one rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_hexi.megatron import multi_token
from megatron_hexi.megatron.multi_token import MULTI_TOKEN_PATCHES
from tests.megatron.checkpoint_contents import tensors_of
from tests.megatron.conftest import job
from tests.megatron.faulty import assert_fault_is_found
from tests.megatron.option_cases import FURTHER_TOKENS
from tests.megatron.planted import MULTI_TOKEN_FAULTS
from tests.megatron.test_option_training import logged
from tests.megatron.test_stages_training import MODEL, SEQUENCE, SMALL_BUCKETS, UNTIED, Case, words
from tests.megatron.test_uneven_training import largest_difference

#: A replica of two stages, in whose last one two groups interleave their tokens, beside one of one stage.
REPLICAS = """\
- micro_batches: 3
  stages:
  - {layers: [0, 4], domains: [{ranks: [0]}]}
  - layers: [4, 6]
    domains:
    - groups:
      - segments: [[0, 40], [80, 127]]
        members:
        - {ranks: [1], tokens: 64, heads: [0, 4]}
        - {ranks: [2], tokens: 23, heads: [4, 6]}
      - segments: [[40, 80]]
        members: [{ranks: [3], tokens: 40, heads: [0, 6]}]
- micro_batches: 1
  stages:
  - {layers: [0, 6], domains: [{ranks: [4], state: 3}]}
"""
#: A last stage in which a unit of two ranks and a single one share the samples of each micro-batch.
SAMPLES = """\
- micro_batches: 4
  stages:
  - {layers: [0, 3], domains: [{ranks: [0, 1]}]}
  - layers: [3, 6]
    domains: [{ranks: [2, 3], samples: 3, state: 3}, {ranks: [4], samples: 1}]
"""
MINISTAGES = """\
- micro_batches: 3
  stages:
  - {layers: [0, 4], ministages: 2, domains: [{ranks: [0], samples: 3}, {ranks: [1], samples: 1}]}
  - {layers: [4, 6], ministages: 2, domains: [{ranks: [2], samples: 1}, {ranks: [3], samples: 3}]}
- micro_batches: 1
  stages:
  - {layers: [0, 6], domains: [{ranks: [4]}]}
"""
DEALT = """\
- micro_batches: 4
  stages:
  - {layers: [0, 2], ministages: 2, domains: [{ranks: [0]}]}
  - layers: [2, 6]
    ministages: 2
    recompute: full
    offload: [parameters, optimizer, activations]
    domains: [{ranks: [1], micro_batches: 3}, {ranks: [2], micro_batches: 1}]
"""

CASES = {
    "replicas": Case(REPLICAS, FURTHER_TOKENS),  # its weights and gradients, one by one, say more
    "samples": Case(SAMPLES, (*FURTHER_TOKENS, *UNTIED), (*SEQUENCE, *SMALL_BUCKETS)),
    "ministages": Case(MINISTAGES, FURTHER_TOKENS, slow=False),
    "dealt": Case(DEALT, FURTHER_TOKENS),
    "untied-replicas": Case(REPLICAS, (*FURTHER_TOKENS, *UNTIED), SMALL_BUCKETS),
    "tied-samples": Case(SAMPLES, FURTHER_TOKENS, SEQUENCE),
}
HEADS = ("mtp_1 loss", "mtp_2 loss")
ITERATIONS = 3


def runs(names):
    """Three iterations of the quick cases, and on request of the rest."""
    return [
        pytest.param(name, id=name, marks=[pytest.mark.slow] if CASES[name].slow else []) for name in names
    ]


def compare(log, reference, rounding=1e-5):
    """Losses, norms and the losses of both heads are those of one rank."""
    difference, of_heads = largest_difference(log, reference), difference_of_heads(log, reference)
    print(f"{len(log.losses)} iterations: losses and norms within {difference:.1e}, heads {of_heads:.1e}")
    assert difference < rounding
    assert of_heads < rounding


def difference_of_heads(log, reference):
    """Largest difference of the heads' logged losses."""
    true, found = ([logged(one.output, head) for head in HEADS] for one in (reference, log))
    assert [len(losses) for losses in true] == [len(reference.losses)] * len(HEADS)
    return max(
        abs(here / there - 1)
        for pair in zip(found, true, strict=True)
        for here, there in zip(*pair, strict=True)
    )


def difference_with_heads(log, reference):
    return max(largest_difference(log, reference), difference_of_heads(log, reference))


@pytest.mark.parametrize("name", runs(CASES))
def test_training_is_that_of_one_rank(name, forks, references, documents, tmp_path):
    """Some samples have fewer tokens that count than others, and the last one never counts for a head."""
    case = CASES[name]
    model = (*MODEL, *case.model, *documents, "--eod-mask-loss")
    weights, reference = references(model, ITERATIONS)
    plan = case.plan(tmp_path)
    log = forks.train(tmp_path, ranks=plan.ranks, args=words(model, ITERATIONS, weights, case.job), plan=plan)
    compare(log, reference)


#: The layout that shows a fault.
SHOWN_BY = {
    "labels-not-shifted-over-borders": "replicas",
    "embedding-of-the-last-stage-not-summed": "untied-replicas",
    "counted-in-a-domain": "samples",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", MULTI_TOKEN_FAULTS)
def test_the_comparison_finds_a_fault(fault, forks, references, documents, tmp_path):
    name = SHOWN_BY[fault]
    model = (*MODEL, *CASES[name].model, *documents, "--eod-mask-loss")
    weights, reference = references(model, ITERATIONS)
    plan = CASES[name].plan(tmp_path)
    args = words(model, ITERATIONS, weights, CASES[name].job)
    assert_fault_is_found(fault, args, plan, reference, forks, tmp_path, difference_with_heads)


@pytest.mark.parametrize("name", ["replicas", pytest.param("tied-samples", marks=pytest.mark.slow)])
def test_each_weight_and_its_gradient_is_that_of_one_rank(name, forks, references, documents, tmp_path):
    """After one step of SGD: its momentum is the gradient, clipped."""
    case = CASES[name]
    model = (*MODEL, *case.model, *documents, "--eod-mask-loss")
    weights, _ = references(model, ITERATIONS)
    saved = []
    for folder, plan in ((tmp_path / "one", None), (tmp_path / "plan", case.plan(tmp_path))):
        args = words(
            (*model, "--optimizer", "sgd"),
            1,
            weights,
            ("--save", str(folder / "saved"), "--save-interval", "1"),
        )
        forks.train(folder, ranks=plan.ranks if plan else 1, args=[*args, *case.job], plan=plan)
        saved.append(tensors_of(folder / "saved" / "iter_0000001"))
    true, found = saved
    assert found.keys() == true.keys()
    differences = {
        key: float((found[key] - one).abs().max() / one.abs().max())
        for key, one in true.items()
        if one.is_floating_point() and one.abs().max() > 0
    }
    for kind in ("mtp.layers.1", "eh_proj", "enorm", "momentum_buffer", "word_embeddings"):
        assert any(kind in key for key in differences), kind
    print(f"{len(differences)} tensors within {max(differences.values()):.1e}")
    assert max(differences.values()) < 2e-4, differences


#: Who saves and loads, on how many ranks without a plan.
PLACES = {"one-rank": None, "replicas": REPLICAS, "samples": SAMPLES, "ministages": MINISTAGES}


@pytest.fixture(scope="module")
def trainings(forks, references, tmp_path_factory):
    """Three iterations under a layout, saved after the first, by its name."""
    made: dict[str, tuple[Path, object]] = {}

    def train(place):
        if place not in made:
            folder = tmp_path_factory.mktemp(place)
            start, _ = references((*MODEL, *FURTHER_TOKENS), ITERATIONS)
            saving = ("--load", start, "--finetune", "--save", folder / "weights", "--save-interval", "1")
            log = go_on(place, saving, forks, folder)
            (folder / "weights" / "latest_checkpointed_iteration.txt").write_text("1")
            made[place] = folder / "weights", log
        return made[place]

    return train


def go_on(place, more, forks, folder):
    """Train three iterations under a layout, or on one rank."""
    replicas = PLACES[place]
    plan = replicas and Case(replicas).plan(folder)
    steps = ("--train-iters", str(ITERATIONS), "--log-interval", "1")
    args = [*job((*MODEL, *FURTHER_TOKENS)), *steps, *SEQUENCE, *more]
    return forks.train(folder, ranks=plan.ranks if plan else 1, args=args, plan=plan or None)


@pytest.mark.slow  # always: `test_each_weight_and_its_gradient_is_that_of_one_rank` saves
@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        pytest.param(*pair, id="-to-".join(pair))
        for pair in ((saver, loader) for saver in PLACES for loader in PLACES if saver != loader)
    ],
)
def test_any_layout_goes_on_from_any_other(saver, loader, trainings, forks, tmp_path):
    weights, whole = trainings(saver)
    log = go_on(loader, ("--load", weights), forks, tmp_path)
    assert log.iterations == [2, 3]
    assert log.losses == pytest.approx(whole.losses[1:], rel=1e-5)
    assert log.grad_norms == pytest.approx(whole.grad_norms[1:], rel=1e-5)


def test_both_gradients_of_a_tied_copy_are_added(monkeypatch):
    """Kernels that add to `main_grad` run on GPUs only; here what tells DDP to add the other gradient too."""
    (patch,) = [
        one for one in MULTI_TOKEN_PATCHES if one.target.endswith("setup_embeddings_and_output_layer")
    ]
    monkeypatch.setattr(multi_token, "active_session", lambda: SimpleNamespace(stages=object()))
    for first in (False, True):
        weight, own = SimpleNamespace(zero_out_wgrad=False), SimpleNamespace(weight="its own")
        model = SimpleNamespace(
            share_embeddings_and_output_weights=True,
            pre_process=first,
            post_process=True,
            mtp_process=True,
            output_layer=own,
            shared_embedding_or_output_weight=lambda weight=weight: weight,
        )
        patch.build(lambda self: None)(model)
        assert weight.zero_out_wgrad is not first
        assert own.weight == ("its own" if first else None)
