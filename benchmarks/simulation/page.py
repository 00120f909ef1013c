"""The page and its pictures, from results alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import megatron_hexi
from benchmarks.simulation import words
from benchmarks.simulation.cells import SIMULATIONS, TESTBEDS
from benchmarks.simulation.pictures import draw_all
from benchmarks.simulation.results import Result
from benchmarks.simulation.summary import Target, cells_of, speed_ups, targets
from benchmarks.simulation.text import ASSUMED, INTRODUCTION, SECTIONS

_SUITES = (("testbed", TESTBEDS), ("simulation", SIMULATIONS))


def write_page(results: Mapping[str, Result], folder: Path) -> None:
    """Write simulation.md and simulation/*.png: targets, means by cluster, what is assumed.

    Args:
        results: by cell; a reader finds each of them in simulation.json.
        folder: where to.
    """
    pictures = draw_all(results, folder / "simulation")
    text = "\n\n".join(_parts(results, pictures))
    (folder / "simulation.md").write_text(text + "\n", encoding="utf-8")


def _parts(results: Mapping[str, Result], pictures: Sequence[str]) -> Iterator[str]:
    yield INTRODUCTION.format(version=megatron_hexi.__version__)
    yield "## Targets"
    yield _targets(targets(results))
    yield "## Speed-ups by cluster, one replica"
    yield SECTIONS["short"]
    yield _summary(results)
    for name in pictures:
        yield f"![{name.removesuffix('.png')}](simulation/{name})"
        yield SECTIONS[name]
    yield "## What is assumed"
    yield ASSUMED


def _targets(found: Sequence[Target]) -> str:
    rows = [[one.asked, one.measured, one.verdict] for one in found]
    return words.table(("target", "result", "met"), rows, words=(0, 1, 2))


def _summary(results: Mapping[str, Result]) -> str:
    rows = []
    for suite_name, clusters in _SUITES:
        for cluster in (*clusters, None):
            fields = {"suite": suite_name, "data_parallel": 1} | ({"cluster": cluster} if cluster else {})
            cells = [one for _, one in cells_of(results, **fields)]
            uniform, every = speed_ups(cells), speed_ups(cells, over_all=True)
            if uniform is None or every is None:
                continue
            gap = statistics.median(one.ours.gap for one in cells if one.ours is not None)
            row = [
                cluster or f"all {suite_name}s",
                f"{uniform.counted}{f' of {uniform.counted + uniform.left_out}' if uniform.left_out else ''}",
                f"{uniform.geometric:.2f}x",
                f"{uniform.most:.2f}x",
                f"{every.geometric:.2f}x",
                words.percent(gap),
            ]
            rows.append(row if cluster else [f"**{value}**" for value in row])
    heads = (
        "cluster",
        "cells",
        "over uniform: mean",
        "max",
        "over all baselines: mean",
        "median gap",
    )
    return words.table(heads, rows, words=(0,))
