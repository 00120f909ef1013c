"""Means, worst cells and what was asked for beside what was measured: from results alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.simulation.cells import PAIRS, Cell, suite
from benchmarks.simulation.results import Result
from benchmarks.simulation.words import percent

#: From here on compute bounds the plans, as the issue has it: "the long contexts".
LONG = 2**19
#: The certified gap that is asked for there, and elsewhere.
GAP_LONG, GAP = 0.01, 0.05
#: What the ceiling's part must be at 1M tokens, and wherever the bound allows it.
CEILING, LONGEST = 0.95, 2**20
#: Mixed over homogeneous throughput, per unit of achieved FLOPs.
FLOPS = 0.98
#: HexiSeq's mean and largest speed-up (arXiv 2605.07569).
PAPER = {"simulation": (1.36, 1.72), "testbed": (1.11, 1.19)}
#: A plan below a baseline by less is the same plan, rounded.
ROUNDING = 1e-5


@dataclass(frozen=True)
class SpeedUps:
    """Speed-ups of several cells.

    Args:
        counted: cells with a baseline that fits.
        left_out: cells where ours fits and none of them does.
        geometric: mean.
        least: of them.
        most: of them.
    """

    counted: int
    left_out: int
    geometric: float
    least: float
    most: float


@dataclass(frozen=True)
class Target:
    """What was asked for, and what came out.

    Args:
        asked: in words.
        measured: in words.
        met: whether.
        short: the cells that are short of it, each with what bounds it.
        proven: whether the bound is short of it, too, in all of these.
    """

    asked: str
    measured: str
    met: bool
    short: tuple[str, ...] = ()
    proven: bool = False

    @property
    def verdict(self) -> str:
        """Whether it is met, in words."""
        return "yes" if self.met else "where the bound allows it" if self.proven else "**no**"


def cells_of(results: Mapping[str, Result], **fields: object) -> list[tuple[Cell, Result]]:
    """Cells with these fields that have a result, in the order of the suite."""
    return [
        (cell, results[cell.name])
        for cell in suite()
        if cell.name in results and all(getattr(cell, name) == value for name, value in fields.items())
    ]


def speed_ups(results: Iterable[Result], over_all: bool = False) -> SpeedUps | None:
    """Over the strongest uniform baseline, or over the strongest of all; ``None``: nothing to compare."""
    fitting = [one for one in results if one.ours is not None]
    every = (one.speed_up_over_all if over_all else one.speed_up for one in fitting)
    found = [value for value in every if value is not None]
    if not found:
        return None
    return SpeedUps(
        counted=len(found),
        left_out=len(fitting) - len(found),
        geometric=statistics.geometric_mean(found),
        least=min(found),
        most=max(found),
    )


def pair_ratio(results: Mapping[str, Result], cell: Cell) -> float | None:
    """Mixed over homogeneous throughput, each per unit of its own achieved FLOPs.

    Achieved FLOPs of a side: its ceiling, the sum of its GPUs' achieved speeds.

    Args:
        results: all.
        cell: the mixed side.
    """
    mixed, equal = results.get(cell.name), results.get(other_side(cell))
    if mixed is None or equal is None or mixed.share is None or equal.share is None:
        return None
    return mixed.share / equal.share


def other_side(cell: Cell) -> str:
    """Name of the homogeneous cell beside a mixed one."""
    mixed, equal = next(pair for pair in PAIRS if pair[0] == cell.cluster)
    return cell.name.replace(mixed, equal)


def mixed_cells(results: Mapping[str, Result]) -> list[Cell]:
    """The mixed cells of the FLOP-matched pairs."""
    sides = {mixed for mixed, _ in PAIRS}
    return [cell for cell, _ in cells_of(results, suite="flops") if cell.cluster in sides]


def targets(results: Mapping[str, Result]) -> list[Target]:
    """Everything that was asked for."""
    everything = cells_of(results)
    planned = [(cell, one) for cell, one in everything if one.ours is not None]
    long = [(cell, one) for cell, one in planned if cell.seq_length >= LONG]
    other = [(cell, one) for cell, one in planned if cell.seq_length < LONG]
    found = [
        _gaps("certified gap at most 1 % from 512K tokens on", long, GAP_LONG),
        _gaps("certified gap at most 5 % below", other, GAP),
        _never_below(planned),
        *(_speed_up(results, suite_name, mean, most) for suite_name, (mean, most) in PAPER.items()),
        _ceiling(
            f"at least {percent(CEILING, 0)} of the ceiling at 1M tokens",
            [(cell, one) for cell, one in planned if cell.seq_length == LONGEST],
        ),
        _ceiling(
            f"at least {percent(CEILING, 0)} of the ceiling wherever the bound allows it",
            [(cell, one) for cell, one in planned if (one.bound_share or 0) >= CEILING],
        ),
        _flops(results),
        _wires(planned),
    ]
    return [target for target in found if target is not None]


def _gaps(asked: str, cells: Sequence[tuple[Cell, Result]], most: float) -> Target | None:
    gaps = {cell.name: one.ours.gap for cell, one in cells if one.ours is not None}
    if not gaps:
        return None
    short = sorted((name for name in gaps if gaps[name] > most), key=lambda name: -gaps[name])
    words_of = {cell.name: _of_ceiling(one) for cell, one in cells}
    return Target(
        asked,
        f"{len(gaps) - len(short)} of {len(gaps)} cells; largest {percent(max(gaps.values()))}",
        not short,
        tuple(f"{name}: {percent(gaps[name])}, {words_of[name]}" for name in short),
    )


def _never_below(cells: Sequence[tuple[Cell, Result]]) -> Target:
    ratios = {cell.name: one.speed_up_over_all for cell, one in cells}
    below = [name for name, ratio in ratios.items() if ratio is not None and ratio < 1 - ROUNDING]
    least = min((ratio for ratio in ratios.values() if ratio is not None), default=1.0)
    return Target(
        "never below a baseline",
        f"{len(ratios) - len(below)} of {len(ratios)} cells; least {least:.3f}x",
        not below,
        tuple(f"{name}: {ratios[name]:.4f}x" for name in below),
    )


def _speed_up(results: Mapping[str, Result], suite_name: str, mean: float, most: float) -> Target | None:
    ups = speed_ups(one for _, one in cells_of(results, suite=suite_name, data_parallel=1))
    if ups is None:
        return None
    return Target(
        f"{suite_name}s: {mean}x mean, {most}x max over the strongest uniform",
        f"{ups.geometric:.2f}x geometric mean, {ups.most:.2f}x max",
        ups.geometric >= mean and ups.most >= most,
    )


def _ceiling(asked: str, cells: Sequence[tuple[Cell, Result]]) -> Target | None:
    results = {cell.name: one for cell, one in cells}
    shares = {cell.name: (one.share or 0.0, one.bound_share or 0.0) for cell, one in cells}
    if not shares:
        return None
    short = [name for name, (share, _) in shares.items() if share < CEILING]
    bounded = [name for name in short if shares[name][1] < CEILING]
    measured = f"{len(shares) - len(short)} of {len(shares)} cells"
    if bounded:
        measured += f"; in {len(bounded)} of the others the bound is below"
    least = min((share for name, (share, _) in shares.items() if name not in bounded), default=None)
    if least is not None:
        measured += f"; least of the rest {percent(least)}" if bounded else f"; least {percent(least)}"
    return Target(
        asked,
        measured,
        not short,
        tuple(f"{name}: {_of_ceiling(results[name])}" for name in short),
        proven=len(bounded) == len(short),
    )


def _of_ceiling(one: Result) -> str:
    return f"{percent(one.share)} of the ceiling, the bound {percent(one.bound_share)}"


def _flops(results: Mapping[str, Result]) -> Target | None:
    ratios = {cell.name: pair_ratio(results, cell) for cell in mixed_cells(results)}
    found = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if not found:
        return None
    short = [name for name, ratio in found.items() if ratio < FLOPS]
    # What the mixed side's best conceivable plan would have beside the homogeneous side's plan.
    gaps = {name: one.ours.gap for name, one in results.items() if one.ours is not None}
    reach = {name: ratio * (1 + gaps[name]) for name, ratio in found.items()}
    beyond = sum(reach[name] < FLOPS for name in short)
    sides = {
        cell.name: f"{_of_ceiling(results[cell.name])}; homogeneous: {_of_ceiling(results[other_side(cell)])}"
        for cell in mixed_cells(results)
        if cell.name in found
    }
    return Target(
        f"FLOP-matched: mixed over homogeneous, per achieved FLOP, at least {FLOPS}",
        f"{len(found) - len(short)} of {len(found)} cells; {min(found.values()):.3f} to "
        f"{max(found.values()):.3f}; in {beyond} of the others no plan can reach it",
        not short,
        tuple(f"{name}: {found[name]:.3f}, at most {reach[name]:.3f}; {sides[name]}" for name in short),
        proven=beyond == len(short),
    )


def _wires(cells: Sequence[tuple[Cell, Result]]) -> Target:
    wires = [one.ours.wire for _, one in cells if one.ours is not None]
    checked = [wire for wire in wires if wire is not None]
    whole = sum(wire.ranks == wire.of for wire in checked)
    return Target(
        "the runtime would send the cost model's bytes",
        f"{len(checked)} of {len(wires)} plans, exactly; {whole} on every rank",
        len(checked) == len(wires),
    )


def summary_table(results: Sequence[Result]) -> Table:
    """One line a cell, for the terminal."""
    table = Table()
    for name in (
        "cell",
        "TP x PP",
        "tokens/s",
        "over uniform",
        "over all",
        "ceiling",
        "bound",
        "gap",
        "layout",
    ):
        table.add_column(name, overflow="fold")
    for one in results:
        if one.ours is None:
            table.add_row(one.cell, "-", "-", "-", "-", "-", "-", "-", one.why_not)
            continue
        uniform, strongest = one.uniform, one.strongest
        table.add_row(
            one.cell,
            f"{one.tensor_parallel} x {one.pipeline_parallel}",
            f"{one.ours.tokens_per_s:,.0f}",
            f"{one.speed_up:.3f} {uniform.name}" if uniform else "-",
            f"{one.speed_up_over_all:.3f} {strongest.name}" if strongest else "-",
            f"{one.share:.1%}",
            f"{one.bound_share:.1%}",
            f"{one.ours.gap:.1%}",
            one.ours.layout,
        )
    return table


def findings(results: Mapping[str, Result]) -> list[str]:
    """The targets, for the terminal."""
    lines = []
    for target in targets(results):
        verdict = "met  " if target.met else "bound" if target.proven else "SHORT"
        lines.append(f"{verdict} {target.asked}: {target.measured}")
        lines += [f"        {line}" for line in target.short]
    return lines
