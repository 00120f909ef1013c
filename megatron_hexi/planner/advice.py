"""What to do where nothing fits: requests that were tried, and for which a plan was found."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.memory import GIB, GRADIENT_BYTES, OPTIMIZER_BYTES
from megatron_hexi.errors import NothingFitsError
from megatron_hexi.planner.bound import memory_fits
from megatron_hexi.planner.request import Request

#: Contexts are proposed as multiples of this.
_ROUND = 1024
#: Proposals that are made.
_MOST = 2


def nothing_fits(request: Request, cluster: Cluster, fits: Callable[[Request], bool]) -> NothingFitsError:
    """The error for a job that has no plan.

    Args:
        request: what was asked for.
        cluster: where.
        fits: whether a plan is found for another request.
    """
    job = request.job
    proven = not memory_fits(request, cluster)
    what = "no plan fits on cluster" if proven else "no plan was found that fits on cluster"

    def found(proposals: Iterable[tuple[str, Request]]) -> Iterator[str]:
        return (words for words, other in proposals if memory_fits(other, cluster) and fits(other))

    shortened = itertools.islice(found(_shortened(request)), 1)
    remedies = list(itertools.islice(itertools.chain(found(_freed(request)), shortened), _MOST))
    remedy = "; or ".join(remedies) if remedies else "take GPUs with more memory, or a smaller model"
    return NothingFitsError(
        f"{what} {cluster.name} at {job.seq_length} tokens{_spell_fixed(request)}: "
        f"{_spell_memory(request, cluster)}; what would fit: {remedy}"
    )


def _spell_memory(request: Request, cluster: Cluster) -> str:
    """What there must be before any activations, and what there is."""
    job = request.job
    each = job.element_bytes + GRADIENT_BYTES[job.precision] + OPTIMIZER_BYTES[job.precision]
    least = job.model.total_params * each / GIB
    there = sum(rank.device.usable_gib for rank in cluster.ranks)
    return (
        f"weights, gradients and optimizer state take {least:,.0f} GiB once, the rest grows with the "
        f"context, and all GPUs together have {there:,.0f} GiB"
    )


def _freed(request: Request) -> Iterator[tuple[str, Request]]:
    """Requests that leave more to the planner, with what to change."""
    fixed = sorted(request.fixed)
    for name in fixed:
        yield f"leave --{_option(name)} to the planner", replace(request, fixed=request.fixed - {name})
    if len(fixed) > 1:
        free = replace(request, fixed=frozenset())
        yield "leave " + ", ".join(f"--{_option(name)}" for name in fixed) + " to the planner", free


def _shortened(request: Request) -> Iterator[tuple[str, Request]]:
    """Requests for half the context, and half of that, and so on."""
    length = request.job.seq_length
    while length := length // 2 // _ROUND * _ROUND:
        yield f"--seq-length {length}", replace(request, job=replace(request.job, seq_length=length))


def _spell_fixed(request: Request) -> str:
    stated = [f"--{_option(name)} {getattr(request.job, name)}" for name in sorted(request.fixed)]
    return " with " + " ".join(stated) if stated else ""


def _option(name: str) -> str:
    return name.replace("_", "-")
