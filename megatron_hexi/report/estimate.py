"""A plan's prediction, as tables for a terminal and as plain values for --json."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from megatron_hexi.cost import IterationCost, RankCost, Throughput, find_shortage
from megatron_hexi.cost.memory import GIB
from megatron_hexi.cost.ranks import RankPlace
from megatron_hexi.models import Job
from megatron_hexi.report.tables import Report, make_table
from megatron_hexi.spelling import spell_seconds

_TIMES = ("token", "attention", "logits", "optimizer", "communication", "idle")
_TIMES_CAPTION = "seconds of an iteration; communication: its own, exposed; idle: waiting for slower ranks"
#: Least part of an iteration that is listed.
_LEAST_SHARE = 5e-4
_MEMORY_CAPTION = "GiB at the peak of an iteration"
#: First columns of both tables, which identify ranks.
_HEADS = ("ranks", "GPU", "names")


def estimate_report(cost: IterationCost) -> Report:
    """Return the prediction for a terminal: summary, phases, and tables of time and memory."""
    rows = _alike(cost.ranks)
    return Report(
        Text(_headline(cost)),
        Text(phases_line(cost)),
        Text(_paces_line(cost)),
        times_table(rows),
        memory_table(rows),
    )


def times_table(rows: Sequence[Sequence[RankCost]]) -> Table:
    """Return a table of each rank's time; ranks that are alike share a line."""
    table = make_table((*_HEADS, *map(spell_phase, _TIMES)), _HEADS, _TIMES_CAPTION)
    for ranks in rows:
        times = (spell_seconds(getattr(ranks[0], f"{name}_s")) for name in _TIMES)
        table.add_row(*rank_cells(ranks), *times)
    return table


def memory_table(rows: Sequence[Sequence[RankCost]]) -> Table:
    """Return a table of each rank's memory; ranks that are alike share a line."""
    terms = [name for name in rows[0][0].memory.terms if any(ranks[0].memory.terms[name] for ranks in rows)]
    waiting = any(ranks[0].host_memory.total for ranks in rows)
    columns = (*map(spell_phase, terms), "total", "usable", *(["in host memory"] if waiting else []))
    table = make_table((*_HEADS, *columns), _HEADS, _MEMORY_CAPTION)
    for ranks in rows:
        rank = ranks[0]
        full = rank.memory_gib > rank.usable_gib
        table.add_row(
            *rank_cells(ranks),
            *(f"{rank.memory.terms[term] / GIB:.1f}" for term in terms),
            Text(f"{rank.memory_gib:.1f}", style="bold red" if full else ""),
            f"{rank.usable_gib:.1f}",
            *([f"{rank.host_memory.total / GIB:.1f}"] if waiting else []),
        )
    return table


def estimate_dict(cost: IterationCost, job: Job) -> dict[str, Any]:
    """Return the whole prediction as plain values: seconds, GiB, tokens/s."""
    shortage = find_shortage(cost)
    return {
        "model": job.model.name,
        "iteration_s": cost.iteration_s,
        "tokens_per_s": cost.tokens_per_s,
        **cost.throughput.facts,
        "ceiling_tokens_per_s": cost.ceiling_tokens_per_s,
        "exposed_communication_s": cost.phases.communication,
        "idle_share": cost.idle_share,
        "phases_s": cost.phases.by_name,
        "paces": [vars(pace) for pace in cost.paces],
        "memory_gib": list(cost.memory_gib),
        "fits": cost.fits,
        "shortage": None if shortage is None else vars(shortage) | {"short_gib": shortage.short_gib},
        "ranks": [_rank_dict(rank) for rank in cost.ranks],
    }


def spell_throughput(throughput: Throughput) -> str:
    """Return text such as ``431 per GPU, 412 model TFLOP/s per GPU, MFU 41.6 %``, to follow tokens/s."""
    words = [
        f"{throughput.tokens_per_s_per_gpu:,.0f} per GPU",
        f"{throughput.model_tflops_per_gpu:,.3g} model TFLOP/s per GPU",
    ]
    if throughput.mfu is not None:
        words.append(f"MFU {throughput.mfu:.1%}")
    return ", ".join(words)


