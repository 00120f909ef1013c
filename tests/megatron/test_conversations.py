"""Packed conversations (`--sft`) under uneven plans: the training of one rank."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import pytest

from megatron_hexi.plan import proportional_plan
from tests.megatron.conversations import VOCABULARY
from tests.megatron.option_cases import OVERLAPPED, PIPELINE, SEQUENCE, SINKS, WINDOW, Case
from tests.megatron.test_uneven_training import MODEL, WORKLOAD, largest_difference

#: Megatron pads conversations to a multiple of twice the context-parallel size; of all that are tried here.
PADDED_TO = 12
ENTRY = "tests.megatron.conversations"


@pytest.fixture(scope="module")
def conversations(tmp_path_factory) -> tuple[str, ...]:
    """Arguments to train on packs of conversations of very different length, each shorter than a sequence."""
    generator = random.Random(1)
    lines = []
    for _ in range(60):
        pack = []
        left = 120
        while left >= PADDED_TO:
            length = generator.choice([1, 1, 2, 3, 7]) * PADDED_TO
            if length > left:
                break
            text = "".join(chr(generator.randrange(32, 120)) for _ in range(length))
            cut = generator.randrange(2, length)
            roles = ("system", text[:1]), ("user", text[1:cut]), ("assistant", text[cut:])
            pack += [{"role": role, "content": content} for role, content in roles]
            left -= length
        lines.append(json.dumps({"messages": pack}))
    file = tmp_path_factory.mktemp("conversations") / "packs.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return (
        *(word for word in MODEL if word != "--mock-data"),
        *("--sft", "--data-path", str(file), "--vocab-size", str(VOCABULARY)),
        *("--micro-batch-size", "1", "--global-batch-size", "4", "--log-interval", "1"),
        *("--eval-iters", "0", "--split", "100,0,0"),
    )


@pytest.fixture(scope="module")
def on_one_rank(forks, conversations, tmp_path_factory):
    """For a model, weights and the training by a plan of one rank.

    Megatron's own attention takes no conversations without Transformer Engine, nor documents beside a window.
    Under a plan of one rank both are held against Megatron's layer with the mask written out, elsewhere.
    """

    @functools.cache
    def trained(model: tuple[str, ...]):
        folder = tmp_path_factory.mktemp("one-rank")
        common = {"ranks": 1, "plan": proportional_plan(WORKLOAD, [[[1]]]), "entry": ENTRY}
        saving = "--save", folder / "weights", "--save-interval", "1", "--no-save-optim", "--train-iters", "1"
        forks.train(folder, args=[*conversations, *model, *saving], **common)
        loading = "--load", folder / "weights", "--finetune", "--train-iters", "4"
        return folder / "weights", forks.train(folder, args=[*conversations, *model, *loading], **common)

    return trained


@pytest.mark.parametrize(
    ("name", "model", "job"),
    [
        pytest.param("groups", (*WINDOW, *SINKS), (), id="windows-sinks"),
        pytest.param("no-heads", (), SEQUENCE, marks=pytest.mark.slow, id="sequence-parallel"),
        pytest.param("groups", (), (*PIPELINE, *SEQUENCE), marks=pytest.mark.slow, id="pipeline"),
        pytest.param("replicas", (), OVERLAPPED, marks=pytest.mark.slow, id="replicas"),
    ],
)
def test_packed_conversations_train_as_on_one_rank(
    name, model, job, forks, conversations, on_one_rank, tmp_path: Path
):
    weights, reference = on_one_rank(model)
    case = Case(job=job, replicas=name == "replicas")
    plan = case.plans()[name]
    log = forks.train(
        tmp_path,
        ranks=plan.units * case.model_parallel,
        args=[*conversations, *model, *job, "--train-iters", "4", "--load", weights, "--finetune"],
        plan=plan,
        entry=ENTRY,
    )
    difference = largest_difference(log, reference)
    print(f"{len(log.losses)} iterations, losses and gradient norms within {difference:.1e}")
    assert difference < 1e-5
