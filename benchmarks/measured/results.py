"""What is kept of a scenario, as plain data, and its file."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

_DIGITS = 5


@dataclass(frozen=True)
class Measured:
    """One layout.

    Args:
        name: ``plan``, or the baselines' whose best layout it is.
        text: what it is.
        uniform: whether all of its GPUs get equal tokens and heads.
        gpus: how many it uses.
        predicted_s: an iteration by the cost model, from the probe's cluster file.
        seconds: of the timed iterations, round by round.
        failed: why there are none.
        beside: name of the layout that it is compared with; empty: the plan.
    """

    name: str
    text: str
    uniform: bool
    gpus: int
    predicted_s: float
    seconds: list[list[float]]
    failed: str = ""
    beside: str = ""

    @property
    def median_s(self) -> float | None:
        """The median iteration over all rounds."""
        every = [second for one in self.seconds for second in one]
        return statistics.median(every) if every else None

    @property
    def spread(self) -> float:
        """The largest and the smallest median of a round, as their difference over the median of all."""
        medians = [statistics.median(one) for one in self.seconds]
        return (max(medians) - min(medians)) / (self.median_s or 1.0) if medians else 0.0

    @property
    def error(self) -> float | None:
        """How much longer the prediction is than what was measured, as a part of it."""
        return None if self.median_s is None else self.predicted_s / self.median_s - 1


@dataclass(frozen=True)
class ScenarioResult:
    """One scenario.

    Args:
        name: its name.
        decides: what is scarce.
        seq_length: tokens of a sequence.
        speeds: how the testbed made ranks slow: ``paced`` or ``quota``.
        ceiling_tokens_per_s: sum of the speeds that the probe measured, without communication.
        attention_share: part of the ceiling's work that is attention.
        layouts: the plan first.
        missing: baselines without a layout, and why.
        testbed: what the testbed measured of itself in each run, the worst of each.
        versions: of what ran.
        date: when.
        batch: sequences of an iteration.
    """

    name: str
    decides: str
    seq_length: int
    speeds: str
    ceiling_tokens_per_s: float
    attention_share: float
    layouts: list[Measured]
    missing: dict[str, str]
    testbed: dict[str, Any]
    versions: dict[str, str]
    date: str
    batch: int = 1

    @property
    def plan(self) -> Measured:
        """The planner's."""
        return self.layouts[0]

    @property
    def rival(self) -> Measured | None:
        """The fastest layout in which all GPUs get equal parts; where none runs, the fastest other one."""
        ran = [one for one in self.layouts[1:] if one.median_s is not None]
        return min(ran, key=lambda one: (not one.uniform, one.median_s or 0.0), default=None)

    @property
    def speed_up(self) -> float | None:
        """The plan's tokens/s over its rival's."""
        rival = self.rival
        if rival is None or rival.median_s is None or self.plan.median_s is None:
            return None
        return rival.median_s / self.plan.median_s

    @property
    def of_ceiling(self) -> float | None:
        """The plan's tokens/s over the ceiling."""
        return (
            None if self.plan.median_s is None else self.tokens_per_s(self.plan) / self.ceiling_tokens_per_s
        )

    def compared(self) -> Iterator[tuple[Measured, Measured]]:
        """Layouts that ran, and what each is compared with where that is not the plan."""
        named = {layout.name: layout for layout in self.layouts if layout.median_s is not None}
        return ((one, named[one.beside]) for one in named.values() if one.beside in named)

    def tokens_per_s(self, layout: Measured) -> float:
        """Of a layout that ran."""
        assert layout.median_s is not None
        return self.batch * self.seq_length / layout.median_s


_ADAPTER = TypeAdapter(dict[str, ScenarioResult])


def read_results(path: Path) -> dict[str, ScenarioResult]:
    """What a file holds; nothing where there is none."""
    return _ADAPTER.validate_json(path.read_text()) if path.exists() else {}


def results_text(results: dict[str, ScenarioResult]) -> str:
    """The file's text."""
    data = {name: dataclasses.asdict(result) for name, result in results.items()}
    return json.dumps(_rounded(data), indent=1) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
