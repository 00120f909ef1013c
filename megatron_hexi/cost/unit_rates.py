"""Rates of a plan's units, by which a job assigns the documents of each batch.

Attention is faster in larger blocks, so a document of L tokens is taken to last `a L^2 / 2 + b L` seconds,
fitted to a long and to a short document; b is added to the seconds of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.compute import logits_times, own_block_times, token_times
from megatron_hexi.cost.experts import ExpertsOnRanks, expert_times
from megatron_hexi.cost.iteration import CostModel
from megatron_hexi.cost.memory import part_params, static_memory, token_bytes
from megatron_hexi.cost.sections import Section
from megatron_hexi.models.job import Job
from megatron_hexi.models.planned_kinds import refuse_undealt
from megatron_hexi.plan import Plan
from megatron_hexi.plan.terms import UnitRates

#: Length of the short document of the fit, as a part of the sequence; the long one is the whole sequence.
_SHORT = 1 / 64
#: The least seconds of a pair, as a part of the most.
_LEAST = 1e-6


def unit_rates(plan: Plan, job: Job, cluster: Cluster) -> UnitRates:
    """Return speed and memory of each unit of a plan, in rank order.

    Where pipeline stages repeat a unit, the rates are those of the slowest stage, the room of the fullest.

    Raises:
        PlanError: layers have a state, whose heads cannot move between batches, or the plan was made for
            another job.
        ClusterError: the plan's units do not match the cluster, or a GPU cannot do the job.
    """
    refuse_undealt(job.model)
    timing = CostModel(job, cluster).timing(plan)
    row, pair, attended = np.zeros((3, plan.units))
    room = np.full(plan.units, np.inf)
    for section, placed, memory in zip(timing.sections, timing.experts, timing.memory, strict=True):
        units = section.units
        rows, pairs = _seconds(section, placed)
        alone, held, of_group = _bytes(section, section.turns(timing.micro_batches), memory)
        left = np.maximum(0.0, section.placement.usable - alone)
        row[units], pair[units] = np.maximum(row[units], rows), np.maximum(pair[units], pairs)
        room[units] = np.minimum(room[units], left / held)
        attended[units] = np.maximum(attended[units], of_group / held)
    return UnitRates(_spelt(row), _spelt(pair), tuple(map(int, room)), _spelt([attended.max()])[0])


def _bytes(section: Section, micro_batches: Ints, memory: Mapping[str, Floats]) -> Floats:
    """Return the bytes on a GPU without tokens, per token of its unit, and per token attended to, [3, U].

    Args:
        micro_batches: number of micro-batches that each unit takes, [U].
        memory: bytes by term under the plan, [U], of which weights and their state are taken.
    """
    domains, job, found = section.arrays.unit_replica, section.job, []
    copies = section.placement.stage.fp8_copies + np.zeros(len(domains))
    for unit in np.unique(domains, return_index=True)[1]:
        part, low = section.part.of(unit), float(copies[domains == domains[unit]].min())
        alone, *more = token_bytes(job, part, section.window, 1, int(micro_batches[unit]), low)
        trained = part_params(job, part, trained=True)
        static = static_memory(job, part, part_params(job, part), trained, trained, low)
        found.append((alone - float(sum(static.values())), *more))
    alone, held, attended = np.array(found).T[:, domains]
    return np.stack([alone + sum(memory[term] for term in static), held, attended])


def _seconds(section: Section, placed: ExpertsOnRanks | None) -> tuple[Floats, Floats]:
    """Return the seconds of a row, and of a pair of query and key in all heads of a rank, [U] each.

    Both are for all passes of one layer, in the mean over the unit's layers. A row's part of the logits is
    added, and of the routed experts where no other unit's rows come to them.
    """
    job, part, domain = section.job, section.part, section.arrays.unit_replica
    count, long = len(domain), float(job.seq_length)
    rows = np.maximum(1.0, job.micro_batch_size * long / np.bincount(domain)[domain])
    lengths = np.array([long, max(1.0, long * _SHORT)])
    row, blocks, layers = np.zeros(count), np.zeros((2, count)), np.zeros(count)
    whole, attends_again = job.again.is_whole, "core_attn" in job.again
    kinds = [
        (kind, np.broadcast_to(held.layers, count), np.broadcast_to(held.again, count))
        for kind, held in zip(job.kinds, part.of_kinds(job.model), strict=True)
    ]
    is_last = np.broadcast_to(part.is_last, count)
    for speeds, units in section.placement.stage.by_kind:
        logits = logits_times(speeds, job, rows[units])
        row[units] = is_last[units] * (logits.forward + logits.backward)
        for kind, run, again in kinds:
            layer = token_times(speeds, kind, rows[units])
            row[units] += (run + whole * again)[units] * layer.forward + run[units] * layer.backward
            block = own_block_times(speeds, kind, lengths, causal=True)
            heads = kind.model.mixer.attends * job.workload().local_heads
            blocks[:, units] += heads * (
                np.outer(block.forward, (run + attends_again * again)[units])
                + np.outer(block.backward, run[units])
            )
    row /= rows
    for kind, run, again in kinds:
        layers += run
        if placed is not None and kind.model.routed:
            own = job.micro_batch_size * section.arrays.tokens
            experts = expert_times(section, placed, kind.precision)
            seconds = (run + whole * again) * experts.forward + run * experts.backward
            row += np.where(placed.domain_rows <= own, seconds / np.maximum(1, own), 0.0)
    # a L^2 / 2 + b L, with b not below 0
    per_token = blocks / lengths[:, None]
    most = 2 * per_token[0] / long
    pair = np.maximum(0.0, 2 * (per_token[0] - per_token[1]) / max(1.0, lengths[0] - lengths[1]))
    # In a window a long document's tokens take no longer than a short one's; plans have rates above 0.
    least = _LEAST * most if job.model.span.size < long else most
    pair = np.minimum(np.where(pair > 0, pair, least), most)
    row, layers = row + np.maximum(0.0, per_token[0] - pair * long / 2), np.maximum(1, layers)
    return row / layers, np.where(pair > 0, pair, _LEAST * row) / layers  # a stage may have MLPs alone


def _spelt(values: Sequence[float] | Floats) -> tuple[float, ...]:
    """Return numbers as a plan writes them, with six digits."""
    return tuple(float(f"{value:.6g}") for value in values)
