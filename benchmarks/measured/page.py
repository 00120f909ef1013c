"""docs/results/measured.md: what was measured, beside what was predicted."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from benchmarks.measured.picture import draw_scenarios
from benchmarks.measured.results import Measured, ScenarioResult
from megatron_hexi.text_file import write_text_atomically

_INTRODUCTION = """# Measured

**Measured on clusters emulated on one machine's CPUs; predictions stand beside.**

Written by `python -m benchmarks.measured` (`--page`: from [measured.json](measured.json), which has every
iteration, layout and version); do not edit. Megatron trains (`megatron_hexi.pretrain_gpt`, CPU platform,
gloo, fp32) on mixed clusters that [`hexi testbed`](../testbed.md) emulates. Plan, baselines and predictions
use what `hexi probe` measures (in *thin-links* and *little-memory* the cluster file). All layouts train in
turn on the same data, and their losses must agree.

- Speeds are [*paced*](../testbed.md#what-a-paced-figure-is-made-of): durations of matrix products and
  attention are modelled, the rest is real. In *by quotas* CPU quotas slow ranks; nothing is modelled.
- *ring*, *ulysses*, *usp* and *te-a2a+p2p* are uniform, equal parts for all ranks; *proportion* has tokens by
  speed; *homogeneous* is the GPUs of one kind alone. *expert-parallel* is the fastest of Megatron's layouts
  with as many experts on each rank.
- Ceiling: the sum of the probe's speeds, without communication.
"""
#: What no figure says of a scenario.
_REMARKS = {"thin-links": "why the equal pipeline takes longer than predicted is open."}


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
            *_scenarios(results.values()),
            f"\n{accuracy(results)} Seconds measured, predicted, and the error:\n",
            *_layouts(results.values()),
            *_pairs(results.values()),
        ]
        text += ["", *(line for result in results.values() for line in _remarks(result))]
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
    return [*lines, accuracy(results)]


def accuracy(results: Mapping[str, ScenarioResult]) -> str:
    """How well paced runs are predicted."""
    paced = (one for result in results.values() if result.speeds == "paced" for one in result.layouts)
    errors = [abs(one.error) for one in paced if one.error is not None]
    if not errors:
        return "No paced run was measured."
    return (
        f"Iteration times of {len(errors)} layouts in paced runs are predicted within {max(errors):.1%}, "
        f"{statistics.median(errors):.1%} in the median."
    )


def _comparison(one: Measured, other: Measured) -> str:
    times, predicted = _times(one, other)
    return f"{one.name} takes {times:.2f} times as long as {other.name}, {predicted:.2f} predicted"


def _scenarios(results: Iterable[ScenarioResult]) -> Iterator[str]:
    yield "| scenario | scarce | tokens | attention | over the best uniform | of the ceiling | rounds apart |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for one in results:
        if any(one.compared()):
            continue
        batch = f"{one.batch} x " if one.batch > 1 else ""
        gain = "-" if one.speed_up is None else f"{one.speed_up:.2f}"
        part = "-" if one.of_ceiling is None else f"{one.of_ceiling:.1%}"
        rounds = max(len(layout.seconds) for layout in one.layouts)
        apart = f"{max(layout.spread for layout in one.layouts):.1%}" if rounds > 1 else "one round"
        work = f"{batch}{one.seq_length} | {one.attention_share:.0%}"
        yield f"| {one.name} | {one.decides} | {work} | {gain} | {part} | {apart} |"


def _layouts(results: Iterable[ScenarioResult]) -> Iterator[str]:
    """A column for each name of a layout."""
    rows = {result.name: dict(_figures(result)) for result in results if not any(result.compared())}
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    yield f"| scenario | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(names)}"
    for scenario, row in rows.items():
        yield f"| {scenario} | {' | '.join(row.get(name, '') for name in names)} |"


def _pairs(results: Iterable[ScenarioResult]) -> Iterator[str]:
    """Yield a table with a row for each layout that is compared with another than the plan."""
    rows = [(result, *pair) for result in results for pair in result.compared()]
    if not rows:
        return
    yield "\nLayouts beside others of the same stages. Seconds measured, predicted, and the error:\n"
    yield "| scenario | layout | | beside | | times as long | predicted |"
    yield "|---|---|---|---|---|---:|---:|"
    for result, one, other in rows:
        times, predicted = _times(one, other)
        cells = f"{one.name} | {_text(one)} | {other.name} | {_text(other)} | {times:.2f} | {predicted:.2f}"
        yield f"| {result.name} | {cells} |"


def _times(one: Measured, other: Measured) -> tuple[float, float]:
    """Return how many times as long a layout takes as another, measured and predicted."""
    assert one.median_s is not None
    assert other.median_s is not None
    return one.median_s / other.median_s, one.predicted_s / other.predicted_s


def _figures(result: ScenarioResult) -> Iterator[tuple[str, str]]:
    for one in result.layouts:
        # Baselines that are the same plan are one layout.
        for name in one.name.split(", "):
            yield name, _text(one)


def _text(one: Measured) -> str:
    if one.median_s is None:
        return f"{one.predicted_s:.4g} predicted, failed: {one.failed.splitlines()[0]}"
    return f"{one.median_s:.4g}, {one.predicted_s:.4g}, {one.error:+.1%}"


def _remarks(result: ScenarioResult) -> Iterator[str]:
    if result.missing:
        reasons = "; ".join(f"{name}: {why}" for name, why in result.missing.items())
        yield f"- *{result.name}* has no layout for {reasons}."
    if result.name in _REMARKS:
        yield f"- *{result.name}*: {_REMARKS[result.name]}"
    if result.speeds == "quota" and any(result.testbed.values()):
        yield _drift(result)


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
    least, most = 1e3 * min(cycles), 1e3 * max(cycles)
    return (
        f"- *{result.name}*: the machine's own speed varied, {least:.1f} to {most:.1f} ms "
        "a cycle of the testbed's load. Compare times with each other only; predictions are by the speed at "
        "the time of the probe."
    )
