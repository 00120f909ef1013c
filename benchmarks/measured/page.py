"""docs/results/measured.md: what was measured, beside what was predicted."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.measured.picture import draw_scenarios
from benchmarks.measured.results import Measured, ScenarioResult
from megatron_hexi.text_file import write_text_atomically

_INTRODUCTION = """# Measured

**Measured on clusters emulated on one machine's CPUs; predictions stand beside.**

Written by `python -m benchmarks.measured`; do not edit. Megatron trains (`megatron_hexi.pretrain_gpt`, CPU
platform, gloo, fp32) on mixed clusters that [`hexi testbed`](../testbed.md) emulates. `hexi probe` measures
each cluster once; plan, baselines and predictions use its file alone (in *thin-links* and *little-memory* the
cluster file). All layouts train in turn on the same
data, and their losses must agree.

- Speeds *paced*: matrix products and attention run, then wait until the time of the cluster file's curve is
  over; other work is free within the head-room; networks, overlap, order of events and numbers are real.
- Speeds *quota*: ranks are slowed by CPU quotas; nothing is modelled.
- Ceiling: the sum of the probe's speeds, without communication.
"""


def write_page(results: Mapping[str, ScenarioResult], folder: Path) -> None:
    """Write the page and its picture.

    Args:
        results: all.
        folder: where to.
    """
    text = [_INTRODUCTION]
    if results:
        (folder / "measured").mkdir(parents=True, exist_ok=True)
        picture = folder / "measured" / "layouts.png"
        draw_scenarios(results).savefig(picture, dpi=110, metadata={"Software": None})
        text += [
            "![Tokens/s of each layout, measured and predicted](measured/layouts.png)\n",
            "## In short\n",
        ]
        text += [f"- {line}" for line in findings(results)]
        text += [line for result in results.values() for line in _scenario(result)]
    write_text_atomically(folder / "measured.md", "\n".join(text) + "\n")


def findings(results: Mapping[str, ScenarioResult]) -> list[str]:
    """What the figures say, one sentence each."""
    lines = []
    for name, result in results.items():
        pairs = list(result.compared())
        lines += [f"{name}: {_comparison(*pair)}" for pair in pairs]
        if pairs:
            continue
        if result.plan.median_s is None:
            lines.append(f"{name}: the plan did not run: {result.plan.failed.splitlines()[0]}")
            continue
        ceiling, rival = f"{result.of_ceiling:.1%} of the ceiling", result.rival
        if rival is None or result.speed_up is None:
            lines.append(f"{name}: {ceiling}; nothing else runs")
            continue
        what = "the best uniform layout" if rival.uniform else "the best other layout; no uniform one fits"
        lines.append(f"{name}: {result.speed_up:.2f} times the tokens/s of {what} ({rival.name}), {ceiling}")
    errors = [abs(one.error) for one in _every(results) if one.error is not None]
    if errors:
        lines.append(
            f"iteration times are predicted within {max(errors):.1%} in {len(errors)} layouts, "
            f"{statistics.median(errors):.1%} in the median (paced runs)"
        )
    return lines


def _comparison(one: Measured, other: Measured) -> str:
    assert one.median_s is not None
    assert other.median_s is not None
    times, predicted = one.median_s / other.median_s, one.predicted_s / other.predicted_s
    return f"{one.name} takes {times:.2f} times as long as {other.name}, {predicted:.2f} predicted"


def _every(results: Mapping[str, ScenarioResult]) -> Iterator[Measured]:
    for result in results.values():
        if result.speeds == "paced":
            yield from result.layouts


def _scenario(result: ScenarioResult) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    batch = f"{result.batch} sequences of " if result.batch > 1 else ""
    yield f"\n## {result.name}\n"
    yield (
        f"Scarce: {result.decides}. {batch}{result.seq_length} tokens; attention is "
        f"{result.attention_share:.0%} of the compute. Ceiling {result.ceiling_tokens_per_s:.0f} tokens/s. "
        f"Speeds: {result.speeds}. {result.date}, {versions}.\n"
    )
    if result.speeds == "quota" and any(result.testbed.values()):
        yield _drift(result)
    columns = ("layout", "GPUs", "tokens/s", "of the ceiling", "plan's gain", "iteration, s")
    yield f"| {' | '.join((*columns, 'rounds apart', 'predicted, s', 'error'))} |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for layout in result.layouts:
        yield _row(result, layout)
    for name, why in result.missing.items():
        yield f"| {name} | | none: {why} | | | | | | |"


def _drift(result: ScenarioResult) -> str:
    """How much the machine itself changed meanwhile: nothing hides it here, as pacing does."""
    cycles = [
        speed["measured_s"]
        for runs in result.testbed.values()
        for run in runs
        for moment in run["measured"].values()
        for speed in moment["speeds"]
        if speed["gpu"] == 0
    ]
    return (
        f"The machine's own speed varied: the testbed's load took the first rank {1e3 * min(cycles):.1f} to "
        f"{1e3 * max(cycles):.1f} ms a cycle. Compare times with each other only; predictions are by the "
        "speed at the time of the probe.\n"
    )


def _row(result: ScenarioResult, layout: Measured) -> str:
    text = f": {layout.text}" if layout.text else ""
    uniform = " (uniform)" if layout.uniform else ""
    head = f"| **{layout.name}**{uniform}{text} | {layout.gpus} |"
    if layout.median_s is None:
        return f"{head} failed: {layout.failed.splitlines()[0]} | | | | | {layout.predicted_s:.3f} | |"
    gain = layout.median_s / result.plan.median_s if result.plan.median_s else float("nan")
    rate = result.tokens_per_s(layout)
    return (
        f"{head} {rate:.0f} | {rate / result.ceiling_tokens_per_s:.1%} | {gain:.2f} | {layout.median_s:.3f} "
        f"| {layout.spread:.1%} | {layout.predicted_s:.3f} | {layout.error:+.1%} |"
    )
