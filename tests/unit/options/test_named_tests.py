"""The rules of Megatron's options, and the page of combinations, name tests that exist."""

from __future__ import annotations

import subprocess
from pathlib import Path

from megatron_hexi.options.kinds import Replaced, Supported
from megatron_hexi.options.refusals import OPTIONS, refused
from scripts.docs.combination_tests import TESTS
from tests.conftest import COLLECTED

REPOSITORY = Path(__file__).parents[3]


def test_every_option_and_combination_names_a_test_that_exists(request):
    rules = [option for options in OPTIONS.values() for option in options]
    named = {option.test for option in rules if not isinstance(option, Replaced)}
    named |= {test for tests in TESTS.values() for test in tests.values()}
    files = {test.partition("::")[0] for test in named}
    collected = request.config.stash[COLLECTED]
    if not files <= {test.partition("::")[0] for test in collected}:
        collected = collect(request.getfixturevalue("forks").python, files)
    assert named - collected == set()


def collect(python: Path, files: set[str]) -> set[str]:
    """Names of the tests in some files, where this run was given others."""
    command = [str(python), "-m", "pytest", "--collect-only", "-q", "-m", "slow or not slow", *sorted(files)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=250, check=True)
    return set(result.stdout.splitlines())


def test_an_option_is_listed_once():
    refusals = [option.name for option in refused()]
    assert len(refusals) == len(set(refusals))
    for options in OPTIONS.values():
        flags = [option.flags for option in options if isinstance(option, Supported)]
        assert len(flags) == len(set(flags))
