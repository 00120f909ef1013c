"""Moves of plans whose units share tokens to plans whose units have samples of each micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from megatron_hexi.plan import Domain, Group, Member, Plan, Stage
from megatron_hexi.plan.layout import apportion
from megatron_hexi.planner.layouts.trial import Candidate
from megatron_hexi.planner.moves.climb import Move
from megatron_hexi.planner.moves.edit import Place, with_stages, written_out

#: Samples of a micro-batch, as multiples of the least that gives one to each unit of the largest stage, or of
#: two where no stage has more than one.
_SAMPLES: Final = (1, 2, 4)
#: Part of what activations are estimated to grow by that counts: shares of samples are rounded.
_CERTAIN: Final = 0.5


def sample_moves(base: Candidate) -> Iterator[Move]:
    """Yield plans whose units have whole samples of each micro-batch, in proportion to their tokens.

    Where each stage is one unit, its micro-batches get larger. Only plans whose stages have one domain each
    have such moves.
    """
    stages = base.plan.stages
    if not base.fits:  # whole samples need no less memory
        return
    most = max(sum(len(domain.members) for domain in stage.domains) for stage in stages)
    if any(len(stage.domains) > 1 for stage in stages) or base.job.pipeline_parallel > 1:
        return
    taken = base.timing.micro_batches.tolist()
    plan, job = written_out(base.plan, base.job, taken)
    size = job.micro_batch_size
    for times in _SAMPLES:
        new = times * -(-max(most, 2) // size) * size
        if new == size:
            continue
        counts = [count * size // new if count * size % new == 0 else 0 for count in taken]
        if min(counts) >= 1:
            changed = _in_samples(plan, new, counts)
            least = _least_excess(base, new / size), 0.0
            yield Move(least, changed, replace(job, micro_batch_size=new))


def _least_excess(base: Candidate, times: float) -> float:
    """Return about by how much memory is overdrawn at least with so many times the rows on each unit."""
    timing = base.timing
    more = [_CERTAIN * (times - 1) * terms["activations"] for terms in timing.memory]
    parts = [
        float(((needed + rows) / usable).max())
        for needed, rows, usable in zip(timing.needed, more, timing.usable, strict=True)
    ]
    return max(0.0, max(parts) - 1)


def _in_samples(plan: Plan, micro_batch_size: int, counts: Sequence[int]) -> Plan:
    """Return the plan with each unit as a domain of its own, with samples in proportion to its tokens."""

    def dealt(_place: Place, stage: Stage) -> Stage:
        members = stage.members
        if len(members) == 1:
            return replace(stage, exchange=None)
        tokens = [float(max(1, member.tokens)) for member in members]
        samples = apportion(micro_batch_size, tokens)
        if min(samples) < 1:
            samples = [1 + more for more in apportion(micro_batch_size - len(members), tokens)]
        alone = (_alone(plan, *own) for own in zip(members, samples, strict=True))
        return replace(stage, domains=tuple(alone), exchange=None)

    job = replace(plan.job, micro_batch_size=micro_batch_size)
    return replace(with_stages(plan, dealt, counts), job=job)


def _alone(plan: Plan, member: Member, samples: int) -> Domain:
    """Return a domain of one unit, which has all tokens and heads of its samples."""
    length, heads = plan.workload.seq_length, plan.workload.heads // len(member.ranks)
    whole = replace(member, tokens=length, heads=(0, heads), patches=None)
    return Domain((Group(((0, length),), (whole,)),), samples)
