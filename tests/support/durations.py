"""The quick tier of the suite (`make quick`): which unit tests are left out, by what they took before.

`make durations` records `durations.json`. A test that is not in it counts as quick, so new ones run at once.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Set
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILE = TESTS / "durations.json"
#: Seconds from which on a test is recorded.
LISTED_FROM_S = 0.2
#: Limit for tests of a package with changes that are not committed, in place of a shorter one.
CHANGED_S = 2.0
#: Of the documentation and the packaging, not of code that is being changed.
LEFT_OUT = {"project"}


class Recorder:
    """Sums what each test takes, its fixtures included, and writes the file when the run has passed."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and not hasattr(session.config, "workerinput"):
            write(self._seconds)


def write(seconds: Mapping[str, float]) -> None:
    listed = {name: round(value, 1) for name, value in sorted(seconds.items()) if value >= LISTED_FROM_S}
    FILE.write_text(json.dumps(listed, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


def read() -> dict[str, float]:
    found: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def changed_packages() -> set[str]:
    """Packages with changes that are not committed; none outside a checkout."""
    command = ["git", "status", "--porcelain", "--", "megatron_hexi"]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    paths = (Path(line[3:].split(" -> ")[-1]) for line in done.stdout.splitlines())
    return {path.parts[1] for path in paths if len(path.parts) > 2}


def is_quick(test: str, at_most_s: float, seconds: Mapping[str, float], changed: Set[str]) -> bool:
    """Whether a test by its name (`tests/unit/plan/test_file.py::test_x`) runs; what is no unit test does."""
    parts = Path(test.partition("::")[0]).parts
    if parts[:2] != ("tests", "unit"):
        return True
    limit = max(at_most_s, CHANGED_S) if parts[2] in changed else at_most_s
    return parts[2] not in LEFT_OUT and seconds.get(test, 0.0) <= limit
