"""Options that Megatron's own checks stop are refused before: by a rule each, alone, and among others."""

from __future__ import annotations

import contextlib
from argparse import ArgumentParser
from collections import Counter
from random import Random

import pytest

from megatron_hexi.errors import HexiError
from tests.megatron.contradictions import CONTRADICTIONS, with_words
from tests.megatron.one_rank_jobs import megatron_parser, printed_flags, refused_by_megatron
from tests.megatron.stopped_options import found_stopped
from tests.support.one_rank_words import JOBS, allowed_rows, choices, read_stopped
from tests.support.plans import SHARE


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    return megatron_parser()


def test_megatron_refuses_what_each_rule_for_it_refuses(parser, tmp_path):
    """And nothing of the job without these words, so no rule refuses what would train."""
    for name, words in CONTRADICTIONS.items():
        job = with_words(JOBS["rotary"].split(), words)
        assert refused_by_megatron(job, parser, held=False), name
        with pytest.raises(HexiError):
            printed_flags(" ".join(job), tmp_path)


def test_megatron_takes_what_is_printed_for_random_pairs_of_options(parser, tmp_path):
    random, words = Random(1), choices(allowed_rows())
    taken: Counter[str] = Counter()
    for _ in range(max(30, round(300 * SHARE))):
        kind = random.choice(list(JOBS))
        job = [JOBS[kind], *(" ".join(random.choice(words)) for _ in range(2))]
        with contextlib.suppress(HexiError):  # refused by name
            flags = printed_flags(" ".join(job), tmp_path)
            assert refused_by_megatron(flags, parser) == "", job[1:]
            taken[kind] += 1
    assert taken.keys() == JOBS.keys()


@pytest.mark.slow
def test_what_megatron_stops_of_single_options_is_recorded(parser):
    """`tests/unit/options/test_stopped_options.py` reads it; ``python -m tests.megatron.stopped_options``."""
    assert found_stopped(parser) == read_stopped()
