"""Extrapolation from a few replayed layers of one micro-batch to all layers.

A stage with L layers of a kind of which n were replayed takes the time of the replay and L - n times the mean
of its last two layers, forward and backward (groups that alternate in waiting for each other repeat after
two). Kinds are added up. Every micro-batch begins with all units of its stage ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np

from megatron_hexi.cost import Phases
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.layer import Layer, by_group
from megatron_hexi.cost.sections import Section
from megatron_hexi.cost.stage import StageCost
from megatron_hexi.lab.simulator.replay import SectionReplay, last_laps
from megatron_hexi.lab.simulator.unit_program import ENTER, FINISH, LEAVE, READY, ROUTE, LayerPass

#: Part of the whole below which a remainder is rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Times of one micro-batch in the stages of a section, or in their layers of one kind.

    Args:
        replicas: phases of each domain, work ahead of its layers and exposed sends included.
        forward: seconds of each domain's forward pass, without recomputation and logits, [domains].
        busy: seconds of each unit's work by kind (``token``, ``attention``, ``experts``), [U] each.
        communication: waiting while its own messages are in flight, [U], exposed sends included.
        times: number of layers for which each layer pass counts, [passes, U] for each replay.
        cost: cost of the stage by the cost model, with simulated times of a layer, for communication that
            layers hide.
    """

    replicas: tuple[Phases, ...]
    forward: Floats
    busy: Mapping[str, Floats]
    communication: Floats
    times: tuple[Floats, ...]
    cost: StageCost

    def __add__(self, other: StageTimes) -> StageTimes:
        return StageTimes(
            tuple(map(add, self.replicas, other.replicas)),
            self.forward + other.forward,
            {kind: seconds + other.busy[kind] for kind, seconds in self.busy.items()},
            self.communication + other.communication,
            (*self.times, *other.times),
            self.cost,
        )


def extend_stage(section: Section, replays: Sequence[SectionReplay], cost: StageCost) -> StageTimes:
    """Return the times of all layers of the stages of a section.

    Args:
        replays: a replay of some layers, for each kind of layer in the stage.
    """
    whole, layers = reduce(add, (_extend_kind(section, one, cost) for one in replays)), list(cost.kinds)
    for replay in replays:
        layers[replay.kind] = _simulated_layer(replay, cost.kinds[replay.kind])
    domains, forward, waits = section.arrays.unit_replica, whole.forward, whole.communication
    phases = [found + Phases(pipeline=cost.pipeline_s) for found in whole.replicas]
    for work in cost.first:  # the loss is replayed with the last layer
        passes = [work.phases(np.flatnonzero(domains == one)) for one in range(len(phases))]
        phases = [found + there + back for found, (there, back) in zip(phases, passes, strict=True)]
        forward, waits = forward + [there.total for there, _ in passes], sum((*work.sums, *work.sent), waits)
    return replace(
        whole,
        replicas=tuple(phases),
        forward=forward + cost.pipeline_s / (2 if section.part.chunks == 1 else 1),
        communication=waits + cost.pipeline_s,
        cost=replace(cost, kinds=tuple(layers)),
    )


def _extend_kind(section: Section, replay: SectionReplay, cost: StageCost) -> StageTimes:
    plan, laps, layer = replay.plan, replay.laps, cost.kinds[replay.kind]
    domain = plan.unit_replica
    once, more = _times(section, replay)
    works = {
        name: np.array([_work(layer, lap, name) for lap in laps])
        for name in ("token", "attention", "experts")
    }
    durations, exposed, busy = replay.durations(), replay.exposed, reduce(add, works.values())
    whole, communication = (once * durations), (once[:, domain] * exposed).sum(axis=0)
    ahead = np.array([lap.way == "forward" for lap in laps])
    passes = []
    for rows in (ahead, ~ahead):
        missing, work = (more * durations)[rows].sum(axis=0), (more[:, domain] * busy)[rows].sum(axis=0)
        # Where a lag is made up, a layer may seem shorter than its own work, which cannot continue.
        np.maximum.at(missing, domain, work)
        passes.append(whole[rows].sum(axis=0) + missing)
        waits = (more[:, domain] * exposed)[rows].sum(axis=0)
        communication = communication + np.minimum(waits, missing[domain] - work)
    times = once + more
    forward, _, backward = _counts(section, replay.kind)
    return StageTimes(
        replicas=tuple(
            _replica_phases(replay, cost, times[:, number], number, float(seconds))
            for number, seconds in enumerate(sum(passes))
        ),
        # With ministages some layers run forward twice.
        forward=passes[0] * backward / np.where(forward, forward, 1),
        busy={kind: (times[:, domain] * work).sum(axis=0) for kind, work in works.items()},
        communication=communication,
        times=(times[:, domain],),
        cost=cost,
    )


