"""Fixtures of the tests of plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_hexi.plan import Plan, read_plan


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], Plan]:
    """Return a function that reads a plan from its text."""

    def read(text: str) -> Plan:
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        return read_plan(path)

    return read
