"""Advice where nothing fits: variants of the request that were planned, and those that fit.

Changes are tried by kind: fewer fixed terms, the memory-saving switches, a shorter sequence, more nodes, a
smaller batch. The first of a kind that fits is proposed. Where the first two kinds do not help, the others
are tried with all of their changes too. Requests that the bound's rows of memory refute are not planned.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_hexi.cluster import Cluster
from megatron_hexi.errors import NothingFitsError
from megatron_hexi.plan.flags import spell_flag
from megatron_hexi.planner.bound import MissingMemory, memory_fits, missing_memory
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.request import Request

#: Limit of planning work: the most GPUs that other requests are planned for, all together, where each request
#: counts as this many more: six requests for 8 GPUs, two for 1,024. The first is planned in any case.
_MOST_PLANNED, _EACH = 3500, 512
#: Sequence lengths are proposed as multiples of this.
_ROUND = 1024
#: Multiples of an entry's nodes that are tried, and the most GPUs of the clusters that result.
_TIMES, _MOST_GPUS = (2, 4, 8), 1024
#: Sizes that a request may fix besides the terms of its job.
_SIZES = ("context_parallel", "virtual_stages", "expert_parallel")
#: Terms of a job that save memory: the value that costs memory, and the one that saves it.
_SAVING = {
    "sequence_parallel": (False, True),
    "distributed_optimizer": (False, True),
    "precision": ("fp32", "bf16"),
}

#: A plan for a request on a cluster, ``None``: none is found that fits.
Planner = Callable[[Request, Cluster], Candidate | None]
#: Changes after which a plan was found, to type or to write into the cluster file, and its tokens/s.
_Remedy = tuple[tuple[str, ...], float]


@dataclass(frozen=True)
class _Variant:
    """A changed request, with the changes to type."""

    changes: tuple[str, ...]
    request: Request
    cluster: Cluster

    def with_term(self, field: str, value: Any) -> _Variant:
        """Return this variant with a different value of one of the job's terms."""
        job = replace(self.request.job, **{field: value})
        changes = (*self.changes, spell_flag(field, value))
        return replace(self, changes=changes, request=replace(self.request, job=job))

    def without(self, fields: Iterable[str]) -> _Variant:
        """Return this variant with these terms left to the planner."""
        job, fields = self.request.job, tuple(fields)
        changes = tuple(f"leave out {spell_flag(field, getattr(job, field))}" for field in fields)
        request = replace(self.request, fixed=self.request.fixed.difference(fields))
        return replace(self, changes=(*self.changes, *changes), request=request)


