"""The recorded options are those of the installed Megatron's own parser: all of them, and no others."""

from __future__ import annotations

from argparse import ArgumentParser
from enum import Enum

import megatron.core
import pytest

from megatron_hexi.megatron.arguments import add_hexi_arguments
from megatron_hexi.megatron.parser_rows import installed_rows, rows_of
from megatron_hexi.options.parser import HEXI_ROWS, parse_words, read_rows, series
from megatron_hexi.shell.words import Word

VERSION = series(megatron.core.__version__)
WORDS = [
    *("--num-layers", "2", "--hidden-size=64", "--bf16", "--window-size", "(8,0)"),
    *("--window-attn-skip-freq", "2"),
    *("--no-position-embedding", "--attention-backend", "flash", "--recompute-modules", "mlp", "core_attn"),
    *("--no-rl-skip-bos-token", "--lr", "1e-4", "--moe-router-load-balancing-type", "aux_loss", "sinkhorn"),
    *("--spec", "local", "--rotary-percent", ".5", "--onnx-safe", "no"),
]


def megatron_parser() -> ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_hexi_arguments(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))


def plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.name
    return [plain(item) for item in value] if isinstance(value, list) else value


def test_every_option_of_the_installed_parser_is_recorded():
    recorded = {
        row.flags: row._replace(versions=(VERSION,)) for row in read_rows() if VERSION in row.versions
    }
    assert recorded == {row.flags: row for row in installed_rows()}


def test_so_are_ours():
    def without_types(rows):
        return [row._replace(type="", versions=()) for row in rows]

    assert without_types(HEXI_ROWS) == without_types(rows_of(add_hexi_arguments(ArgumentParser()), VERSION))


@pytest.mark.parametrize("words", [[], WORDS], ids=["defaults", "words"])
def test_words_are_parsed_as_megatron_does(words):
    theirs = {name: plain(value) for name, value in vars(megatron_parser().parse_args(words)).items()}
    ours = vars(parse_words([Word(word, 1) for word in words], "job.args").args)
    assert ours == theirs
