"""The page's tables of cells, in Markdown: from results alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.simulation import words
from benchmarks.simulation.cells import Cell, spell_length
from benchmarks.simulation.results import Result
from benchmarks.simulation.summary import cells_of, mixed_cells, other_side, pair_ratio, speed_ups
from benchmarks.simulation.text import NO_UNIFORM


def cells_table(cells: Sequence[tuple[Cell, Result]], with_cluster: bool = False) -> str:
    """One line a cell, and why some have none.

    Args:
        cells: of one cluster, or of several.
        with_cluster: name the cluster in place of the model.
    """
    rows, notes = [], []
    for cell, one in cells:
        first = [_linked(cell, one)] if with_cluster else [cell.model]
        if one.ours is None:
            rows.append([*first, spell_length(cell.seq_length), words.unit(one), *["-"] * 6])
            notes.append(f"- {cell.name}: nothing fits: {words.shorten(one.why_not)}")
            continue
        if one.uniform is None:
            notes.append(f"- {cell.name}: {words.why_no_uniform(one)}")
        rows.append(
            [
                *first,
                spell_length(cell.seq_length),
                words.unit(one),
                words.count(one.ours.tokens_per_s),
                words.times(one.speed_up, one.uniform),
                words.times(one.speed_up_over_all, one.strongest),
                words.percent(one.share),
                words.percent(one.bound_share),
                words.percent(one.ours.gap),
            ]
        )
    heads = (
        "cluster" if with_cluster else "model",
        "context",
        "TP x PP",
        "tokens/s",
        "over the strongest uniform",
        "over the strongest of all",
        "of the ceiling",
        "bound",
        "gap",
    )
    text = words.table(heads, rows, words=(0,))
    return text + ("\n\n" + words.details(NO_UNIFORM, "\n".join(notes)) if notes else "")


def layouts_table(
    cells: Sequence[tuple[Cell, Result]], with_cluster: bool = False, with_baseline: bool = False
) -> str:
    """Who gets what, in words.

    Args:
        cells: those with a plan have a line.
        with_cluster: name the cluster too.
        with_baseline: and the strongest uniform baseline's layout.
    """
    rows = []
    for cell, one in cells:
        if one.ours is None:
            continue
        row = [cell.cluster] if with_cluster or with_baseline else []
        row += [cell.model, spell_length(cell.seq_length), words.layout_cell(one.ours.layout)]
        if with_baseline:
            rival = one.uniform
            row.append(f"{rival.name}: {words.layout_cell(rival.layout)}" if rival else "-")
        rows.append(row)
    heads = ["cluster"] if with_cluster or with_baseline else []
    heads += ["model", "context", "plan", *(["strongest uniform baseline"] if with_baseline else [])]
    return words.table(heads, rows, words=tuple(range(len(heads))))


def replicas_table(results: Mapping[str, Result]) -> str:
    """Cells that may have any number of replicas, beside those with one."""
    rows = []
    for suite_name in ("testbed", "simulation"):
        for cell, one in cells_of(results, suite=suite_name, data_parallel=None):
            alone = results.get(cell.name.replace("/auto", "/dp1"))
            if one.ours is None:
                continue
            more = one.ours.tokens_per_s / alone.ours.tokens_per_s if alone and alone.ours else None
            rows.append(
                [
                    cell.cluster,
                    cell.model,
                    spell_length(cell.seq_length),
                    str(one.ours.replicas),
                    words.count(one.ours.tokens_per_s),
                    words.times(more),
                    words.times(one.speed_up, one.uniform),
                    words.times(one.speed_up_over_all, one.strongest),
                    words.percent(one.share),
                    words.percent(one.bound_share),
                    words.percent(one.ours.gap),
                ]
            )
    heads = (
        "cluster",
        "model",
        "context",
        "replicas",
        "tokens/s",
        "over one replica",
        "over the strongest uniform",
        "over the strongest of all",
        "of the ceiling",
        "bound",
        "gap",
    )
    return words.table(heads, rows, words=(0, 1))


def kernel_table(results: Mapping[str, Result]) -> str:
    """Testbeds with FlashAttention-2 on every GPU, beside those with each GPU's fastest kernel."""
    rows = []
    for cell, one in cells_of(results, suite="kernel"):
        fast = results.get(cell.name.replace("kernel/", "testbed/"))
        rows.append(
            [
                cell.cluster,
                spell_length(cell.seq_length),
                words.times(one.speed_up, one.uniform),
                words.times(fast.speed_up if fast else None),
                words.percent(one.share),
                words.percent(one.ours.gap if one.ours else None),
            ]
        )
    ups = speed_ups(one for _, one in cells_of(results, suite="kernel"))
    if ups:
        rows.append(["**geometric mean, max**", "", f"**{ups.geometric:.2f}x, {ups.most:.2f}x**", "", "", ""])
    heads = (
        "cluster",
        "context",
        "over the strongest uniform, FlashAttention-2",
        "with each GPU's fastest",
        "of the ceiling",
        "gap",
    )
    return words.table(heads, rows, words=(0,))


def pairs_table(results: Mapping[str, Result]) -> str:
    """Mixed against homogeneous."""
    rows = []
    for cell in mixed_cells(results):
        mixed, equal = results[cell.name], results.get(other_side(cell))
        if equal is None:
            continue
        ratio = None
        if mixed.ours and equal.ours:
            ratio = mixed.ours.tokens_per_s / equal.ours.tokens_per_s
        rows.append(
            [
                f"{words.spell_gpus(mixed.gpus)} against {words.spell_gpus(equal.gpus)}",
                cell.model,
                spell_length(cell.seq_length),
                words.unit(mixed),
                words.count(mixed.ours.tokens_per_s if mixed.ours else None),
                words.count(equal.ours.tokens_per_s if equal.ours else None),
                "-" if ratio is None else f"{ratio:.3f}",
                f"{mixed.ceiling_tokens_per_s / equal.ceiling_tokens_per_s:.3f}",
                "-" if (value := pair_ratio(results, cell)) is None else f"**{value:.3f}**",
                words.percent(mixed.share),
                words.percent(equal.share),
                words.times(equal.speed_up, equal.uniform),
            ]
        )
    heads = (
        "pair",
        "model",
        "context",
        "TP x PP",
        "mixed, tokens/s",
        "homogeneous",
        "mixed over homogeneous",
        "achieved FLOPs, likewise",
        "per achieved FLOP",
        "mixed, of its ceiling",
        "homogeneous",
        "homogeneous: plan over uniform",
    )
    return words.table(heads, rows, words=(0, 1))


def _linked(cell: Cell, one: Result) -> str:
    link = f"[{cell.cluster}](../../benchmarks/simulation/clusters/{cell.cluster}.yaml)"
    return f"{link}: {words.spell_gpus(one.gpus)}"
