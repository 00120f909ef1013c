"""The measurement of what the planner's mechanisms are worth: removes them, keeps results, and judges."""

import json
from collections import Counter
from math import inf
from pkgutil import resolve_name

import pytest

from benchmarks.ablation import __main__ as ablation
from benchmarks.ablation.__main__ import WHOLE, Result, main, plan_cell, row_of
from benchmarks.ablation.cells import all_cells
from benchmarks.ablation.mechanisms import MECHANISMS

#: Takes half a second to plan.
QUICK = "pair llama3-8b"


def test_there_are_fifty_cells_of_five_kinds():
    cells = all_cells()
    kinds = Counter(cell.kind for cell in cells)
    assert kinds == {"free": 23, "fixed": 15, "kinds": 6, "large": 3, "hopeless": 3}
    assert len({cell.name for cell in cells}) == 50
    assert all(len(cell.cluster.ranks) >= 104 for cell in cells if cell.kind == "large")


@pytest.mark.parametrize("name", MECHANISMS)
def test_each_mechanism_is_removed_and_comes_back(name):
    mechanism = MECHANISMS[name]
    present = resolve_name(f"megatron_hexi.{mechanism.seam}")
    with mechanism.removed():
        assert resolve_name(f"megatron_hexi.{mechanism.seam}") is mechanism.without
    assert resolve_name(f"megatron_hexi.{mechanism.seam}") is present is not mechanism.without


def test_results_are_kept_and_not_planned_again(tmp_path, capsys, monkeypatch):
    words = ["--cells", QUICK, "--mechanisms", "polish", "floor", "--output", str(tmp_path / "kept.json")]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["mechanism"], row["cells"]) for row in rows] == [("polish", 1), ("floor", 1)]
    assert rows[0]["with_s"] > 0
    monkeypatch.setattr(ablation, "plan_cell", None)
    assert main(words) == 0
    assert "| polish | 1 | 0 | 0 |" in capsys.readouterr().out
    document = json.loads((tmp_path / "kept.json").read_text())
    (tmp_path / "kept.json").write_text(json.dumps(document | {"sources": "others"}))
    with pytest.raises(SystemExit):
        main(words)
    assert "give another --output" in capsys.readouterr().err


def test_a_plan_that_takes_too_long_is_cut_off():
    (cell,) = (cell for cell in all_cells() if cell.name.startswith(QUICK))
    result = plan_cell(cell, WHOLE, 0.05)
    assert result.cut
    assert result.seconds is None


@pytest.mark.parametrize(
    ("before", "after", "verdict", "slower"),
    [
        (Result(10, 1), Result(10.02, 1), "should go", {}),
        (Result(10, 1), Result(10.04, 1), "stays", {"cell": pytest.approx(0.004)}),
        (Result(10, 1), Result(None, 1), "stays", {"cell": inf}),
        (Result(10, 1), Result(10, 1.1), "stays: saves time", {}),
        (Result(None, 1), Result(10, 1), "should go", {}),
        (Result(10, 1), Result(None, 9, cut=True), "not run", {}),
    ],
)
def test_a_mechanism_stays_for_a_slower_cell_or_for_time(before, after, verdict, slower):
    row = row_of("polish", {"cell": {WHOLE: before, "polish": after}, "other": {WHOLE: before}})
    assert row.verdict == verdict
    assert row.slower == slower


def test_a_cell_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--cells", "nowhere"])
    assert "no such cell" in capsys.readouterr().err
