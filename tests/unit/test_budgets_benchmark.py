"""The measurement of what a short look loses runs, and adds up."""

import json

import pytest

from benchmarks.budgets import Short, _row, main

CELL = "testbed/testbed-8/gpt-13b/256K/dp1"


def test_cells_are_planned_beside_what_is_known(capsys):
    assert main(["--only", CELL, "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["cell"] == CELL
    assert row["planning_s"] > 0
    assert -0.02 < row["slower"] < 0.2
    assert row["gap"] >= 0


def test_lines_add_up():
    shorts = [
        Short("a/1", 1.0, 0.0, 0.01, 0.01),
        Short("a/2", 2.0, 0.1, 0.05, 0.02),
        Short("a/3", 6, 0.02, 0, 0),
    ]
    assert _row(shorts) == ["3", "2.00", "6.00", "4.00%", "10.0%", "1.0%", "1.0%"]
    assert {short.suite for short in shorts} == {"a"}


def test_cells_that_there_are_not_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "moon/*"])
    assert "moon/*" in capsys.readouterr().err
