"""The table of combinations: the page is current, and each cell is shown by a test, or refused."""

from __future__ import annotations

import pytest

from scripts.docs.combination_tests import IMPOSSIBLE, NOTES, TESTS
from scripts.docs.combinations import FEATURES, KINDS, refusal
from scripts.docs.combinations_page import combinations_page
from scripts.docs.pages import DOCS


def test_the_page_is_current():
    """Here, where each combination is asked for once: it takes longer than all other pages together."""
    current = (DOCS / "reference" / "combinations.md").read_text(encoding="utf-8") == combinations_page()
    assert current, "docs/reference/combinations.md is stale; run: python -m scripts.docs"


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
