"""Drawings of what a plan costs: where the time of a rank goes, and what fills its memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import IterationCost, RankCost, estimate
from megatron_hexi.cost.memory import GIB
from megatron_hexi.models import Job, read_model
from megatron_hexi.plan import Workload, proportional_plan

CLUSTER = Path(__file__).parents[2] / "examples" / "clusters" / "mixed-16.yaml"
MODEL = "gpt-7b"
SEQ_LENGTH = 131072

#: Of seconds and GiB: less cannot be seen, and would change the files with every touch of the cost model.
_DIGITS = 1

_TIMES = {
    "token": ("token work", "#4878a8"),
    "attention": ("attention", "#e08214"),
    "logits": ("logits", "#8c8c8c"),
    "optimizer": ("optimizer", "#a6611a"),
    "communication": ("communication that shows", "#1b9e77"),
    "idle": ("waiting for slower ranks", "#e6e6e6"),
}
_MEMORY = ("#4878a8", "#80a8d0", "#b8d0e8", "#e08214", "#fdb863", "#7b3294", "#8c8c8c", "#d9d9d9")


def draw_time() -> Figure:
    """Seconds of one rank of each kind of GPU, under equal shares and in proportion to speed."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    names, ranks = _rows()
    terms = [
        (label, colour, [round(getattr(rank, f"{name}_s"), _DIGITS) for rank in ranks])
        for name, (label, colour) in _TIMES.items()
    ]
    _stack(axes, names, terms)
    axes.set_xlabel("seconds of an iteration, predicted")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def draw_memory() -> Figure:
    """Memory of the same ranks, term by term, beside what their GPUs have."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    names, ranks = _rows()
    terms = [
        (term.replace("_", " "), colour, [round(rank.memory.terms[term] / GIB, _DIGITS) for rank in ranks])
        for term, colour in zip(ranks[0].memory.terms, _MEMORY, strict=True)
    ]
    _stack(axes, names, terms)
    for row, rank in enumerate(ranks):
        axes.plot([rank.usable_gib] * 2, [row - 0.45, row + 0.45], color="black", linewidth=1.5)
    axes.set_xlabel("GiB at the peak, predicted; black: usable")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _rows() -> tuple[list[str], list[RankCost]]:
    names, ranks = [], []
    for title, cost in (("equal shares", _cost(1.0)), ("in proportion", _cost(_speed_ratio()))):
        for rank in (cost.ranks[0], cost.ranks[-1]):
            names.append(f"{title}\n{rank.device}")
            ranks.append(rank)
    return names, ranks


@cache
def _cost(ratio: float) -> IterationCost:
    """What the cost model says where the first node's GPUs count for `ratio` of the second's."""
    model = read_model(MODEL)
    job = Job(model=model, seq_length=SEQ_LENGTH, recompute="full")
    workload = Workload(SEQ_LENGTH, model.heads, model.kv_heads, model.head_dim)
    plan = proportional_plan(workload, [[[ratio] * 4, [ratio] * 4, [1.0] * 8]])
    return estimate(plan, job, read_cluster(CLUSTER))


def _speed_ratio() -> float:
    """How much faster the first node's GPUs do the same work, to one digit behind the point."""
    fast, slow = (rank.token_s + rank.attention_s for rank in (_cost(1.0).ranks[0], _cost(1.0).ranks[-1]))
    return round(slow / fast, 1)


def _stack(axes: Axes, names: Sequence[str], terms: Sequence[tuple[str, str, list[float]]]) -> None:
    """A row a rank, the terms one after the other; those that are nothing everywhere are left out."""
    left = [0.0] * len(names)
    for label, colour, values in terms:
        if max(values) > 0:
            axes.barh(range(len(names)), values, left=left, color=colour, label=label, height=0.7)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
