"""Extrapolation from a few replayed layers of one micro-batch to all layers.

A stage with L layers of which n were replayed takes the time of the replay and L - n times the mean of its
last two layers, forward and backward (groups that alternate in waiting for each other repeat after two).
Every micro-batch begins with all units of its stage ready.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_hexi.cost import Phases
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.layer import by_group
from megatron_hexi.cost.sections import Section
from megatron_hexi.cost.stage import StageCost
from megatron_hexi.lab.simulator.replay import Replay, last_laps
from megatron_hexi.lab.simulator.unit_program import LayerPass

#: Part of the whole below which a remainder is rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Times of one micro-batch in the stages of a section.

    Args:
        replicas: phases of each domain, exposed sends included.
        forward: seconds of each domain's forward pass, without recomputation and logits, [domains].
        token: seconds of token work of each unit, [U].
        attention: likewise.
        communication: waiting while its own messages are under way, likewise, exposed sends included.
        times: number of layers for which each layer pass counts, [passes, U].
        cost: the cost model's, with simulated times of a layer, for communication that they hide.
    """

    replicas: tuple[Phases, ...]
    forward: Floats
    token: Floats
    attention: Floats
    communication: Floats
    times: Floats
    cost: StageCost


def extend_stage(section: Section, replay: Replay, cost: StageCost, layers: int) -> StageTimes:
    """Return the times of all layers of the stages of a section.

    Args:
        section: the units.
        replay: replay of some of the layers.
        cost: the cost model's, for work and sends.
        layers: number of replayed layers.
    """
    plan, laps = replay.plan, replay.laps
    domain = plan.unit_replica
    once, more = _times(section, laps, layers)
    token, attention = (np.array([_work(cost, lap, name) for lap in laps]) for name in ("token", "attention"))
    durations, exposed, busy = replay.durations(), replay.exposed(), token + attention
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
    # With ministages some layers run forward twice.
    parts = section.parts
    counts = [np.array(section.by_domain(number)) for number in (parts.layers, parts.run_twice)]
    return StageTimes(
        replicas=tuple(
            _replica_phases(replay, cost, times[:, number], number, float(seconds))
            for number, seconds in enumerate(sum(passes))
        ),
        forward=passes[0] * counts[0] / (counts[0] + counts[1]) + cost.pipeline_s / 2,
        token=(times[:, domain] * token).sum(axis=0),
        attention=(times[:, domain] * attention).sum(axis=0),
        communication=communication + cost.pipeline_s,
        times=times[:, domain],
        cost=_simulated_cost(replay, cost, durations),
    )


def _times(section: Section, laps: tuple[LayerPass, ...], layers: int) -> tuple[Floats, Floats]:
    """Return for how many layers each pass counts as replayed, and for how many the last passes stand."""
    once = np.ones((len(laps), len(section.replicas)))
    more = np.zeros(once.shape)
    parts = section.parts
    ahead = parts.layers + parts.run_twice
    for way, number in (("forward", ahead), ("again", parts.again), ("backward", parts.layers)):
        counts = np.array(section.by_domain(number))
        once[[lap.way == way for lap in laps]] = np.minimum(1, counts / layers)
        last = last_laps(laps, way)
        more[last] = np.maximum(0, counts - layers) / max(1, len(last))
    return once, more


def _work(cost: StageCost, lap: LayerPass, name: str) -> Floats:
    """Return seconds of token work, all-reduces or attention of each unit in a layer pass, without logits."""
    layer_pass_cost = cost.layer.backward if lap.way == "backward" else cost.layer.forward
    values: Floats = getattr(layer_pass_cost, name)
    absent = lap.way == "logits" or (name != "attention" and not lap.whole)
    return np.zeros(len(values)) if absent else values


def _replica_phases(replay: Replay, cost: StageCost, times: Floats, replica: int, seconds: float) -> Phases:
    """Return the phases of a domain along its busiest group.

    All-to-alls take from the time when the last member is ready until the last is done. The remainder of the
    time belongs to the exchange: waiting for keys, values and their gradients.
    """
    plan, laps = replay.plan, replay.laps
    marks = replay.log.marks
    ready, enter, leave, finish = (
        np.array([by_group(plan, points) for points in marks[:, number]]) for number in range(4)
    )
    token, sums, attention = (
        times @ np.array([_work(cost, lap, name) for lap in laps])
        for name in ("token", "tensor_parallel", "attention")
    )
    moves = times @ np.where([[lap.way != "logits"] for lap in laps], enter - ready + finish - leave, 0.0)
    logits = cost.logits + cost.logits_sum
    undisturbed = by_group(plan, token + sums) + moves + attention + by_group(plan, logits)
    units = np.flatnonzero(plan.unit_replica == replica)
    busiest = units[np.argmax(undisturbed[units])]
    members = np.flatnonzero(plan.group == plan.group[busiest])
    first, last = (members[np.argmax(values[members])] for values in (token + sums, logits))
    known = Phases(
        token=float(token[first]),
        tensor_parallel=float(sums[first] + cost.logits_sum[last]),
        all_to_all=float(moves[busiest]),
        attention=float(attention[busiest]),
        logits=float(cost.logits[last]),
    )
    remainder = seconds - known.total
    if abs(remainder) < _ROUNDING * seconds:
        remainder = 0.0
    return known + Phases(exchange=remainder, pipeline=cost.pipeline_s)


def _simulated_cost(replay: Replay, cost: StageCost, durations: Floats) -> StageCost:
    """Return the cost model's stage with replayed times of a layer and of its busiest wire."""
    wire, laps = replay.wire(), replay.laps
    passes = {}
    for way in ("forward", "backward"):
        last = last_laps(laps, way)
        passes[way] = replace(
            getattr(cost.layer, way),
            finish=durations[last].mean(axis=0)[replay.plan.unit_replica],
            wire=float(wire[last].mean(axis=0).max()),
        )
    return replace(cost, kinds=(replace(cost.layer, **passes),))
