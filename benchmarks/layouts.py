"""`python -m benchmarks.layouts`: what the planner's choice of the whole layout is worth, cell by cell.

A cell is a cluster of GPUs that differ, a model, a context and a batch; nothing is fixed. The plan stands
beside what one would run without a planner, each with the best of Megatron's flags: the best layout that
gives every rank the same, and the best that gives tokens in proportion to speed. All of it is prediction by
the cost model. `--page` writes docs/results/planner.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.proof import joint_bound
from benchmarks.rivals.readings import read_baselines
from benchmarks.rivals.readings.staged import spell_stages
from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.errors import NothingFitsError
from megatron_hexi.models import Job, read_model
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.planner.baselines import find_baselines
from megatron_hexi.text_file import write_text_atomically

PAGE = Path(__file__).parent.parent / "docs" / "results" / "planner.md"

H100, H200, A100, A100_40, A800, L40S = (
    "H100-SXM-80GB", "H200-SXM-141GB", "A100-SXM-80GB", "A100-SXM-40GB", "A800-SXM-80GB", "L40S-48GB",
)  # fmt: skip
#: A card of 200 Gb/s for each GPU; a link of cloud machines, shared by a node's GPUs.
CARDS = {"bandwidth_gb_s": 25, "latency_us": 10, "per": "gpu"}
ETHERNET = {"bandwidth_gb_s": 0.7, "latency_us": 50, "per": "node"}


@dataclass(frozen=True)
class Machines:
    """A cluster.

    Args:
        nodes: GPU, nodes, GPUs of each.
        network: between nodes.
        sites: entries of `nodes` on each site, and GB/s between these; ``None``: there is one site.
    """

    nodes: tuple[tuple[str, int, int], ...]
    network: dict[str, Any]
    sites: tuple[tuple[tuple[int, ...], ...], float] | None = None

    def cluster(self, name: str) -> Cluster:
        """As read from a file."""
        document: dict[str, Any] = {
            "name": name,
            "nodes": [
                {"name": f"n{number}", "gpu": gpu, "count": count, "gpus": size}
                for number, (gpu, count, size) in enumerate(self.nodes)
            ],
            "network": self.network,
        }
        if self.sites is not None:
            groups, rate = self.sites
            level = {"name": "site", "per": "group", "bandwidth_gb_s": rate, "latency_us": 500}
            document["levels"] = [level | {"groups": [[f"n{entry}" for entry in group] for group in groups]}]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cluster.yaml"
            path.write_text(yaml.safe_dump(document))
            return read_cluster(path)


CLUSTERS = {
    "a": Machines(((H100, 5, 8), (A100, 4, 8), (A800, 4, 8), (L40S, 3, 8)), CARDS),
    "b": Machines(((H100, 1, 8), (A100, 3, 8), (L40S, 2, 8)), CARDS),
    "c": Machines(((H100, 1, 4), (A100_40, 1, 8)), CARDS),
    "d": Machines(((H200, 2, 8), (H100, 2, 8)), CARDS),
    "e": Machines(((H100, 8, 8), (A100, 8, 8)), CARDS),
    "sites": Machines(((H100, 4, 8), (A100, 4, 8)), CARDS, (((0,), (1,)), 5.0)),
    "hexiscale-1": Machines(
        (("RTX3080Ti-12GB", 1, 8), ("RTX3090-24GB", 1, 8), ("RTX4090-24GB", 3, 8)), ETHERNET
    ),
    "hexiscale-2": Machines((("RTX3090-24GB", 1, 8), ("RTX4090-24GB", 1, 8), (A800, 1, 8)), ETHERNET),
    "hexiscale-3": Machines((("RTX3090-24GB", 1, 8), ("RTX4090-24GB", 4, 8), (A800, 1, 8)), ETHERNET),
    "zorse-a": Machines(((H100, 1, 4), (A100, 2, 8)), CARDS),
    "zorse-b": Machines(
        ((A100, 1, 8), ("A10G-24GB", 2, 8), ("V100-SXM2-16GB", 2, 8), ("T4-16GB", 6, 4)), CARDS
    ),
    "zorse-c": Machines(
        (("A10G-24GB", 2, 8), ("T4-16GB", 12, 4), ("V100-SXM2-16GB", 2, 8), ("T4-16GB", 12, 4)),
        CARDS,
        (((0, 1), (2, 3)), 0.71),
    ),
}
K = 1024
#: Cluster, model, context, batch, precision.
CELLS = (
    ("a", "llama3-70b", 8 * K, 64, "bf16"),
    ("a", "gpt-13b", 32 * K, 8, "bf16"),
    ("a", "llama3-70b", 128 * K, 8, "bf16"),
    ("b", "qwen3-32b", 8 * K, 64, "bf16"),
    ("b", "gpt-13b", 8 * K, 64, "bf16"),
    ("b", "llama3-70b", 32 * K, 8, "bf16"),
    ("b", "gpt-13b", 128 * K, 8, "bf16"),
    ("c", "llama3-8b", 8 * K, 8, "bf16"),
    ("c", "gpt-13b", 32 * K, 8, "bf16"),
    ("c", "llama3-8b", 128 * K, 8, "bf16"),
    ("d", "llama3-70b", 8 * K, 64, "bf16"),
    ("d", "qwen3-32b", 32 * K, 64, "bf16"),
    ("d", "llama3-70b", 128 * K, 8, "bf16"),
    ("e", "llama3-70b", 8 * K, 64, "bf16"),
    ("e", "llama3-70b", 128 * K, 8, "bf16"),
    ("sites", "llama3-70b", 8 * K, 64, "bf16"),
    ("sites", "llama3-70b", 128 * K, 8, "bf16"),
    ("hexiscale-1", "gpt-7b", 4 * K, 64, "bf16"),
    ("hexiscale-2", "gpt-7b", 4 * K, 64, "bf16"),
    ("hexiscale-3", "gpt-13b", 4 * K, 64, "bf16"),
    ("zorse-a", "gpt-13b", 4 * K, 64, "bf16"),
    ("zorse-b", "gpt-7b", 2 * K, 128, "fp16"),
    ("zorse-c", "gpt-7b", 2 * K, 128, "fp16"),
)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A cell and the plan found for it, beside the fastest equal layout.

    Args:
        cell: cluster, model and context, as text.
        iteration_s: predicted seconds of the plan's iteration; ``None``: there is no plan.
        equal_s: predicted seconds of the fastest layout that gives every rank the same; ``None``: none fits.
        layout: the plan in words, or why there is none.
        planning_s: processor time of the search.
    """

    cell: str
    iteration_s: float | None
    equal_s: float | None
    layout: str
    planning_s: float

    @property
    def gain(self) -> float | None:
        """The plan's speed over that of the fastest equal layout; ``None``: one of them is missing."""
        if self.iteration_s is None or self.equal_s is None:
            return None
        return self.equal_s / self.iteration_s


