"""What to do where nothing fits: requests that were tried, and for which a plan was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megatron_hexi.cluster import Cluster
from megatron_hexi.errors import HexiError, NothingFitsError
from megatron_hexi.planner.bound import memory_fits
from megatron_hexi.planner.request import Request

#: Parts of the context that are tried, where nothing else helps.
_SHORTER = (1 / 2, 1 / 4, 1 / 8, 1 / 16)
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
    what = "no plan fits" if proven else "no plan was found that fits"
    remedies: list[str] = []
    for words, changed in _others(request):
        if len(remedies) < _MOST and fits(changed):
            remedies.append(words)
    remedy = "; or ".join(remedies) if remedies else "take GPUs with more memory, or a smaller model"
    return NothingFitsError(
        f"{what} on cluster {cluster.name} at {job.seq_length} tokens"
        f"{_spell_fixed(request)}; what would fit: {remedy}"
    )


def _others(request: Request) -> Iterator[tuple[str, Request]]:
    """Requests that ask for less, with what to change."""
    fixed = sorted(request.fixed)
    for name in fixed:
        yield f"leave --{_option(name)} to the planner", replace(request, fixed=request.fixed - {name})
    if len(fixed) > 1:
        free = replace(request, fixed=frozenset())
        yield "leave " + ", ".join(f"--{_option(name)}" for name in fixed) + " to the planner", free
    for part in _SHORTER:
        length = int(request.job.seq_length * part) // _ROUND * _ROUND
        if length:
            shorter = _with_length(request, length)
            if shorter is not None:
                yield f"--seq-length {length}", shorter


def _with_length(request: Request, length: int) -> Request | None:
    try:
        return replace(request, job=replace(request.job, seq_length=length))
    except HexiError:
        return None


def _spell_fixed(request: Request) -> str:
    stated = [f"--{_option(name)} {getattr(request.job, name)}" for name in sorted(request.fixed)]
    return " with " + " ".join(stated) if stated else ""


def _option(name: str) -> str:
    return name.replace("_", "-")
