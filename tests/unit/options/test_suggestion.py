"""Suggestions in place of flags that Megatron does not have."""

from __future__ import annotations

import random

import pytest

from megatron_hexi.options.parser import known_flags
from megatron_hexi.options.registry import class_of
from megatron_hexi.options.suggestion import nearest_option


@pytest.mark.parametrize(
    ("flag", "option"),
    [
        ("--train-itrs", "--train-iters"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--use-flash-attention", "--use-flash-attn"),
        ("--global-batchsize", "--global-batch-size"),
        ("--use-gated-attention", "--attention-output-gate"),  # slime's name
        # Words of other programs, and those whose nearest option no plan trains with, or means the reverse.
        ("--rm-type", None),
        ("--use-megatron-fsd", None),
        ("--fp8-forma", None),
        ("--no-swiglu", None),
        ("--learning-rate", None),
    ],
)
def test_an_option_that_is_meant_is_suggested_or_none(flag, option):
    assert nearest_option(flag) == option


def test_no_suggestion_is_refused():
    letters = random.Random(1)
    for flag in letters.sample(sorted(known_flags()), 60):
        at = letters.randrange(3, len(flag))
        suggested = nearest_option(flag[:at] + flag[at + 1 :])
        assert suggested is None or class_of(suggested) != "refused"
