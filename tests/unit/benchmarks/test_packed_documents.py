"""The table of packed documents: what it simulates, on a small cluster."""

import pytest

from benchmarks import packed_documents
from tests.support.costs import cluster


def test_uneven_shares_and_dealing_are_faster_than_equal_shares_on_mixed_gpus():
    known = cluster([("a", "DOUBLE", 1), ("b", "PLAIN", 1)], bandwidth=100)
    found = packed_documents.simulate(known, "gpt-3b", 8192, "lognormal:300,1.4", 8)
    assert found.equal_s is not None
    assert found.ring_s is not None
    assert found.equal_s <= found.ring_s * 1.02
    assert found.dealt_s < 0.9 * found.equal_s
    assert found.cut_s < 0.9 * found.equal_s


def test_rows_are_those_that_are_asked_for(monkeypatch, capsys):
    outcome = packed_documents.Outcome(None, 1.92, 2.0, 1.6)
    monkeypatch.setattr(packed_documents, "simulate", lambda *_: outcome)
    assert packed_documents.main(["--only", "16 A100 | lognormal:300,1.4 | 128K"]) == 0
    header, _, row = capsys.readouterr().out.splitlines()
    assert (
        row == "| 16 H100 + 16 A100 | lognormal:300,1.4 | 128K | - | 1.92 | 2.00 | 1.60 | - | 1.20x | 1.25x |"
    )
    assert header.count("|") == row.count("|")
    with pytest.raises(SystemExit):
        packed_documents.main(["--batch", "x"])
