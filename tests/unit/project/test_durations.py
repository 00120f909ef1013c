"""The quick tier: what `make quick` runs and leaves out."""

import json
import re
from pathlib import Path

import pytest

from tests.support import durations

REPOSITORY = Path(__file__).parents[3]
TOOK = {"tests/unit/plan/test_a.py::test_x": 0.5, "tests/unit/plan/test_a.py::test_y": 3.0}


@pytest.mark.parametrize(
    ("test", "changed", "runs"),
    [
        ("tests/unit/plan/test_a.py::test_x", set(), False),
        ("tests/unit/plan/test_a.py::test_x", {"plan"}, True),
        ("tests/unit/plan/test_a.py::test_x", {"mesh"}, False),
        ("tests/unit/plan/test_a.py::test_y", {"plan"}, False),
        ("tests/unit/plan/test_a.py::test_new", set(), True),
        ("tests/unit/test_top.py::test_new", set(), True),
        ("tests/unit/project/test_a.py::test_new", {"project"}, False),
        ("tests/megatron/test_a.py::test_x", set(), True),
    ],
)
def test_what_took_long_is_left_out_unless_its_package_is_changed(test, changed, runs):
    assert durations.is_quick(test, 0.3, TOOK, changed) == runs


def test_a_run_is_recorded_without_what_takes_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr(durations, "FILE", tmp_path / "durations.json")
    durations.write({"b[é]": 1.26, "a": 0.21, "c": 0.19})
    assert durations.read() == {"a": 0.2, "b[é]": 1.3}
    assert list(json.loads(durations.FILE.read_text())) == ["a", "b[é]"]


def test_the_ten_trainings_exist():
    """Pytest refuses a name that is not there, but only where `make quick` runs."""
    lines = (REPOSITORY / "tests" / "sentinels.txt").read_text().split()
    assert len(set(lines)) == 10
    for line in lines:
        path, _, rest = line.partition("::")
        assert re.search(rf"^def {rest.partition('[')[0]}\(", (REPOSITORY / path).read_text(), re.MULTILINE)
