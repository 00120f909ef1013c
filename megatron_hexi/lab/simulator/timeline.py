"""A simulated iteration as tables for a terminal and as plain values for --json."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_hexi.cost import IterationCost
from megatron_hexi.lab.simulator import (
    DrawnDocuments,
    LinkUse,
    PhaseComparison,
    RankTimeline,
    Simulation,
)
from megatron_hexi.report.estimate import rank_cells, spell_phase, spell_throughput
from megatron_hexi.report.tables import make_table
from megatron_hexi.spelling import spell_bytes, spell_seconds

_RANKS_CAPTION = (
    "seconds of an iteration; communication: waiting while its own messages are in flight; idle: for others"
)
_LINKS_CAPTION = (
    "all-to-alls and exchange of an iteration; busy: at full rate; at once: the most that shared it"
)
_PHASES_CAPTION = (
    "seconds of an iteration, along the slowest way; difference: as a part of the model's iteration"
)
#: Links shown; hundreds of others are alike.
_LINKS = 8


def timeline_report(
    simulation: Simulation,
    cost: IterationCost,
    differences: Sequence[PhaseComparison],
    drawn: DrawnDocuments | None = None,
) -> RenderableType:
    """Return the simulation for a terminal: summary, ranks, busiest links, and the cost model."""
    return Group(
        Text(_headline(simulation, cost)),
        *([] if drawn is None else [Text(_drawn_line(drawn))]),
        Text(_replayed_line(simulation)),
        ranks_table(simulation.ranks),
        *([links_table(simulation.links)] if simulation.links else []),
        differences_table(differences),
    )


def ranks_table(ranks: Sequence[RankTimeline]) -> Table:
    """Return a table of each rank's time; ranks that are alike share a line."""
    who = ("ranks", "GPU", "names")
    table = make_table((*who, *ranks[0].busy, "communication", "idle", "idle share"), who, _RANKS_CAPTION)
    for (*_, cells), alike in itertools.groupby(ranks, key=_displayed):
        table.add_row(*rank_cells(list(alike)), *cells)
    return table


def links_table(links: Sequence[LinkUse]) -> Table:
    """Return a table of the busiest links."""
    table = make_table(("link", "bytes", "busy", "at once"), ("link",), _LINKS_CAPTION)
    for link in links[:_LINKS]:
        table.add_row(
            Text(link.name), spell_bytes(round(link.bytes)), f"{link.busy_share:.1%}", str(link.most_at_once)
        )
    return table


def differences_table(differences: Sequence[PhaseComparison]) -> Table:
    """Return a table of the cost model and the simulator; the whole iteration comes last."""
    table = make_table(("phase", "model", "simulated", "difference"), ("phase",), _PHASES_CAPTION)
    for row in differences:
        table.add_row(
            spell_phase(row.phase),
            spell_seconds(row.model_s),
            spell_seconds(row.simulated_s),
            f"{row.difference_s / differences[-1].model_s:+.1%}",
            end_section=row is differences[-2],
        )
    return table


def timeline_dict(
    simulation: Simulation,
    cost: IterationCost,
    differences: Sequence[PhaseComparison],
    drawn: DrawnDocuments | None = None,
) -> dict[str, Any]:
    """Return the simulation without its events as plain values: seconds, bytes, tokens/s."""
    return {
        "iteration_s": simulation.iteration_s,
        "tokens_per_s": simulation.tokens_per_s,
        **cost.throughput.at(simulation.tokens_per_s).facts,
        "idle_share": simulation.idle_share,
        "exposed_communication_s": simulation.phases.communication,
        "phases_s": simulation.phases.by_name,
        "model_iteration_s": cost.iteration_s,
        "replayed_layers": simulation.layers,
        "stage_layers": simulation.stage_layers,
        "layer_kinds": list(filter(None, simulation.kinds)),
        "ranks": [dataclasses.asdict(rank) for rank in simulation.ranks],
        "links": [dataclasses.asdict(link) for link in simulation.links],
        "drawn_documents": drawn and dataclasses.asdict(drawn) | {"imbalance": drawn.imbalance},
        "differences": [dataclasses.asdict(row) | {"difference_s": row.difference_s} for row in differences],
    }


def _displayed(rank: RankTimeline) -> tuple[str, int, list[str]]:
    """Return a rank's node, stage, and cells of its times; neighbours in which all are equal are alike."""
    times = [*rank.busy.values(), rank.communication_s, rank.idle_s]
    return rank.name.rpartition("/")[0], rank.stage, [*map(spell_seconds, times), f"{rank.idle_share:.1%}"]


def _headline(simulation: Simulation, cost: IterationCost) -> str:
    apart = simulation.iteration_s / cost.iteration_s - 1
    return (
        f"simulated: {spell_seconds(simulation.iteration_s)} s per iteration ({apart:+.1%} against the cost "
        f"model), {simulation.tokens_per_s:,.0f} tokens/s "
        f"({spell_throughput(cost.throughput.at(simulation.tokens_per_s))}), "
        f"{spell_seconds(simulation.phases.communication)} s of exposed communication, "
        f"ranks idle {simulation.idle_share:.1%} of the time"
    )


def _drawn_line(drawn: DrawnDocuments) -> str:
    return (
        f"random documents: {spell_seconds(drawn.mean_s)} s in the mean of {len(drawn.iterations_s)} "
        f"iterations (seed {drawn.seed}), {drawn.imbalance:.1%} more than if micro-batches were alike; the "
        f"slowest takes {spell_seconds(max(drawn.iterations_s))} s"
    )


def _replayed_line(simulation: Simulation) -> str:
    layers, all_of_them = simulation.layers, simulation.stage_layers
    if len(simulation.kinds) > 1:
        return (
            f"replayed: one micro-batch through up to {layers} layers of each kind of each stage "
            f"({'; '.join(simulation.kinds)}), and back; the others of a kind go on like its last two"
        )
    if layers == all_of_them:
        return f"replayed: one micro-batch through all {layers} layers of each stage, and back"
    return (
        f"replayed: one micro-batch through {layers} of the {all_of_them} layers of each stage, and back; "
        "the others go on like the last two"
    )
