"""`python -m benchmarks.models`: plans of models with experts, windows and latent attention, cell by cell.

A cell is a cluster, a model and a context; nothing else is asked for. The plan stands beside the fastest
layout that gives every rank the same, of all that Megatron's flags can say, expert parallelism included. All
of it is prediction by the cost model. Each cell is kept in docs/results/models.json as soon as it is planned,
and cells that are kept are not planned again; `--page` writes docs/results/models.md from all that are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.layouts import (
    A100,
    CARDS,
    CLUSTERS,
    H100,
    K,
    Machines,
    Planned,
    merge_stages,
    spell_machines,
)
from benchmarks.rivals.readings.staged import spell_stages
from megatron_hexi.cluster import Cluster
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Job, read_model
from megatron_hexi.plan import Plan
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.planner.features import features_of
from megatron_hexi.text_file import write_text_atomically

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "models.json"

MACHINES = {
    "a": CLUSTERS["a"],
    "e": CLUSTERS["e"],
    "two-nodes": Machines(((H100, 2, 8),), CARDS),
    "one-of-each": Machines(((H100, 1, 8), (A100, 1, 8)), CARDS),
}
MODELS = ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "gpt-oss-120b", "gemma-3-27b", "mixtral-8x7b")
#: Tokens of a sequence, and sequences of a global batch of 4 Mi tokens.
CONTEXTS = ((32 * K, 128), (128 * K, 32))


@dataclass(frozen=True, kw_only=True)
class Row(Planned):
    """A cell with the lower bound.

    Args:
        equal: the fastest equal layout in words, or why there is none.
        bound_s: seconds that no layout can beat by the cost model; ``None``: there is no plan.
        even_experts_s: seconds of the best plan with equal numbers of experts on all ranks; ``None``: the
            plan has these already.
    """

    equal: str = ""
    bound_s: float | None = None
    even_experts_s: float | None = None


def measure(cell: str, request: Request, machines: Cluster) -> Row:
    """Return a cell's plan and its fastest equal layout."""
    begun = time.process_time()
    try:
        found = find_plan(request, machines, with_baselines=True)
    except HexiError as problem:
        return Row(
            cell=cell,
            iteration_s=None,
            equal_s=None,
            layout=str(problem),
            planning_s=time.process_time() - begun,
        )
    planning_s = time.process_time() - begun
    equal = max(found.baselines, key=lambda one: one.tokens_per_s or 0.0)
    return Row(
        cell=cell,
        iteration_s=found.cost.iteration_s,
        equal_s=equal.trial.iteration_s if equal.trial is not None else None,
        equal=equal.layout if equal.trial is not None else str(equal.why_not),
        bound_s=found.bound.iteration_s,
        even_experts_s=_with_even_experts(request, machines, found.plan),
        layout=merge_stages(spell_stages(found.plan, machines)),
        planning_s=planning_s,
    )


def _with_even_experts(request: Request, machines: Cluster, plan: Plan) -> float | None:
    """Return seconds of the best plan with equal numbers of experts on all ranks, if the plan's differ."""
    if "unequal_experts" not in features_of(plan):
        return None
    rules = replace(request.rules, unequal_experts=False)
    return find_plan(replace(request, rules=rules), machines).cost.iteration_s


_PAGE = """\
# Models with experts, windows and latent attention

**Simulated: nothing on this page was measured on a GPU.** All of it is prediction by the
[cost model](../cost-model.md), which also judged the search. Written by `python -m benchmarks.models --page`
from [models.json](models.json), which has each layout in words; do not edit.

The [planner](../planner.md)'s plan beside the fastest layout that gives every rank the same, by search over
all of Megatron's flags with expert parallelism: {least:.2f} to {most:.2f} times as fast in the {count} cells
where any equal layout fits, {mean:.2f} times in the geometric mean.

| cell | plan, s | best equal, s | times as fast | even experts, s | over the bound | planning, s |
|---|---:|---:|---:|---:|---:|---:|
{rows}

A cell is a cluster, a model and a context; a batch is of 4 Mi tokens. -: nothing fits. Even experts: the best
plan that may be uneven in all but the number of experts a rank; -: the plan is that one.{uneven}
Over the bound: how much longer than the cost model allows any layout to be. Planning: seconds of one core for
the plan, the bound and the equal layouts.
{missing}{refused}
## Clusters

Nodes x GPUs of each; {gpu:g} GB/s a GPU between nodes.

{clusters}
"""


