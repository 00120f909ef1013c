"""The page of Megatron's options says what the registry says, and names tests that exist."""

from __future__ import annotations

import subprocess
from pathlib import Path

from megatron_hexi.options.kinds import Supported
from megatron_hexi.options.page import page
from megatron_hexi.options.refusals import refused
from megatron_hexi.options.rules import OPTIONS

REPOSITORY = Path(__file__).parents[2]


def test_the_page_is_current():
    assert (REPOSITORY / "docs" / "options.md").read_text() == page(), (
        "run: python -m megatron_hexi.options.page > docs/options.md"
    )


def test_every_option_names_a_test_that_exists(forks):
    named = {option.test for options in OPTIONS.values() for option in options}
    files = sorted({test.partition("::")[0] for test in named})
    collecting = [forks.python, "-m", "pytest", "--collect-only", "-q", "-m", "slow or not slow", *files]
    result = subprocess.run(
        collecting, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True
    )
    assert named - set(result.stdout.splitlines()) == set()


def test_an_option_is_listed_once():
    refusals = [option.name for option in refused()]
    assert len(refusals) == len(set(refusals))
    for options in OPTIONS.values():
        flags = [option.flags for option in options if isinstance(option, Supported)]
        assert len(flags) == len(set(flags))
