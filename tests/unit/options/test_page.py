"""The pages of Megatron's options and of combinations say what the code says, and name tests that exist."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megatron_hexi.options.kinds import Supported
from megatron_hexi.options.page import page
from megatron_hexi.options.refusals import refused
from megatron_hexi.options.rule_table import OPTIONS
from scripts.docs.combination_tests import IMPOSSIBLE, NOTES, TESTS
from scripts.docs.combinations import FEATURES, KINDS, refusal

REPOSITORY = Path(__file__).parents[3]


def test_the_page_is_current():
    assert (REPOSITORY / "docs" / "options.md").read_text() == page(), (
        "run: python -m megatron_hexi.options.page > docs/options.md"
    )


def test_every_option_and_combination_names_a_test_that_exists(forks):
    named = {option.test for options in OPTIONS.values() for option in options}
    named |= {test for tests in TESTS.values() for test in tests.values()}
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


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_combination_works_as_a_test_shows_or_is_refused(kind, feature):
    """A dense decoder has every feature, so what another kind is refused for is the kind itself."""
    refused_because, test = refusal(kind, feature), TESTS[kind].get(feature)
    assert (refused_because is None) == (test is not None), refused_because
    assert refused_because is None or kind != "dense"
    assert (kind, feature) not in IMPOSSIBLE or refused_because is not None
    assert (kind, feature) not in NOTES or refused_because is None


def test_only_combinations_that_there_are_have_tests():
    assert set(TESTS) == set(KINDS)
    pairs = {(kind, feature) for kind, tests in TESTS.items() for feature in tests}
    assert pairs | IMPOSSIBLE | set(NOTES) <= {(kind, feature) for kind in KINDS for feature in FEATURES}
