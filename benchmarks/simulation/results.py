"""What is kept of a cell, as plain data, and its file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

#: Digits of numbers in the file.
_DIGITS = 6


@dataclass(frozen=True)
class Rival:
    """A baseline.

    Args:
        name: as the planner calls it.
        uniform: whether all GPUs get equal tokens and heads.
        tokens_per_s: of its best layout; ``None``: it has none that fits.
        layout: what that is.
        why_not: why there is none.
    """

    name: str
    uniform: bool
    tokens_per_s: float | None
    layout: str
    why_not: str


@dataclass(frozen=True)
class Wire:
    """What the runtime would send under the plan, in one attention layer, forward and backward.

    Args:
        ranks: whose schedules were carried out on meta tensors.
        of: ranks that there are.
        all_to_all_bytes: sent inside groups by them, as counted by the cost model and sent by the runtime.
        message_bytes: sent between groups, likewise.
        messages: how many of these.
    """

    ranks: int
    of: int
    all_to_all_bytes: int
    message_bytes: int
    messages: int


@dataclass(frozen=True)
class Ours:
    """The plan.

    Args:
        tokens_per_s: predicted.
        bound_tokens_per_s: that no plan can pass.
        bound_reason: what the bound counts.
        gap: how much longer than the bound an iteration takes, as a part of the bound.
        layout: who gets what, in words.
        replicas: how many.
        window: of the exchange.
        phases: part of the iteration by phase.
        idle: part of all GPUs' time.
        notes: GPUs left out, and why.
        digest: the first letters of the plan's.
        wire: what the runtime would send; ``None``: torch was not there to tell.
    """

    tokens_per_s: float
    bound_tokens_per_s: float
    bound_reason: str
    gap: float
    layout: str
    replicas: int
    window: int
    phases: dict[str, float]
    idle: float
    notes: tuple[str, ...]
    digest: str
    wire: Wire | None


@dataclass(frozen=True)
class Result:
    """A cell's outcome.

    Args:
        cell: its name.
        gpus: of the cluster, by model.
        tensor_parallel: size; 0 where nothing fits.
        pipeline_parallel: size; 0 where nothing fits.
        ceiling_tokens_per_s: all GPUs at their best rates, nothing sent.
        ours: the plan; ``None``: nothing fits.
        why_not: then what is short.
        rivals: the baselines.
    """

    cell: str
    gpus: dict[str, int]
    tensor_parallel: int
    pipeline_parallel: int
    ceiling_tokens_per_s: float
    ours: Ours | None
    why_not: str
    rivals: tuple[Rival, ...]

    @property
    def uniform(self) -> Rival | None:
        """The strongest of the uniform baselines that fit."""
        return _strongest([rival for rival in self.rivals if rival.uniform])

    @property
    def strongest(self) -> Rival | None:
        """The strongest of all baselines that fit."""
        return _strongest(self.rivals)

    @property
    def speed_up(self) -> float | None:
        """Over the strongest uniform baseline; ``None``: none fits."""
        return self._over(self.uniform)

    @property
    def speed_up_over_all(self) -> float | None:
        """Over the strongest of all baselines; ``None``: none fits."""
        return self._over(self.strongest)

    @property
    def share(self) -> float | None:
        """The plan's part of the ceiling."""
        return None if self.ours is None else self.ours.tokens_per_s / self.ceiling_tokens_per_s

    @property
    def bound_share(self) -> float | None:
        """The bound's part of the ceiling: more than that no plan has."""
        return None if self.ours is None else self.ours.bound_tokens_per_s / self.ceiling_tokens_per_s

    def _over(self, rival: Rival | None) -> float | None:
        if self.ours is None or rival is None or rival.tokens_per_s is None:
            return None
        return self.ours.tokens_per_s / rival.tokens_per_s


_ADAPTER = TypeAdapter(tuple[Result, ...])


def read_results(path: Path) -> dict[str, Result]:
    """Results by their cells' names; empty where there is no file yet."""
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    return {result.cell: result for result in _ADAPTER.validate_python(data["cells"])}


def results_text(results: Mapping[str, Result], version: str) -> str:
    """The file: one line a cell.

    Args:
        results: in the order of the file.
        version: of the package that planned.
    """
    lines = [
        json.dumps(_rounded(dataclasses.asdict(result)), ensure_ascii=False) for result in results.values()
    ]
    return f'{{"version": {json.dumps(version)}, "cells": [\n' + ",\n".join(lines) + "\n]}\n"


def rounded(result: Result) -> Result:
    """As it will be read again: what is shown does not depend on whether it was read or just planned."""
    return _ADAPTER.validate_python([_rounded(dataclasses.asdict(result))])[0]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def _strongest(rivals: list[Rival] | tuple[Rival, ...]) -> Rival | None:
    fitting = [rival for rival in rivals if rival.tokens_per_s is not None]
    return max(fitting, key=lambda rival: rival.tokens_per_s or 0.0, default=None)
