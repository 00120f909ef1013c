"""Weights that the planner counts from a file of arguments are those of the model that Megatron builds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_hexi.errors import HexiError
from megatron_hexi.models import read_model
from megatron_hexi.models.megatron_arguments import model_flags, model_from_arguments
from megatron_hexi.shell.words import unplaced
from tests.megatron.forked import Forks
from tests.megatron.launch import REPOSITORY, environment

Weigh = Callable[[list[str]], int | str]

#: What Megatron asks of every job, and has no part in its weights.
JOB = "--micro-batch-size 1 --seq-length 16 --train-iters 1 --lr 1 --transformer-impl local"
#: What Megatron's layers ask for without Transformer Engine and Apex.
WITHOUT_EXTENSIONS = "--no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion"
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 200 --max-position-embeddings 32"
)


@pytest.fixture(scope="module")
def weigh(forks: Forks) -> Iterator[Weigh]:
    """Megatron in a process of its own, which keeps this one free of its globals."""
    process = subprocess.Popen(
        [forks.python, "-m", "tests.megatron.weighing"],
        cwd=REPOSITORY,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    questions, answers = process.stdin, process.stdout
    assert questions is not None
    assert answers is not None

    def ask(words: list[str]) -> int | str:
        print(json.dumps(words), file=questions, flush=True)
        return json.loads(answers.readline())

    yield ask
    questions.close()
    process.wait(60)


def counted(words: list[str]) -> int:
    model = model_from_arguments(unplaced(words), Path("model.args"))
    return model.total_params + model.mtp_params


@st.composite
def models(draw: st.DrawFn) -> list[str]:
    """Flags that have a part in a model's weights, or are older spellings of such."""
    heads = draw(st.sampled_from([2, 4, 6]))
    words = [
        *("--num-layers", str(draw(st.integers(1, 3)))),
        *("--hidden-size", str(heads * draw(st.sampled_from([16, 24])))),
        *("--num-attention-heads", str(heads)),
        *("--vocab-size", str(draw(st.integers(1, 300)))),
        *("--max-position-embeddings", str(draw(st.integers(16, 40)))),
    ]
    options = [
        draw(st.sampled_from(["", "", "--swiglu", "--quick-geglu", "--squared-relu", "--openai-gelu"])),
        draw(st.sampled_from(["", "--disable-bias-linear", "--disable-bias-linear --add-qkv-bias"])),
        draw(st.sampled_from(["", "--normalization RMSNorm"])),
        draw(
            st.sampled_from(
                [
                    *("", "--position-embedding-type rope", "--position-embedding-type none"),
                    *(
                        "--use-rotary-position-embeddings",
                        "--use-rotary-position-embeddings --no-position-embedding",
                    ),
                ]
            )
        ),
        draw(st.sampled_from(["", f"--group-query-attention --num-query-groups {heads // 2}"])),
    ]
    for option in (
        *(
            "--untie-embeddings-and-output-weights",
            "--qk-layernorm",
            "--attention-output-gate",
            "--qk-l2-norm",
        ),
        *(
            "--softmax-type learnable",
            "--softmax-type off-by-one",
            "--kv-channels 12",
            "--ffn-hidden-size 96",
        ),
        *(
            "--make-vocab-size-divisible-by 40",
            "--padded-vocab-size 512",
            "--apply-layernorm-1p",
            "--spec local",
        ),
        *("--apply-residual-connection-post-layernorm", "--rotary-percent 0.5"),
    ):
        options.append(option if draw(st.integers(0, 3)) == 0 else "")
    return [*words, *" ".join(options).split()]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(words=models())
def test_weights_are_those_of_megatrons_model(words: list[str], weigh: Weigh):
    built = weigh([*JOB.split(), *words])
    assume(isinstance(built, int))  # else Megatron refuses these beside each other
    assert counted(words) == built


@pytest.mark.parametrize(
    "flags",
    [
        "--swiglu --use-rotary-position-embeddings",
        "--swiglu --position-embedding-type rope --attention-output-gate --disable-bias-linear",
        "--attention-output-gate --add-qkv-bias --disable-bias-linear --normalization RMSNorm",
        "--quick-geglu",
        "--qk-layernorm",
        "--softmax-type learnable --no-position-embedding --position-embedding-type rope",
        "--encoder-seq-length 16",
        "--mtp-num-layers 1 --position-embedding-type rope",
        (
            "--mtp-num-layers 2 --position-embedding-type rope --swiglu --normalization RMSNorm "
            "--untie-embeddings-and-output-weights"
        ),
    ],
)
def test_so_are_these(flags: str, weigh: Weigh):
    job = JOB.replace("--seq-length 16 ", "") if "--encoder-seq-length" in flags else JOB
    words = [*SMALL.split(), *flags.split()]
    assert weigh([*job.split(), *words]) == counted(words)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v3",
        "glm-4.5",
        "gpt-oss-120b",
        "kimi-k2",
        "mixtral-8x7b",
        "qwen3-235b-a22b",
        "qwen3-30b-a3b",
    ],
)
def test_so_are_two_layers_of_models_with_experts(name: str, weigh: Weigh):
    """In full size, with multi-token prediction: a dense layer, if the model has any, and experts."""
    model = read_model(name)
    experts, window = model.experts, model.window
    assert experts is not None
    if experts.layers:  # else all of them have experts
        assert not experts.layers[0]
        experts = replace(experts, layers=(False, True))
    if window is not None and window.layers:
        window = replace(window, layers=window.layers[:2])
    cut = replace(model, layers=2, experts=experts, window=window)
    words = [*model_flags(cut, 32), *WITHOUT_EXTENSIONS.split()]
    if experts.score_bias:
        words += ["--moe-router-score-function", "sigmoid"]
    assert cut.mtp_layers == model.mtp_layers
    assert weigh([*JOB.split(), *words]) == cut.total_params + cut.mtp_params == counted(words)


@pytest.mark.parametrize(
    "flags",
    [
        "--no-position-embedding",
        "--swiglu --squared-relu",
        "--swiglu --quick-geglu",
        "--encoder-num-layers 2",
    ],
)
def test_what_megatron_refuses_is_refused(flags: str, weigh: Weigh):
    words = [*SMALL.split(), *flags.split()]
    assert "Error" in str(weigh([*JOB.split(), *words]))
    with pytest.raises(HexiError, match=r"model\.args(, line 1)?: --"):
        counted(words)
