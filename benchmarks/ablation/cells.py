"""Requests on which mechanisms are removed: free, with fixed sizes, kinds of layers, large, hopeless."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.layouts import A100, A100_40, CARDS, CELLS, CLUSTERS, H100, H200, L40S, K, Machines, asked
from megatron_hexi.cluster import Cluster
from megatron_hexi.models import Job, read_model
from megatron_hexi.planner import Request

ETHERNET = {"bandwidth_gb_s": 3, "latency_us": 50, "per": "node"}
MACHINES = CLUSTERS | {
    "pair": Machines(((H100, 1, 2),), CARDS),
    "two-pairs": Machines(((H100, 1, 2), (L40S, 1, 2)), ETHERNET),
    "one-of-each": Machines(((H100, 1, 8), (A100, 1, 8)), CARDS),
    "thin": Machines(((H100, 1, 8), (L40S, 1, 8)), ETHERNET),
    "two-nodes": Machines(((H100, 2, 8),), CARDS),
    "small": Machines(((A100_40, 1, 2), (L40S, 1, 2)), ETHERNET),
    "128": Machines(((H100, 8, 8), (A100, 8, 8)), CARDS),
    "128-of-three": Machines(((H200, 4, 8), (H100, 6, 8), (L40S, 6, 8)), CARDS),
    "256": Machines(((H100, 16, 8), (A100, 16, 8)), CARDS),
}
#: Cluster, model, context, batch, and what is fixed.
FIXED: tuple[tuple[str, str, int, int, dict[str, Any]], ...] = (
    # With a fixed micro-batch no plan takes samples in place of tokens.
    ("pair", "gpt-7b", 32 * K, 8, {"micro_batch_size": 1}),
    ("pair", "llama3-8b", 8 * K, 16, {"micro_batch_size": 2}),
    ("two-pairs", "gpt-3b", 16 * K, 16, {"data_parallel": 2}),
    ("two-pairs", "gpt-7b", 8 * K, 16, {"pipeline_parallel": 2, "recompute": "full"}),
    ("c", "gpt-13b", 32 * K, 8, {"tensor_parallel": 4}),
    ("c", "llama3-8b", 8 * K, 8, {"pipeline_parallel": 2}),
    ("c", "llama3-8b", 32 * K, 16, {"micro_batch_size": 1, "recompute": "selective"}),
    ("one-of-each", "gpt-13b", 16 * K, 32, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    ("one-of-each", "llama3-8b", 64 * K, 8, {"data_parallel": 1}),
    ("one-of-each", "qwen3-32b", 8 * K, 64, {"recompute": "none"}),
    ("thin", "gpt-7b", 8 * K, 64, {"data_parallel": 2, "micro_batch_size": 1}),
    ("thin", "llama3-8b", 32 * K, 16, {"tensor_parallel": 1}),
    ("two-nodes", "llama3-70b", 8 * K, 32, {"tensor_parallel": 8, "pipeline_parallel": 2}),
    ("two-nodes", "qwen3-32b", 32 * K, 16, {"recompute": "full", "tensor_parallel": 4}),
    ("zorse-a", "gpt-13b", 4 * K, 64, {"pipeline_parallel": 4}),
)
#: One of experts, of latent attention, of windows, of Mamba, of delta nets, and of experts with windows.
KINDS = (
    ("one-of-each", "qwen3-30b-a3b", 32 * K, 32),
    ("two-nodes", "mixtral-8x7b", 32 * K, 32),
    ("one-of-each", "gpt-oss-20b", 32 * K, 32),
    ("one-of-each", "gemma-3-27b", 32 * K, 32),
    ("one-of-each", "nemotron-h-8b", 32 * K, 32),
    ("128", "deepseek-v3", 32 * K, 128),
)
#: Cluster, model, context, batch, and nodes that are dead.
LARGE = (
    ("128", "llama3-70b", 8 * K, 128, (0, 9)),
    ("128-of-three", "qwen3-32b", 32 * K, 128, (1, 5, 12)),
    ("256", "llama3-70b", 32 * K, 128, (3, 17, 30)),
)
#: Requests that no plan fits: because of weights, of the sequence, and of a fixed size.
HOPELESS: tuple[tuple[str, str, int, int, dict[str, Any]], ...] = (
    ("small", "llama3-70b", 8 * K, 8, {}),
    ("small", "gpt-7b", 1024 * K, 2, {}),
    ("pair", "gpt-13b", 256 * K, 8, {"tensor_parallel": 1, "recompute": "none"}),
)


@dataclass(frozen=True)
class Cell:
    """A request on a cluster.

    Args:
        kind: ``free``, ``fixed``, ``kinds``, ``large`` or ``hopeless``.
    """

    name: str
    kind: str
    request: Request
    cluster: Cluster


def all_cells() -> list[Cell]:
    """Return the fifty cells, the smallest clusters first."""
    cells = [Cell(name, "free", request, cluster) for name, request, cluster in (asked(*c) for c in CELLS)]
    cells += [_cell("fixed", *cell) for cell in FIXED]
    cells += [_cell("kinds", *cell, {}) for cell in KINDS]
    for machines, model, seq_length, batch, dead in LARGE:
        whole = _cell("large", machines, model, seq_length, batch, {})
        name = f"{whole.name} without nodes {','.join(map(str, dead))}"
        cells.append(replace(whole, name=name, cluster=whole.cluster.without(dead)))
    cells += [_cell("hopeless", *cell) for cell in HOPELESS]
    return sorted(cells, key=lambda cell: (len(cell.cluster.ranks), cell.request.job.model.total_params))


def _cell(kind: str, machines: str, model: str, seq_length: int, batch: int, fixed: dict[str, Any]) -> Cell:
    job = Job(model=read_model(model), seq_length=seq_length, global_batch_size=batch, **fixed)
    terms = "".join(f" {name}={value}" for name, value in fixed.items())
    name = f"{machines} {model} {seq_length // K}K {batch}{terms}"
    return Cell(name, kind, Request(job, frozenset(fixed)), MACHINES[machines].cluster(machines))