def _counts(section: Section, kind: int) -> tuple[Floats, Floats, Floats]:
    """Return how many layers of a kind each domain runs forward, again and backward, [domains] each."""
    parts = section.parts
    model = section.job.model
    held, twice = parts.of_kinds(model)[kind], parts.run_twice(model)[kind]
    numbers = (held.layers + twice, held.again, held.layers)
    forward, again, backward = (np.array(section.by_domain(number), dtype=float) for number in numbers)
    return forward, again, backward


def _times(section: Section, replay: SectionReplay) -> tuple[Floats, Floats]:
    """Return how many layers each replayed pass counts for itself, and how many others it stands for.

    Both are [passes, domains]. The last passes of each direction stand for the layers that were not replayed.
    """
    laps, layers = replay.laps, replay.whole.layers
    once = np.ones((len(laps), len(section.replicas)))
    more = np.zeros(once.shape)
    for way, counts in zip(("forward", "again", "backward"), _counts(section, replay.kind), strict=True):
        once[[lap.way == way for lap in laps]] = np.minimum(1, counts / layers)
        last = last_laps(laps, way)
        more[last] = np.maximum(0, counts - layers) / max(1, len(last))
    return once, more


def _work(layer: Layer, lap: LayerPass, name: str) -> Floats:
    """Return seconds of a unit's work of some kind in a layer pass, without logits, [U]."""
    again = layer.again if lap.way == "again" else None
    values: Floats = getattr(again or (layer.backward if lap.way == "backward" else layer.forward), name)
    return np.zeros(len(values)) if lap.way == "logits" else values


def _replica_phases(
    replay: SectionReplay, cost: StageCost, times: Floats, replica: int, seconds: float
) -> Phases:
    """Return the phases of a domain along its busiest group.

    All-to-alls take from the time when the last member is ready until the last is done; of experts, from the
    time when a unit's tokens leave until all are back, without its own experts' work. The remainder of the
    time belongs to the exchange: waiting for keys, values and their gradients.
    """
    plan, laps, layer = replay.plan, replay.laps, cost.kinds[replay.kind]
    marks = replay.marks
    ready, enter, leave, finish = (
        np.array([by_group(plan, points) for points in marks[:, number]])
        for number in (READY, ENTER, LEAVE, FINISH)
    )
    token, sums, attention, experts = (
        times @ np.array([_work(layer, lap, name) for lap in laps])
        for name in ("token", "tensor_parallel", "attention", "experts")
    )
    layers_only = [[lap.way != "logits"] for lap in laps]
    moves = times @ np.where(layers_only, enter - ready + finish - leave, 0.0)
    cycle = times @ np.where(layers_only, marks[:, READY] - marks[:, ROUTE], 0.0)
    has_logits = any(lap.way == "logits" for lap in laps)
    logits, logits_sum = has_logits * cost.last.busy, has_logits * cost.last.sums.backward
    ahead = token + sums + cycle
    undisturbed = by_group(plan, ahead) + moves + attention + by_group(plan, logits + logits_sum)
    units = np.flatnonzero(plan.unit_replica == replica)
    busiest = units[np.argmax(undisturbed[units])]
    members = np.flatnonzero(plan.group == plan.group[busiest])
    first, last = (members[np.argmax(values[members])] for values in (ahead, logits + logits_sum))
    known = Phases(
        token=float(token[first] + experts[first]),
        tensor_parallel=float(sums[first] + logits_sum[last]),
        all_to_all=float(moves[busiest]) + float(cycle[first] - experts[first]),
        attention=float(attention[busiest]),
        logits=float(logits[last]),
    )
    remainder = seconds - known.total
    if abs(remainder) < _ROUNDING * seconds:
        remainder = 0.0
    return known + Phases(exchange=remainder)


def _simulated_layer(replay: SectionReplay, layer: Layer) -> Layer:
    """Return the cost model's layer with replayed times and with those of its busiest wire."""
    passes, durations = {}, replay.durations()
    for way in ("forward", "backward"):
        last = last_laps(replay.laps, way)
        passes[way] = replace(
            getattr(layer, way),
            finish=durations[last].mean(axis=0)[replay.plan.unit_replica],
            wire=float(replay.wire[last].mean(axis=0).max()),
        )
    return replace(layer, **passes)