@dataclass(frozen=True, kw_only=True)
class Row(Planned):
    """A cell with the layouts of other planners.

    Args:
        proportion_s: seconds of the best layout that gives tokens in proportion; ``None``: none fits.
        hexiscale_s: the same of HexiScale's planner, as we read it.
        zorse_s: the same of Zorse's.
        gap: part that the plan takes longer than the lower bound; ``None``: there is no plan.
    """

    proportion_s: float | None = None
    hexiscale_s: float | None = None
    zorse_s: float | None = None
    gap: float | None = None


def asked(
    cluster: str, model: str, seq_length: int, batch: int, precision: str
) -> tuple[str, Request, Cluster]:
    """Its name, what is asked for, and where."""
    job = Job(
        model=read_model(model),
        seq_length=seq_length,
        global_batch_size=batch,
        precision=precision,  # type: ignore[arg-type]
    )
    name = f"{cluster} {model} {seq_length // K}K {batch}"
    return name, Request(job), CLUSTERS[cluster].cluster(cluster)


def measure(name: str, request: Request, machines: Cluster) -> Row:
    """One cell."""
    begun = time.process_time()
    try:
        alone = find_plan(request, machines)
    except NothingFitsError as problem:
        return Row(
            cell=name,
            iteration_s=None,
            equal_s=None,
            layout=str(problem),
            planning_s=time.process_time() - begun,
        )
    planning_s = time.process_time() - begun
    baselines, _ = find_baselines(request, machines)
    baselines += read_baselines(request, machines)
    best = {one.name: one.trial.iteration_s for one in baselines if one.trial is not None}
    return Row(
        cell=name,
        iteration_s=alone.cost.iteration_s,
        equal_s=best.get("usp"),
        proportion_s=best.get("proportion"),
        hexiscale_s=best.get("hexiscale"),
        zorse_s=best.get("zorse"),
        gap=alone.cost.iteration_s / joint_bound(request, machines, alone.cost.iteration_s).iteration_s - 1,
        layout=spell_stages(alone.plan, machines),
        planning_s=planning_s,
    )