class _Trials:
    """Finds variants of a request that have a plan, within a limit of planning work.

    Args:
        planner: returns the plan of a request on a cluster; ``None`` where no plan that fits is found.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner, self._left = planner, _MOST_PLANNED
        self.count, self.ended = 0, False

    def first(self, others: Iterable[_Variant]) -> _Remedy | None:
        """Return the first variant that fits; ``None``: none does, or too many were planned."""
        for other in others:
            if not memory_fits(other.request, other.cluster):
                continue
            self._left -= _EACH + len(other.cluster.ranks)
            if self._left < 0 and self.count:
                self.ended = True
                return None
            self.count += 1
            plan = self._planner(other.request, other.cluster)
            if plan is not None:
                return other.changes, plan.tokens_per_s
        return None


def nothing_fits(request: Request, cluster: Cluster, planner: Planner, *, proven: bool) -> NothingFitsError:
    """Return the error for a request that has no plan, with changes of it that have one.

    Args:
        planner: returns the plan of another request on a cluster, or ``None``.
        proven: whether the bound proves that no layout fits; else the search found none.
    """
    what = "no plan fits on cluster" if proven else "no plan was found that fits on cluster"
    trials = _Trials(planner)
    fits = [
        {"change": " and ".join(changes), "tokens_per_s": rate}
        for changes, rate in _remedies(_Variant((), request, cluster), trials)
    ]
    told = "; or ".join(
        f"{remedy['change']} (about {remedy['tokens_per_s']:,.0f} tokens/s)" for remedy in fits
    )
    ended = ", no more were tried" if trials.ended else ""
    count = f"{trials.count} other request{'' if trials.count == 1 else 's'} planned{ended}"
    advice = f"fits: {told}" if fits else "none fits: take GPUs with more memory, or a smaller model"
    missing = missing_memory(request, cluster)
    is_known = any(str(remedy["change"]).startswith("nodes ") for remedy in fits)
    estimate = "" if is_known else _spell_counts(missing)
    return NothingFitsError(
        f"{what} {cluster.name} at {request.job.seq_length} tokens{_spell_fixed(request)}: "
        f"{_spell_memory(missing)}; {count}; {advice}{estimate}",
        {
            "proven": proven,
            "tried": trials.count,
            "fits": fits,
            "missing_gib": max(0.0, missing.gib),
            "node_counts": missing.counts,
        },
    )


def _remedies(asked: _Variant, trials: _Trials) -> list[_Remedy]:
    """Return the first variant of each kind that fits."""
    first_remedies = [trials.first(kind(asked)) for kind in (_freed, _allowed, _switched)]
    eased = _switch_all(asked.without(sorted(asked.request.fixed)))
    if not any(first_remedies) and eased != asked:
        first_remedies.append(trials.first([eased]))
    # If a change of the first kinds suffices, the other kinds change the request as it was asked. Else they
    # also change the eased request, since either way the user gives something up.
    bases = [asked] if any(first_remedies) or eased == asked else [asked, eased]
    for kind in (_shortened, _enlarged, _thinned):
        first_remedies += [trials.first(kind(base)) for base in bases]
    remedies = [one for one in first_remedies if one is not None]
    # A change that is enough alone is not proposed with more.
    return [one for one in remedies if not any(set(other[0]) < set(one[0]) for other in remedies)]


def _freed(asked: _Variant) -> Iterator[_Variant]:
    """Yield variants that leave some of the fixed terms to the planner, the fewest terms first."""
    fixed = sorted(asked.request.fixed)
    for count in range(1, len(fixed) + 1):
        yield from map(asked.without, itertools.combinations(fixed, count))


def _allowed(asked: _Variant) -> Iterator[_Variant]:
    """Yield variants that leave one fixed size to the planner, or allow one or all refused features."""
    for name in _SIZES:
        size = getattr(asked.request, name)
        if size is not None:
            change = f"leave out {spell_flag(name, size)}"
            freed: dict[str, Any] = {name: None}
            yield replace(asked, changes=(*asked.changes, change), request=replace(asked.request, **freed))
    refused = asked.request.rules.refused
    for features in dict.fromkeys([*((feature,) for feature in refused), refused]):
        rules = replace(asked.request.rules, **dict.fromkeys(features, True))
        changes = (*asked.changes, *(spell_flag(feature, True) for feature in features))
        if features:
            yield replace(asked, changes=changes, request=replace(asked.request, rules=rules))


def _switched(asked: _Variant) -> Iterator[_Variant]:
    """Yield variants with one of the terms in `_SAVING` at the value that saves memory."""
    for field, (costly, saving) in _SAVING.items():
        if getattr(asked.request.job, field) == costly:
            yield asked.with_term(field, saving)


def _switch_all(asked: _Variant) -> _Variant:
    while other := next(_switched(asked), None):
        asked = other
    return asked


def _shortened(asked: _Variant) -> Iterator[_Variant]:
    """Yield variants with three quarters of the sequence length, a half, three eighths and so on."""
    length = asked.request.job.seq_length
    for power in itertools.count(1):
        for part in (3 * length >> (power + 1), length >> power):
            if part < _ROUND + asked.request.job.image_tokens:
                return
            yield asked.with_term("seq_length", part // _ROUND * _ROUND)


def _enlarged(asked: _Variant) -> Iterator[_Variant]:
    """Yield variants with more nodes of one entry; none if the file's links do not cover further nodes."""
    file = asked.cluster.file
    if not file.networks or file.fabrics or file.levels or file.matrix:
        return
    if len(asked.cluster.nodes) != file.node_count:  # some are lost: a file with more would not help
        return
    for times, entry in itertools.product(_TIMES, file.nodes):
        count = times * entry.count
        if file.gpu_count + (count - entry.count) * entry.gpus <= _MOST_GPUS:
            more = asked.cluster.with_nodes(entry.name, count)
            yield replace(asked, changes=(*asked.changes, _spell_nodes(entry.name, count)), cluster=more)


def _thinned(asked: _Variant) -> Iterator[_Variant]:
    """Yield variants with 1/2, 1/4, ... of the global batch, so that pipelines keep fewer micro-batches."""
    job = asked.request.job
    least = job.micro_batch_size if "micro_batch_size" in asked.request.fixed else 1
    least *= job.data_parallel if "data_parallel" in asked.request.fixed else 1
    batch = job.global_batch_size
    while batch % 2 == 0 and batch // 2 >= least:
        batch //= 2
        yield asked.with_term("global_batch_size", batch)


def _spell_memory(missing: MissingMemory) -> str:
    """Return as text the memory that the job needs at least, that all GPUs have, and that is missing."""
    needed = (
        f"weights, gradients and optimizer state take {missing.static:,.0f} GiB once, one sequence about "
        f"{missing.sequence:,.0f}, and all GPUs together have {missing.there:,.0f}"
    )
    return f"{needed}: without offload {missing.gib:,.0f} GiB are missing" if missing.gib > 0 else needed


def _spell_counts(missing: MissingMemory) -> str:
    """Return, as text, for each entry of the cluster file the number of nodes at which memory suffices."""
    if not missing.counts:
        return ""
    counts = ", or ".join(itertools.starmap(_spell_nodes, missing.counts.items()))
    return f"; by that sum it takes {counts} (not planned)"


def _spell_nodes(name: str, count: int) -> str:
    return f"nodes {name} with count: {count} in the cluster file"


def _spell_fixed(request: Request) -> str:
    stated = [spell_flag(name, getattr(request.job, name)) for name in sorted(request.fixed)]
    sizes = ((name, getattr(request, name)) for name in _SIZES)
    stated += [spell_flag(name, size) for name, size in sizes if size is not None]
    stated += [spell_flag(feature, False) for feature in request.rules.refused]
    return " with " + " ".join(stated) if stated else ""
