"""Moves that save memory, or spend it: ministages, recomputation, offload, and shares of optimizer state.

The joint search knows only stages that run whole. What saves memory comes as options of a stage, the cheapest
first, and each stage takes the first with which it has room.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import Timing
from megatron_hexi.cost.encoder_bytes import encoder_bytes
from megatron_hexi.models import Job
from megatron_hexi.plan import Member, Plan, Replica
from megatron_hexi.plan.recompute import Again, Recompute
from megatron_hexi.plan.terms import Order
from megatron_hexi.plan.units import rank_gpus
from megatron_hexi.planner.layouts.trial import Candidate
from megatron_hexi.planner.moves.climb import Family, Move
from megatron_hexi.planner.moves.edit import MemoryOption, Place, stages_of, with_members, written_out
from megatron_hexi.planner.recomputation import offered
from megatron_hexi.planner.request import Request

#: Counts of ministages that run in turn, where the last is a layer each; and of those that are interleaved.
_IN_TURN: Final = (2, 4, 8, 16)
_INTERLEAVED: Final = (2, 3, 4, 6, 8)
#: Share of the optimizer's state of the unit with the most free memory; others get smaller whole numbers.
_SHARES: Final = 16
#: Pipelines that fill and drain are worth shortening from this part of an iteration on.
_WORTH_IT: Final = 0.02
#: Factors by which plans of other counts differ at most: in turn without recomputation, and interleaved.
_FAR_IN_TURN: Final = 1.07
_FAR_INTERLEAVED: Final = 1.06


class _Whole(NamedTuple):
    """A plan with layers in each stage, all of which run whole, and its timing.

    Args:
        modes: what stages in ministages may recompute: no number of layers.
    """

    plan: Plan
    job: Job
    timing: Timing
    modes: Sequence[Recompute]


class MemoryMoves:
    """Yields the moves of plans of one request on one cluster whose stages run whole.

    Args:
        request: the job, with the terms that are fixed.
    """

    def __init__(self, request: Request, cluster: Cluster) -> None:
        self._request, self._cluster = request, cluster

    def __call__(self, base: Candidate) -> Iterator[Move]:
        """Yield the plan with offload, with ministages in turn or interleaved, with other shares of state."""
        if not self._request.rules.allow("unequal_stages"):
            return
        if base.plan.has_ministages:
            return
        plan, job = written_out(base.plan, base.job, base.timing.micro_batches.tolist())
        modes = [mode for mode in offered(self._request, job) if not isinstance(mode, int)]
        whole = _Whole(plan, job, base.timing, modes)
        is_short = not base.fits or recomputes(plan)
        if modes and (is_short or base.timing.phases.bubble > _WORTH_IT * base.iteration_s):
            yield from self._saving(whole)
        if self._request.may_interleave:
            yield from self._interleaved(whole)
        if not base.fits:
            yield Move((0.0, 0.0), _with_state(whole), job)

    def _saving(self, base: _Whole) -> Iterator[Move]:
        """Yield the plan with offloaded state, and with ministages in turn and increasing offload."""
        gpus = rank_gpus(base.plan, base.plan.ranks)
        on_host = self._request.rules.allow("offload") and all(
            self._cluster.ranks[gpu].device.host is not None for gpu in gpus
        )
        modes = _with_room(base)
        if not all(modes.values()):
            return
        if on_host:
            full = base.timing.stage_fullness
            short = {
                place: [MemoryOption(mode, ("optimizer",)) for mode in modes[place]]
                for place, stage in stages_of(base.plan)
                if full[place] > 1 or Again.of(stage.recompute)
            }
            yield Move((0.0, least_seconds(base.timing)), base.plan, base.job, [short])
        if not self._request.rules.allow("ministages"):
            return
        least = min(_most_ministages(base.job, replica) for replica in base.plan.replicas)
        family = Family("ministages", far=_FAR_IN_TURN)
        for count in sorted({count for count in (*_IN_TURN, least) if 1 < count <= least}):
            plan = replace(base.plan, replicas=tuple(_cut(own, count, None) for own in base.plan.replicas))
            options = (lambda own: tuple(map(MemoryOption, own))), _offloaded
            ladders = [{place: some(own) for place, own in modes.items()} for some in options[: 1 + on_host]]
            least_s = least_seconds(base.timing, count, in_turn=True)
            yield Move((0.0, least_s), plan, base.job, ladders, family)

    def _interleaved(self, base: _Whole) -> Iterator[Move]:
        """Yield the plan with stages cut into interleaved ministages, which keep more activations.

        All stages of a replica have equally many, fewer than asked where layers are few.
        """
        family = Family("interleaved", far=_FAR_INTERLEAVED, grows=True)
        for count in _INTERLEAVED:
            replicas, steps = [], dict[Place, Sequence[MemoryOption]]()
            for number, replica in enumerate(base.plan.replicas):
                own = min(count, _most_ministages(base.job, replica))
                if len(replica.stages) == 1 or base.timing.micro_batches[number] == 1 or own < 2:
                    replicas.append(replica)
                    continue
                replicas.append(_cut(replica, own, "interleaved"))
                for s, stage in enumerate(replica.stages):
                    modes = _from(base.modes, stage.recompute)
                    steps[number, s] = [MemoryOption(one, stage.offload or ()) for one in modes]
            if steps:
                plan, least = replace(base.plan, replicas=tuple(replicas)), least_seconds(base.timing, count)
                yield Move((0.0, least), plan, base.job, [steps], family)


def _with_room(base: _Whole) -> dict[Place, list[Recompute]]:
    """Return the modes of each stage that leave room for the images of a micro-batch by themselves."""
    found, vision = {place: list(base.modes) for place, _ in stages_of(base.plan)}, base.job.model.vision
    for section, usable in zip(base.timing.sections, base.timing.usable, strict=True):
        if section.images is None or vision is None:
            continue
        kept = encoder_bytes(section.job, section.images.of_units)
        for mode in base.modes:
            full = kept.kept(vision.layers, vision.layers * Again.of(mode).is_whole, 1) > usable
            for place in {(replica, section.number) for replica in section.replica[full].tolist()}:
                found[place] = [one for one in found[place] if one != mode]
    return found


def _from(modes: Sequence[Recompute], recompute: Recompute | None) -> Sequence[Recompute]:
    """Return which modes a stage that recomputes so may have in ministages: as much, or more."""
    mode = recompute or "none"
    if isinstance(mode, int):
        return modes[1:]
    return modes[modes.index(mode) :] if mode in modes else (mode, *modes[1:])


def _offloaded(modes: Sequence[Recompute]) -> tuple[MemoryOption, ...]:
    """Return the options of a stage in ministages with host memory, the cheapest first."""
    return (
        *(MemoryOption(mode, ("optimizer",)) for mode in modes[:1]),
        *(MemoryOption(mode, ("parameters", "optimizer")) for mode in modes[:1]),
        *(MemoryOption(mode, ("parameters", "optimizer", "activations")) for mode in modes),
    )


def _most_ministages(job: Job, replica: Replica) -> int:
    """Return the most ministages of each stage: the first one keeps the layers that add features; 0: none."""
    least, first = min(sum(stage.ministage_sizes) for stage in replica.stages), replica.stages[0]
    cuts = ((count, replace(first, ministages=count)) for count in range(1, least + 1))
    return max((count for count, cut in cuts if cut.ministage_sizes[0] >= job.first_layers), default=0)


def _cut(replica: Replica, count: int, order: Order | None) -> Replica:
    """Return the replica with so many ministages in each stage."""
    stages = tuple(replace(stage, ministages=count) for stage in replica.stages)
    return replace(replica, stages=stages, order=order)


def _with_state(base: _Whole) -> Plan:
    """Return the plan with optimizer state shared in proportion to free memory."""
    room: dict[int, float] = {}
    timing = base.timing
    for section, terms, usable in zip(timing.sections, timing.memory, timing.usable, strict=True):
        other = np.sum([values for name, values in terms.items() if name != "optimizer"], axis=0)
        free = np.maximum(usable - other, 0.0)
        room |= dict(zip(section.ranks[:, 0].tolist(), free.tolist(), strict=True))
    most = max(room.values())
    if most <= 0:
        return base.plan

    def shared(member: Member) -> Member:
        return replace(member, state=max(1, round(_SHARES * room[member.lead] / most)))

    return with_members(base.plan, shared)


def recomputes(plan: Plan) -> bool:
    """Return whether some stage recomputes."""
    return any(Again.of(stage.recompute) for _, stage in stages_of(plan))


def least_seconds(timing: Timing, cuts: float = 1, *, in_turn: bool = False) -> float:
    """Return a lower bound of a plan's seconds with any memory option, if stages are cut into ministages.

    A stage works on all of its micro-batches, and before and after that the stages ahead of it work on one of
    them, or on the first ministage of one. No layer is computed again, but all are if ministages run in turn,
    except those of the last stage.

    Args:
        cuts: ministages of each stage.
        in_turn: whether they run one after the other, and not interleaved.
    """
    least = 0.0
    stages: dict[int, dict[int, tuple[float, float]]] = {}
    for section, cost in zip(timing.sections, timing.stages, strict=True):
        parts, units = section.parts, section.arrays.unit_replica
        turns = section.turns(timing.micro_batches)
        shares = np.where(parts.layers > 0, parts.again / np.maximum(parts.layers, 1), 0.0)
        again = shares if section.job.again else 0.0 * shares
        for domain, (replica, phases, forward_s, is_last, share) in enumerate(
            zip(
                section.replicas.tolist(),
                cost.replicas,
                cost.forward_s,
                section.by_domain(parts.is_last),
                section.by_domain(again),
                strict=True,
            )
        ):
            took = phases.total + ((in_turn and not is_last) - share) * float(forward_s)
            work = int(turns[units == domain][0]) * took
            own = stages.setdefault(replica, {})
            busiest, soonest = own.get(section.number, (0.0, math.inf))
            own[section.number] = max(busiest, work), min(soonest, took)
    for own in stages.values():
        ahead = 0.0
        for _, (work, took) in sorted(own.items()):
            least = max(least, work + ahead / cuts)
            ahead += took
    return least
