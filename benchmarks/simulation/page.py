"""The page and its pictures, from results alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import megatron_hexi
from benchmarks.simulation import words
from benchmarks.simulation.cells import (
    PAIRS,
    RANDOM_MODEL,
    SIMULATIONS,
    TESTBEDS,
    Cell,
)
from benchmarks.simulation.pictures import draw_all
from benchmarks.simulation.results import Result
from benchmarks.simulation.summary import Target, cells_of, speed_ups, targets
from benchmarks.simulation.tables import cells_table, kernel_table, layouts_table, pairs_table, replicas_table
from benchmarks.simulation.text import ASSUMED, HOW, INTRODUCTION, PAIRS_TEXT, SECTIONS, UNITS

_SUITES = (("testbed", TESTBEDS), ("simulation", SIMULATIONS))
#: Cells that a target names before it only counts.
_NAMED = 12


def write_page(results: Mapping[str, Result], seconds: Mapping[str, float], folder: Path) -> None:
    """Write simulation.md and simulation/*.png.

    Args:
        results: by cell.
        seconds: that planning took, by cell; they differ from machine to machine.
        folder: where to.
    """
    pictures = draw_all(results, folder / "simulation")
    text = "\n\n".join(part for part in _parts(results, seconds, pictures) if part)
    (folder / "simulation.md").write_text(text + "\n", encoding="utf-8")


def _parts(
    results: Mapping[str, Result], seconds: Mapping[str, float], pictures: Sequence[str]
) -> Iterator[str]:
    yield INTRODUCTION.format(version=megatron_hexi.__version__)
    yield "## What was asked for, and what came out"
    yield _targets(targets(results))
    yield "## Speed-ups, in short"
    yield SECTIONS["short"]
    yield _summary(results)
    for name in pictures:
        yield f"![{SECTIONS[name]}](simulation/{name})"
        yield SECTIONS[name]
    yield "## What is assumed"
    yield ASSUMED
    yield UNITS
    for suite_name, clusters in _SUITES:
        yield f"## {suite_name.capitalize()}s, one replica"
        for cluster in clusters:
            cells = cells_of(results, suite=suite_name, cluster=cluster, data_parallel=1)
            yield from _cluster(cluster, cells)
    yield "## As many replicas as are best"
    yield SECTIONS["auto"]
    yield replicas_table(results)
    yield "## The same kernel on all GPUs"
    yield SECTIONS["kernel"]
    yield kernel_table(results)
    yield "## FLOP-matched pairs"
    yield PAIRS_TEXT
    yield pairs_table(results)
    yield words.details(
        "Layouts of both sides", layouts_table(cells_of(results, suite="flops"), with_baseline=True)
    )
    yield f"## Random clusters, {RANDOM_MODEL}"
    yield SECTIONS["random"]
    yield cells_table(cells_of(results, suite="random"), with_cluster=True)
    yield words.details("Layouts", layouts_table(cells_of(results, suite="random"), with_cluster=True))
    yield "## What the runtime would send"
    yield SECTIONS["wire"]
    yield "## Planning times"
    yield _times(results, seconds)
    yield HOW


def _targets(found: Sequence[Target]) -> str:
    rows = [[one.asked, one.measured, one.verdict] for one in found]
    parts = [words.table(("asked for", "came out", "met"), rows, words=(0, 1, 2))]
    for one in found:
        if one.short:
            lines = [f"- `{line}`" for line in one.short[:_NAMED]]
            if len(one.short) > _NAMED:
                lines.append(f"- and {len(one.short) - _NAMED} more, in the tables below")
            title = f"Short of it: {one.asked} ({len(one.short)} cells)"
            parts.append(words.details(title, "\n".join(lines)))
    return "\n\n".join(parts)


def _summary(results: Mapping[str, Result]) -> str:
    rows = []
    for suite_name, clusters in _SUITES:
        for cluster in (*clusters, None):
            fields = {"suite": suite_name, "data_parallel": 1} | ({"cluster": cluster} if cluster else {})
            cells = [one for _, one in cells_of(results, **fields)]
            uniform, every = speed_ups(cells), speed_ups(cells, over_all=True)
            if uniform is None or every is None:
                continue
            planned = [one for one in cells if one.ours is not None and one.share and one.bound_share]
            best = max(one.share or 0.0 for one in planned)
            gap = statistics.median(one.ours.gap for one in planned if one.ours is not None)
            row = [
                cluster or f"all {suite_name}s",
                str(uniform.counted),
                str(uniform.left_out),
                f"{uniform.geometric:.2f}x",
                f"{uniform.arithmetic:.2f}x",
                f"{uniform.most:.2f}x",
                f"{uniform.bound:.2f}x",
                f"{every.geometric:.2f}x",
                f"{every.most:.2f}x",
                words.percent(best),
                words.percent(gap),
            ]
            rows.append(row if cluster else [f"**{value}**" for value in row])
    heads = (
        "cluster",
        "cells",
        "left out",
        "over uniform: geometric mean",
        "arithmetic",
        "max",
        "bound",
        "over all baselines: geometric mean",
        "max",
        "most of the ceiling",
        "median gap",
    )
    return words.table(heads, rows, words=(0,))


def _cluster(name: str, cells: Sequence[tuple[Cell, Result]]) -> Iterator[str]:
    if not cells:
        return
    yield f"### {name}: {words.spell_gpus(cells[0][1].gpus)}"
    yield f"[{name}.yaml](../../benchmarks/simulation/clusters/{name}.yaml)"
    yield cells_table(cells)
    yield words.details("Layouts", layouts_table(cells))


def _times(results: Mapping[str, Result], seconds: Mapping[str, float]) -> str:
    rows = []
    clusters = (*TESTBEDS, *SIMULATIONS, *(name for pair in PAIRS for name in pair))
    for cluster in clusters:
        for replicas in (1, None):
            cells = cells_of(results, cluster=cluster, data_parallel=replicas)
            found = [seconds[cell.name] for cell, _ in cells if cell.name in seconds]
            if found:
                kind = "one" if replicas else "any"
                rows.append(
                    [cluster, kind, str(len(found)), _seconds(statistics.median(found)), _seconds(max(found))]
                )
    heads = ("cluster", "replicas", "cells", "median", "longest")
    return SECTIONS["times"] + "\n\n" + words.table(heads, rows, words=(0, 1))


def _seconds(value: float) -> str:
    digits = max(0, 1 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(digits, 1)}f} s"
