"""Every option of Megatron 0.17 to 0.19 has one class, and nothing else has one."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from megatron_hexi.options.parser import VERSIONS, known_flags, read_rows
from megatron_hexi.options.refusals import refused
from megatron_hexi.options.registry import (
    COUNTED,
    FREE,
    RESTRICTING,
    class_and_reason,
    class_of,
    counts,
    nearest_option,
    table,
)


def test_every_option_of_every_version_has_one_class():
    assert all(class_and_reason(flag)[1] for flag in known_flags())
    for version in VERSIONS:
        assert counts()[version].total() == sum(
            len(row.flags) for row in read_rows() if version in row.versions
        )
    print(table())  # pytest -s


def test_lists_and_rules_name_options_that_there_are():
    words = list(
        chain(*(text.split() for reasons in (COUNTED, FREE, RESTRICTING) for text in reasons.values()))
    )
    assert len(words) == len(set(words))
    for word in words:
        named = [
            flag for flag in known_flags() if flag == word or (word[-1] == "*" and flag.startswith(word[:-1]))
        ]
        assert named, word
    assert {rule.option for rule in refused()} <= known_flags()


@pytest.mark.parametrize(
    ("flag", "found"),
    [
        ("--use-rotary-position-embeddings", "counted"),
        ("--attention-output-gate", "counted"),
        ("--lr", "free"),
        ("--persistent-save-interval", "free"),
        ("--sft", "restricting"),
        ("--num-experts", "restricting"),
        ("--kv-lora-rank", "restricting"),
        ("--dataloader-inter-document-masking", "restricting"),
        ("--fp8-format", "counted"),
        ("--fp4-format", "refused"),
        ("--attention-backend", "replaced"),
        ("--check-for-spiky-loss", "refused"),
        ("--batch-size", "refused"),
    ],
)
def test_classes_by_hand(flag, found):
    assert class_of(flag) == found


@pytest.mark.parametrize(
    ("flag", "option"),
    [
        ("--train-itrs", "--train-iters"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--use-flash-attention", "--use-flash-attn"),
        ("--global-batchsize", "--global-batch-size"),
        ("--fp8-forma", "--fp8-format"),
        ("--use-gated-attention", "--attention-output-gate"),  # slime's name
        # Words of other programs, and those whose nearest option no plan trains with, or means the reverse.
        ("--rm-type", None),
        ("--use-megatron-fsd", None),
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
