"""The generator of the sweep's combinations."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests.megatron.option_pairs import Choice, all_pairs


@given(st.lists(st.integers(1, 5), min_size=2, max_size=6))
def test_every_pair_is_there(sizes):
    factors = {f"f{number}": [str(value) for value in range(size)] for number, size in enumerate(sizes)}
    rows = all_pairs(factors, lambda choice: True)
    assert len(rows) <= len(list(product(*factors.values())))
    for first, second in combinations(factors, 2):
        found = {(row[first], row[second]) for row in rows}
        assert found == set(product(factors[first], factors[second]))


def test_what_cannot_stand_together_does_not():
    factors = {"a": ["1", "2"], "b": ["1", "2"], "c": ["1", "2", "3"]}

    def allowed(choice: Choice) -> bool:
        return not (choice.get("a") == "1" and choice.get("b") == "2")

    rows = all_pairs(factors, allowed)
    assert all(map(allowed, rows))
    assert {(row["a"], row["b"]) for row in rows} == {("1", "1"), ("2", "1"), ("2", "2")}
    assert {(row["b"], row["c"]) for row in rows} == set(product(factors["b"], factors["c"]))