#: Columns of `throughput_cells`: tokens/s, tokens/s and model TFLOP/s of a GPU, and MFU.
THROUGHPUT_COLUMNS = ("tokens/s", "per GPU", "TFLOP/s", "MFU")


def throughput_cells(throughput: Throughput | None) -> tuple[str, str, str, str]:
    """Return the cells of `THROUGHPUT_COLUMNS`; ``-`` where unknown."""
    if throughput is None:
        return ("-",) * 4
    return (
        f"{throughput.tokens_per_s:,.0f}",
        f"{throughput.tokens_per_s_per_gpu:,.0f}",
        f"{throughput.model_tflops_per_gpu:,.3g}",
        "-" if throughput.mfu is None else f"{throughput.mfu:.1%}",
    )


def spell_phase(name: str) -> str:
    """Return a field of `Phases` as users read it."""
    return {"token": "linear layers", "spread": "GPU variability"}.get(name, name.replace("_", " "))


def phases_line(cost: IterationCost) -> str:
    """Return a line with the phases of an iteration, the longest first."""
    shares = {name: seconds / cost.iteration_s for name, seconds in cost.phases.by_name.items()}
    parts = sorted(shares.items(), key=lambda item: -item[1])
    spelt = [f"{spell_phase(name)} {share:.1%}" for name, share in parts if share >= _LEAST_SHARE]
    return "time goes to: " + ", ".join(spelt)


def _rank_dict(rank: RankCost) -> dict[str, Any]:
    facts = {key: value for key, value in vars(rank).items() if key not in ("memory", "host_memory")}
    for name, memory in (("memory_gib", rank.memory), ("host_memory_gib", rank.host_memory)):
        sizes = {term: size / GIB for term, size in memory.terms.items()}
        facts[name] = sizes | {"total": memory.total / GIB}
    return facts


def _headline(cost: IterationCost) -> str:
    share = cost.tokens_per_s / cost.ceiling_tokens_per_s
    return (
        f"predicted: {spell_seconds(cost.iteration_s)} s per iteration, {cost.tokens_per_s:,.0f} tokens/s "
        f"({spell_throughput(cost.throughput)}; {share:.0%} of the ceiling), "
        f"{spell_seconds(cost.phases.communication)} s of exposed "
        f"communication, ranks idle {cost.idle_share:.1%} of the time"
    )


def _paces_line(cost: IterationCost) -> str:
    spelt = [
        f"{spell_phase(pace.phase)} rank {pace.rank} ({pace.name})" for pace in cost.paces if pace.seconds
    ]
    return "slowest: " + ", ".join(spelt)


def _alike(ranks: Sequence[RankCost]) -> list[list[RankCost]]:
    """Return groups of neighbouring ranks on one node whose displayed numbers are equal."""

    def look(rank: RankCost) -> tuple[object, ...]:
        node = rank.name.rpartition("/")[0]
        times = tuple(spell_seconds(getattr(rank, f"{name}_s")) for name in _TIMES)
        sizes = tuple(
            f"{size / GIB:.1f}"
            for memory in (rank.memory, rank.host_memory)
            for size in memory.terms.values()
        )
        return node, rank.stage, *times, *sizes

    return [list(group) for _, group in itertools.groupby(ranks, key=look)]


def rank_cells(ranks: Sequence[RankPlace]) -> tuple[str, Text, Text]:
    """Return cells of neighbouring ranks that are alike: their numbers, their GPU, and its names."""
    first, last = ranks[0], ranks[-1]
    if first is last:
        return str(first.rank), Text(first.device), Text(first.name)
    names = f"{first.name}-{last.name.rpartition('/')[2]}"
    return f"{first.rank}-{last.rank}", Text(first.device), Text(names)
