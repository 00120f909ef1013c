"""Saves memory in a plan: ministages, offload, samples, and other shares of optimizer state.

The joint search knows none of these. Each is a change of a plan that it found, or that it would find if GPUs
had more memory, and the cost model judges every one. What saves memory comes as options, the cheapest first;
each stage takes the first that fits it. So a plan never becomes slower, and one that does not fit may.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.models import RECOMPUTES, Job
from megatron_hexi.plan import Domain, Group, Member, Plan, Stage
from megatron_hexi.plan.layout import apportion
from megatron_hexi.plan.terms import Offload, Recompute
from megatron_hexi.plan.units import rank_gpus
from megatron_hexi.planner.features import is_allowed
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.layouts.trial import order_of
from megatron_hexi.planner.request import Request
from megatron_hexi.planner.written_out import written_out

#: Counts of ministages that are tried; the last is a layer each.
_MINISTAGE_COUNTS: Final = (2, 4, 8, 16)
#: Share of the optimizer's state of the unit with the most free memory; others get smaller whole numbers.
_SHARES: Final = 16
#: Samples of a micro-batch, as multiples of the least that gives one to each unit of the largest stage.
_SAMPLES: Final = (1, 2, 4)
#: Pipelines that fill and drain are worth shortening from this part of an iteration on.
_WORTH_IT: Final = 0.02


class MemoryOption(NamedTuple):
    """Recomputation and offload of a stage, to save memory."""

    recompute: Recompute
    offload: tuple[Offload, ...] = ()


#: Options of a stage that runs whole, and of one in ministages without and with host memory.
_WHOLE: Final = tuple(MemoryOption(mode, ("optimizer",)) for mode in RECOMPUTES)
_MINISTAGES_ON_DEVICE: Final = tuple(MemoryOption(mode) for mode in RECOMPUTES)
_MINISTAGES_OFFLOADED: Final = (
    MemoryOption("none", ("optimizer",)),
    MemoryOption("none", ("parameters", "optimizer")),
    *(MemoryOption(mode, ("parameters", "optimizer", "activations")) for mode in RECOMPUTES),
)


class Savings:
    """Changes plans of one request on one cluster; skips changes that cannot beat the best so far.

    Args:
        request: the job, with the terms that are fixed.
        faster_than: seconds of an iteration of the fastest plan that is known to fit.
    """

    def __init__(self, request: Request, cluster: Cluster, faster_than: float = np.inf) -> None:
        self._request, self._cluster, self._rules = request, cluster, request.rules
        self._models: dict[Job, CostModel] = {}
        self._timed = cache(self._time)
        #: Seconds of an iteration of the fastest plan that fits.
        self._best_s = faster_than
        self.trials = 0

    def best(self, candidate: Candidate) -> Candidate:
        """Return the fastest among a plan that fits and the variants of it that fit."""
        self._best_s = min(self._best_s, candidate.iteration_s)
        base = self._written_out(candidate)
        if base is None:
            return candidate
        bases = []
        if base.timing.phases.bubble > _WORTH_IT * base.iteration_s:
            bases = [base, *self._with_equal_layers(base)]
        elif recomputes(base.plan):
            bases = [base]
        changed = map(self._saving, bases)
        chosen = min([candidate, *itertools.chain.from_iterable(changed)], key=order_of)
        return min([chosen, *self._by_samples(chosen)], key=order_of)

    def made_to_fit(self, candidate: Candidate) -> Candidate | None:
        """Return the best variant that fits of a plan that needs too much memory.

        ``None``: no variant fits, or none is faster than the best so far.
        """
        base = self._written_out(candidate)
        if base is None:
            return None
        for start in (base, self._with_state(base)):
            changed = (start, *self._saving(start), *self._by_samples(start))
            fitting = [each for each in changed if each.fits]
            if fitting:
                best = min(fitting, key=order_of)
                return min([best, *self._by_samples(best)], key=order_of)
        return None

    def _written_out(self, candidate: Candidate) -> Candidate | None:
        """Return the plan with explicit layers for each stage; ``None``: that is impossible."""
        if not self._rules.allow("unequal_stages") or candidate.job.pipeline_parallel > 1:
            return None
        counts = candidate.timing.micro_batches.tolist()
        return self._timed(*written_out(candidate.plan, candidate.job, counts))

    def _time(self, plan: Plan, job: Job) -> Candidate:
        if job not in self._models:
            self._models[job] = CostModel(job, self._cluster)
        self.trials += 1
        return Candidate(plan, job, self._models[job].timing(plan))

    # Ministages, offload, recomputation

    def _saving(self, base: Candidate) -> Iterator[Candidate]:
        """Yield the plan with offloaded state, with ministages, with ministages and increasing offload."""
        gpus = rank_gpus(base.plan, base.plan.ranks)
        on_host = self._rules.allow("offload") and all(
            self._cluster.ranks[gpu].device.host is not None for gpu in gpus
        )
        if on_host:
            yield from self._with_options(base, None, _WHOLE)
        if not self._rules.allow("ministages"):
            return
        layers = min(int(np.min(section.part.layers)) for section in base.timing.sections)
        has_pipelines = any(len(replica.stages) > 1 for replica in base.plan.replicas)
        for count in sorted({count for count in (*_MINISTAGE_COUNTS, layers) if 1 < count <= layers}):
            first = next(filter(self._allows, _MINISTAGES_ON_DEVICE), None)
            if first is None:
                return
            if self._is_slower(base, count, first):
                if has_pipelines:
                    continue  # with more ministages pipelines fill and drain sooner
                return
            on_device = list(self._with_options(base, count, _MINISTAGES_ON_DEVICE))
            yield from on_device
            is_whole = any(candidate.fits and not recomputes(candidate.plan) for candidate in on_device)
            if is_whole and not has_pipelines:
                return
            if on_host and not is_whole:
                yield from self._with_options(base, count, _MINISTAGES_OFFLOADED)

    def _with_options(
        self, base: Candidate, ministages: int | None, options: Sequence[MemoryOption]
    ) -> Iterator[Candidate]:
        """Yield the plan with the first option that fits at each stage; nothing if a stage fits with none.

        Args:
            ministages: ministages of each stage; ``None``: stages run whole, and those that fit are kept.
        """
        options = [option for option in options if self._allows(option)]
        chosen: dict[tuple[int, int], MemoryOption] = {}
        stages = _places(base.plan)
        if ministages is None:
            full = base.timing.stage_fullness
            chosen = {
                (r, s): MemoryOption("none", stage.offload or ())
                for r, replica in enumerate(base.plan.replicas)
                for s, stage in enumerate(replica.stages)
                if full[r, s] <= 1 and stage.recompute in (None, "none")
            }
        for option in options:
            left = [place for place in stages if place not in chosen]
            if not left:
                break
            if not chosen and self._is_slower(base, ministages, option):
                return  # other options take longer
            full = self._with_option(base, ministages, option).timing.stage_fullness
            chosen |= {place: option for place in left if full[place] <= 1}
        if len(chosen) < len(stages):
            return
        changed = self._timed(_with(base.plan, ministages, chosen), base.job)
        if not is_allowed(changed.plan, changed.job, self._request):
            return  # stages of equal replicas fit with different options
        if changed.fits:
            self._best_s = min(self._best_s, changed.iteration_s)
        yield changed

    def _is_slower(self, base: Candidate, ministages: int | None, option: MemoryOption) -> bool:
        """Return whether the plan with an option is no faster than the best; time it only if in doubt."""
        if self._best_s == np.inf:
            return False
        if least_seconds(base, ministages) >= self._best_s:
            return True
        return self._with_option(base, ministages, option).iteration_s >= self._best_s

    def _with_option(self, base: Candidate, ministages: int | None, option: MemoryOption) -> Candidate:
        """Return the plan with one option for all stages."""
        options = dict.fromkeys(_places(base.plan), option)
        return self._timed(_with(base.plan, ministages, options), base.job)

    def _allows(self, option: MemoryOption) -> bool:
        """Return whether the request permits the option's recomputation."""
        return "recompute" not in self._request.fixed or option.recompute == self._request.job.recompute

    def _with_equal_layers(self, base: Candidate) -> Iterator[Candidate]:
        """Yield the plan with every replica's layers split evenly over its stages, unless they are already.

        Even stages allow the most ministages.
        """

        def equal(place: tuple[int, int], stage: Stage) -> Stage:
            counts = apportion(base.job.model.layers, [1.0] * len(base.plan.replicas[place[0]].stages))
            return replace(stage, layers=(sum(counts[: place[1]]), sum(counts[: place[1] + 1])))

        plan = _with_stages(base.plan, equal)
        if plan != base.plan:
            yield self._timed(plan, base.job)

    # Shares of the optimizer's state

    def _with_state(self, base: Candidate) -> Candidate:
        """Return the plan with optimizer state shared in proportion to free memory."""
        room: dict[int, float] = {}
        timing = base.timing
        for section, terms, usable in zip(timing.sections, timing.memory, timing.usable, strict=True):
            other = np.sum([values for name, values in terms.items() if name != "optimizer"], axis=0)
            free = np.maximum(usable - other, 0.0)
            room |= dict(zip(section.ranks[:, 0].tolist(), free.tolist(), strict=True))
        most = max(room.values())
        if most <= 0:
            return base

        def shared(member: Member) -> Member:
            return replace(member, state=max(1, round(_SHARES * room[member.lead] / most)))

        return self._timed(_with_members(base.plan, shared), base.job)

    # Samples

    def _by_samples(self, base: Candidate) -> Iterator[Candidate]:
        """Yield plans whose units have whole samples of each micro-batch, in proportion to their tokens."""
        stages = base.plan.stages
        most = max(sum(len(domain.members) for domain in stage.domains) for stage in stages)
        if most < 2 or any(len(stage.domains) > 1 for stage in stages):
            return
        if self._request.context_parallel is not None:
            return
        base_plan = self._written_out(base)
        if base_plan is None or "micro_batch_size" in self._request.fixed:
            return
        size = base.job.micro_batch_size
        for times in _SAMPLES:
            new = times * -(-most // size) * size
            counts = [
                count * size // new if count * size % new == 0 else 0
                for count in base.timing.micro_batches.tolist()
            ]
            if min(counts) < 1:
                continue
            changed = _in_samples(base_plan.plan, new, counts)
            yield self._timed(changed, replace(base_plan.job, micro_batch_size=new))


def spell_savings(plan: Plan) -> str:
    """Return, in words, the features of a plan that the joint search does not use; empty if there are none.

    These are ministages, offload, uneven shares of optimizer state, and micro-batches divided by sample.
    """
    stages = plan.stages
    words = []
    for order, parts in ((None, "ministages"), ("interleaved", "interleaved ministages")):
        own = [replica.ministages for replica in plan.replicas if replica.order == order]
        counts = sorted({count for count in own if count is not None})
        if counts:
            words.append(f"stages run in {' or '.join(map(str, counts))} {parts}")
    names = {"parameters": "weights and gradients", "optimizer": "optimizer state", "activations": "rows"}
    moved = [text for name, text in names.items() if any(name in (stage.offload or ()) for stage in stages)]
    if moved:
        words.append(f"host memory holds {' and '.join(moved)}")
    shares = {member.state for stage in stages for member in stage.members}
    if len(shares) > 1:
        words.append("GPUs with more memory keep more of the optimizer's state")
    if any(len(stage.domains) > 1 for stage in stages):
        words.append("GPUs of a stage take samples of each micro-batch")
    return ", ".join(words)


def saving_features(plan: Plan) -> list[str]:
    """Return the fields of `PlannerRules` that switch the savings of a plan: ministages and offload."""
    ministages = any(replica.ministages is not None for replica in plan.replicas)
    used = {"ministages": ministages, "offload": any(stage.offload for stage in plan.stages)}
    return [feature for feature, is_used in used.items() if is_used]


def least_seconds(base: Candidate, ministages: int | None = None) -> float:
    """Return a lower bound of a plan's seconds with any memory option: the busiest stage's work, no waits.

    Where the plan recomputes, the seconds of one forward pass are subtracted, an upper bound of those of
    recomputation. With ministages, stages before the last run the forward pass twice.
    """
    found, timing = 0.0, base.timing
    for section, cost in zip(timing.sections, timing.stages, strict=True):
        units = section.arrays.unit_replica
        turns = section.turns(timing.micro_batches)
        for domain, (phases, forward_s, is_last) in enumerate(
            zip(cost.replicas, cost.forward_s, section.by_domain(section.parts.is_last), strict=True)
        ):
            more = (ministages is not None and not is_last) - (section.job.mode != "none")
            took = phases.total + more * forward_s
            found = max(found, int(turns[units == domain][0]) * took)
    return found


def _places(plan: Plan) -> list[tuple[int, int]]:
    """Return the indices of each stage: (replica, number of the stage)."""
    return [(r, s) for r, replica in enumerate(plan.replicas) for s in range(len(replica.stages))]


def recomputes(plan: Plan) -> bool:
    """Return whether some stage recomputes."""
    stages = itertools.chain.from_iterable(replica.stages for replica in plan.replicas)
    return any(stage.recompute not in (None, "none") for stage in stages)


def _with(plan: Plan, ministages: int | None, options: dict[tuple[int, int], MemoryOption]) -> Plan:
    """Return the plan with a memory option for each stage."""

    def with_option(place: tuple[int, int], stage: Stage) -> Stage:
        mode, offload = options[place]
        return replace(stage, recompute=mode, ministages=ministages, offload=offload or None)

    return _with_stages(plan, with_option)


def _with_members(plan: Plan, change: Callable[[Member], Member]) -> Plan:
    """Return the plan with every member changed."""

    def in_group(group: Group) -> Group:
        return replace(group, members=tuple(map(change, group.members)))

    def in_stage(_place: tuple[int, int], stage: Stage) -> Stage:
        domains = (replace(domain, groups=tuple(map(in_group, domain.groups))) for domain in stage.domains)
        return replace(stage, domains=tuple(domains))

    return _with_stages(plan, in_stage)


def _with_stages(
    plan: Plan, change: Callable[[tuple[int, int], Stage], Stage], counts: Sequence[int] | None = None
) -> Plan:
    """Return the plan with every stage changed.

    Args:
        counts: micro-batches of each replica; ``None``: as in the plan.
    """
    replicas = (
        replace(
            replica,
            stages=tuple(change((r, s), stage) for s, stage in enumerate(replica.stages)),
            micro_batches=counts[r] if counts else replica.micro_batches,
        )
        for r, replica in enumerate(plan.replicas)
    )
    return replace(plan, replicas=tuple(replicas))


def _in_samples(plan: Plan, micro_batch_size: int, counts: Sequence[int]) -> Plan:
    """Return the plan with each unit as a domain of its own, with samples in proportion to its tokens."""

    def dealt(_place: tuple[int, int], stage: Stage) -> Stage:
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
    return replace(_with_stages(plan, dealt, counts), job=job)


def _alone(plan: Plan, member: Member, samples: int) -> Domain:
    """Return a domain of one unit, which has all tokens and heads of its samples."""
    length, heads = plan.workload.seq_length, plan.workload.heads // len(member.ranks)
    whole = replace(member, tokens=length, heads=(0, heads))
    return Domain((Group(((0, length),), (whole,)),), samples)