def page(rows: Sequence[Row], missing: Sequence[str] = ()) -> str:
    """Return docs/results/models.md, which names the cells that have not been planned."""
    gains = [row.gain for row in rows if row.gain is not None]
    return _PAGE.format(
        least=min(gains),
        most=max(gains),
        count=len(gains),
        mean=math.exp(math.fsum(map(math.log, gains)) / len(gains)),
        rows="\n".join(map(_line, rows)),
        uneven=_gains_of_uneven(rows),
        refused=_refused(rows),
        missing=f"\nNot planned yet: {', '.join(missing)}.\n" if missing else "",
        gpu=CARDS["bandwidth_gb_s"],
        clusters="\n".join(f"- {name}: {spell_machines(machines)}" for name, machines in MACHINES.items()),
    )


def _gains_of_uneven(rows: Sequence[Row]) -> str:
    """Return a sentence, on a line of its own, on what unequal numbers of experts save; may be empty."""
    saved = [
        1 - row.iteration_s / row.even_experts_s for row in rows if row.iteration_s and row.even_experts_s
    ]
    if not saved:
        return ""
    return (
        f"\n{len(saved)} of {len(rows)} plans have unequal numbers, which save at most {max(saved):.1%} "
        "of the time; in one stage of two\nkinds of GPU they save [more](../planner.md#models-with-experts)."
    )


def _refused(rows: Sequence[Row]) -> str:
    """Return a section with the reasons why cells have no plan or no equal layout; may be empty."""
    reasons = [f"- {row.cell}: {row.layout.split(';')[0]}" for row in rows if row.iteration_s is None]
    reasons += [
        f"- {row.cell}, equal layouts: {row.equal.split(';')[0]}"
        for row in rows
        if row.iteration_s and row.equal_s is None
    ]
    if not reasons:
        return ""
    return "\n## What does not fit\n\n" + "\n".join(reasons) + "\n"


def _line(row: Row) -> str:
    over = row.iteration_s / row.bound_s - 1 if row.iteration_s and row.bound_s else None
    values = (
        (row.iteration_s, ".4g"),
        (row.equal_s, ".4g"),
        (row.gain, ".2f"),
        (row.even_experts_s, ".4g"),
        (over, ".0%"),
    )
    told = ["-" if value is None else format(value, form) for value, form in values]
    return f"| {row.cell} | {' | '.join(told)} | {row.planning_s:.0f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cells", nargs="*", help="only cells whose names have all of these words")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    parser.add_argument("--page", action="store_true", help="write docs/results/models.md")
    given = parser.parse_args(arguments)
    kept = {row["cell"]: Row(**row) for row in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    cells = {
        f"{cluster} {model} {seq_length // K}K": (cluster, model, seq_length, batch)
        for cluster in MACHINES
        for seq_length, batch in CONTEXTS
        for model in MODELS
    }
    asked = [cell for cell in cells if set(given.cells) <= set(cell.split())]
    if not asked:
        parser.error(f"no cell has the words {' '.join(given.cells)}; give some of {', '.join(MODELS)}")
    for cell in asked:
        if cell not in kept:
            cluster, model, seq_length, batch = cells[cell]
            job = Job(read_model(model), seq_length, global_batch_size=batch)
            kept[cell] = measure(cell, Request(job), MACHINES[cluster].cluster(cluster))
            document = json.dumps([asdict(row) for row in kept.values()], indent=1)
            write_text_atomically(RESULTS, document + "\n")
        if not given.json:
            print(f"{_line(kept[cell])} {kept[cell].layout}", flush=True)
    if given.json:
        print(json.dumps([asdict(kept[cell]) | {"gain": kept[cell].gain} for cell in asked], indent=2))
    if given.page:
        missing = [cell for cell in cells if cell not in kept]
        write_text_atomically(
            RESULTS.with_suffix(".md"), page([kept[cell] for cell in cells if cell in kept], missing)
        )


if __name__ == "__main__":
    main()