_COLUMNS = (
    *("cell: cluster, model, context, batch", "plan, s", "best equal, s", "times as fast"),
    *("in proportion, s", "HexiScale, s", "Zorse, s", "over the bound"),
)
_PAGE = """\
# What choosing the whole layout is worth

**Simulated: nothing on this page was measured on a GPU.** All of it is prediction by the
[cost model](../cost-model.md), which also judged the search. Written by
`python -m benchmarks.layouts --page`; do not edit. Without `--page` it prints each cell's plan, too.

Against the best layout that Megatron can run with equal parts, by search over all of its flags, the
[planner](../planner.md)'s plan is {least:.2f} to {most:.2f} times as fast, {middle:.2f} times in the median
of the {count} cells where any equal layout fits.

{head}
|---|---:|---:|---:|---:|---:|---:|---:|
{rows}

Best equal: every rank the same tokens, heads, layers and batch, ring, Ulysses or USP inside, with the best
tensor-parallel size, stages, replicas and recomputation. In proportion: tokens by speed, the rest likewise.
HexiScale and Zorse: the planners of arXiv 2409.01143 and 2507.10392 as we read them, by the same cost model;
neither cuts the sequence, and Zorse's has no ministages, offloading or sharded parameters. -: nothing fits.
Over the bound: how much longer than no layout can beat; traffic is not counted there.

## Where memory limits

By `python -m benchmarks.memory`, which prints the plans, too. Without: the best layout without ministages,
offload and shares of state. Zorse with: its layout with these.

{memory}

## Clusters

Nodes x GPUs of each; {gpu:g} GB/s a GPU between nodes, {node:g} GB/s a node in HexiScale's clusters, over
Ethernet. Names say whose they are.

{clusters}
"""


def page(rows: Sequence[Row], memory: str) -> str:
    """docs/results/planner.md, with the table of benchmarks.memory."""
    gains = sorted(row.gain for row in rows if row.gain is not None)
    return _PAGE.format(
        least=gains[0],
        most=gains[-1],
        middle=gains[len(gains) // 2],
        count=len(gains),
        head=f"| {' | '.join(_COLUMNS)} |",
        rows="\n".join(map(_line, rows)),
        memory=memory,
        gpu=CARDS["bandwidth_gb_s"],
        node=ETHERNET["bandwidth_gb_s"],
        clusters="\n".join(f"- {name}: {spell_machines(machines)}" for name, machines in CLUSTERS.items()),
    )


def _line(row: Row) -> str:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    values = [
        cell(row.iteration_s, ".4g"),
        cell(row.equal_s, ".4g"),
        cell(row.gain, ".2f"),
        cell(row.proportion_s, ".4g"),
        cell(row.hexiscale_s, ".4g"),
        cell(row.zorse_s, ".4g"),
        cell(row.gap, ".0%"),
    ]
    return f"| {row.cell} | {' | '.join(values)} |"


def merge_stages(layout: str) -> str:
    """A layout of `spell_stages` with stages that follow their like counted."""
    replicas = []
    for replica in layout.split("; "):
        share, _, stages = replica.removesuffix(")").partition("(")
        runs = [(stage, len(list(alike))) for stage, alike in itertools.groupby(stages.split(" / "))]
        told = " / ".join(stage if count == 1 else f"{count} of [{stage}]" for stage, count in runs)
        replicas.append(f"{share}({told})")
    return "; ".join(replicas).replace(", TP ", " TP").replace(" layers", "L")


def spell_machines(machines: Machines) -> str:
    """Return a cluster in words: nodes x GPUs of each kind, and its sites."""
    nodes = ", ".join(f"{count}x{size} {gpu}" for gpu, count, size in machines.nodes)
    return nodes + ("" if machines.sites is None else f"; {machines.sites[1]} GB/s between two sites")


def rows(names: Sequence[str]) -> Iterator[Row]:
    """Of the cells on some clusters, all if none is named."""
    for cell in CELLS:
        if not names or cell[0] in names:
            yield measure(*asked(*cell))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("clusters", nargs="*", help="only these: " + ", ".join(CLUSTERS))
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    parser.add_argument("--page", action="store_true", help="write docs/results/planner.md")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.clusters if name not in CLUSTERS]
    if unknown:
        parser.error(f"no cluster {unknown[0]}; give some of {', '.join(CLUSTERS)}")
    if given.page and given.clusters:
        parser.error("--page needs all clusters; leave their names out")
    found = []
    for row in rows(given.clusters):
        found.append(row)
        if not given.json:
            print(f"{_line(row)} {merge_stages(row.layout)}", flush=True)
    if given.json:
        print(json.dumps([asdict(row) | {"gain": row.gain} for row in found], indent=2))
    if given.page:
        from benchmarks import memory  # it takes clusters from here

        write_text_atomically(PAGE, page(found, memory.table(memory.rows())))


if __name__ == "__main__":
    main()
