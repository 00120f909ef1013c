"""Tables of what was measured on one GPU, beside what the cost model says of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.one_gpu.cells import Trained, job_of, trained
from benchmarks.one_gpu.parts import Row
from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.plan import proportional_plan

GIB = 2**30


def tables(run: Row) -> str:
    """All tables of a run, one below the other."""
    parts = run["parts"]
    found = []
    if "training" in parts:
        rows = trained(parts["training"]["rows"])
        found += [training_table(rows, machine_of(run["gpu"])), overhead_table(rows)]
    if "mixed" in parts:
        found.append(mixed_table(parts["mixed"]["rows"]))
    if "sweep" in parts:
        found += sweep_tables(parts["sweep"]["rows"])
    return "\n\n".join(table for table in found if table)


def training_table(rows: Sequence[Trained], cluster: Cluster) -> str:
    """Trainings under a plan; errors are parts of what was measured, memory is without the reserve."""
    lines = [
        "| training | measured, s | predicted | | measured, GiB | predicted | |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in rows:
        if one.cell.side != "plan":
            continue
        job = job_of(one.cell)
        cost = CostModel(job, cluster).estimate(proportional_plan(job.workload(), [[[1]]]))
        memory = cost.ranks[0].memory
        held = (memory.total - memory.reserve) / GIB
        kept = "| | |"
        if one.peak_bytes is not None:
            peak = one.peak_bytes / GIB
            kept = f"{peak:.1f} | {held:.1f} | {held / peak - 1:+.0%} |"
        times = f"{one.seconds:.3f} | {cost.iteration_s:.3f} | {cost.iteration_s / one.seconds - 1:+.0%}"
        lines.append(f"| {one.cell.name} | {times} | {kept}")
    return "\n".join(lines)


def overhead_table(rows: Sequence[Trained]) -> str:
    """Trainings that ran with and without a plan; empty without any."""
    lines = [
        "| training | stock Megatron, s | under a plan | | stock, GiB | under a plan |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    stock = {one.cell.name: one for one in rows if one.cell.side == "stock"}
    for one in rows:
        other = stock.get(one.cell.name)
        if one.cell.side == "plan" and other is not None:
            memory = " | ".join(f"{(side.peak_bytes or 0) / GIB:.1f}" for side in (other, one))
            ratio = one.seconds / other.seconds
            lines.append(
                f"| {one.cell.name} | {other.seconds:.3f} | {one.seconds:.3f} | {ratio:.3f}x | {memory} |"
            )
    return "\n".join(lines) if len(lines) > 2 else ""


def mixed_table(rows: Sequence[Row]) -> str:
    """Mixed clusters: each layout's measured and predicted seconds, and both over the plan's."""
    lines = [
        "| cluster | layout | measured, s | predicted | | over the plan, measured | predicted |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    ran = [row for row in rows if "seconds" in row]
    for row in ran:
        plan = next(other for other in ran if other["cluster"] == row["cluster"])
        measured, predicted = row["seconds"], row["predicted_s"]
        over = f"{measured / plan['seconds']:.2f}x | {predicted / plan['predicted_s']:.2f}x"
        lines.append(
            f"| {row['cluster']} | {row['layout']} | {measured:.3f} | {predicted:.3f} | "
            f"{predicted / measured - 1:+.0%} | {over} |"
        )
    return "\n".join(lines) if ran else ""


def sweep_tables(rows: Sequence[Row]) -> list[str]:
    """TFLOP/s of products, of experts' products and of causal attention, by shape and size."""
    products = {
        (f"{row['in']} x {row['out']}", row["rows"]): _together(row["tflops"])
        for row in rows
        if row["kind"] == "product"
    }
    experts = {
        (f"{row['experts']} of {row['in']} x {row['out']}", row["rows"]): row["tflops"]["forward"]
        for row in rows
        if row["kind"] == "grouped product"
    }
    attention = {
        (f"{row['kernel']}, {row['heads']} heads, {way}", row["tokens"]): row["tflops"][f"causal {way}"]
        for row in rows
        for way in ("forward", "backward")
        if row["kind"] == "attention"
    }
    return [
        _grid("weight, by rows", products),
        _grid("experts, by rows of each", experts),
        _grid("attention, by tokens", attention),
    ]


def _together(rates: Mapping[str, float]) -> float:
    """The rate of several products of equal size, one after the other."""
    return len(rates) / sum(1 / rate for rate in rates.values())


def _grid(title: str, cells: Mapping[tuple[str, int], float]) -> str:
    """A table by name and size; empty where there are no cells."""
    names, sizes = dict.fromkeys(name for name, _ in cells), sorted({size for _, size in cells})
    lines = [f"| {title} | {' | '.join(map(str, sizes))} |", "|---|" + "---:|" * len(sizes)]
    for name in names:
        found = (f"{cells[name, size]:.0f}" if (name, size) in cells else "not run" for size in sizes)
        lines.append(f"| {name} | {' | '.join(found)} |")
    return "\n".join(lines) if cells else ""


def machine_of(gpu: str) -> Cluster:
    """A machine with one GPU of the catalogue."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.yaml"
        network = "network: {bandwidth_gb_s: 25, latency_us: 10, per: node}\n"
        path.write_text(f"name: one\nnodes: [{{name: node, gpu: {gpu}, gpus: 1}}]\n{network}")
        return read_cluster(path)


def read_runs(path: Path) -> list[Row]:
    """Runs that a file of results holds, in order."""
    runs: list[dict[str, Any]] = json.loads(path.read_text())
    return runs
