"""The longest sequence that fits in memory: in the layout of a plan, and in any layout that is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Job
from megatron_hexi.plan import Domain, Plan, Stage
from megatron_hexi.plan.layout import apportion, causal_segments, full_segments
from megatron_hexi.planner.layouts.trial import Candidate, Progress
from megatron_hexi.planner.moves.edit import Place, with_stages
from megatron_hexi.planner.request import Request

#: Lengths are multiples of this number of tokens.
STEP = 1024
#: The longest sequence that is looked for, tokens.
_MOST = 2**30
#: Factors by which a length that fits is exceeded to look for another layout; the next where none is found.
_FURTHER = (2.0, 1.25, 1.05)


def longest_in_layout(plan: Plan, job: Job, cluster: Cluster) -> int:
    """Return the longest sequence that fits if members keep their parts of it, tokens, a multiple of `STEP`.

    Args:
        plan: a plan that fits.
        job: the job of that plan, without documents.
    """

    def fits(steps: int) -> bool:
        longer = replace(job, seq_length=steps * STEP)
        try:
            return CostModel(longer, cluster).timing(lengthened(plan, steps * STEP)).fits
        except HexiError:  # a length that the job's terms do not allow
            return False

    least = most = max(1, job.seq_length // STEP)
    while most * STEP < _MOST and fits(2 * most):
        least = most = 2 * most
    most = 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least * STEP


def lengthened(plan: Plan, seq_length: int) -> Plan:
    """Return the plan of a longer or shorter sequence, of which each member has the same part."""
    cut = causal_segments if plan.workload.causal else full_segments

    def of_domain(domain: Domain) -> Domain:
        totals = apportion(seq_length, [group.tokens for group in domain.groups])
        groups = []
        for group, total, segments in zip(domain.groups, totals, cut(totals), strict=True):
            tokens = apportion(total, [member.tokens or 1e-9 for member in group.members])
            members = (
                replace(member, tokens=count) for member, count in zip(group.members, tokens, strict=True)
            )
            groups.append(replace(group, segments=tuple(segments), members=tuple(members)))
        return replace(domain, groups=tuple(groups))

    def of_stage(_place: Place, stage: Stage) -> Stage:
        return replace(stage, domains=tuple(map(of_domain, stage.domains)))

    workload = replace(plan.workload, seq_length=seq_length)
    return replace(with_stages(plan, of_stage), workload=workload)


def with_longest_sequence(
    request: Request,
    cluster: Cluster,
    first_plan: Callable[[Request, Cluster], Candidate | None],
    progress: Progress,
) -> Request:
    """Return the request with the longest sequence for which a plan is found, from its own length on.

    Where a plan is found, its layout says how much longer the sequence may be; then another layout is looked
    for at a length that this one cannot hold.

    Args:
        first_plan: finds some plan that fits; ``None``: it finds none.

    Raises:
        HexiError: documents are packed into sequences, or these have images.
    """
    if request.job.documents is not None:
        raise HexiError("--longest: documents have lengths of their own; leave --document-lengths out")
    if request.job.images is not None:
        raise HexiError("--longest: images have numbers of their own; leave --images-per-sequence out")

    def longest_at(length: int) -> int:
        """Return the longest sequence in the layout that is found for a length; 0: none is found."""
        progress(f"a plan for {length:,} tokens", 0, 1)
        found = first_plan(_of_length(request, length), cluster)
        return 0 if found is None else longest_in_layout(found.plan, found.job, cluster)

    # The planner may not find the layout again at the longest length that the layout holds.
    planned, longest = request.job.seq_length, longest_at(request.job.seq_length)
    for factor in _FURTHER:
        while longest * factor < _MOST:
            length = int(longest * factor) // STEP * STEP
            further = longest_at(length)
            if further <= longest:
                break
            planned, longest = length, further
    return _of_length(request, longest if longest > planned and longest_at(longest) else planned)


def _of_length(request: Request, length: int) -> Request:
    return replace(request, job=replace(request.job, seq_length=length))
