"""Rates of a plan's units, by which a job assigns the documents of each batch.

Attention is faster in larger blocks, so a document of L tokens is taken to last `a L^2 / 2 + b L` seconds,
fitted to a long and to a short document; b is added to the seconds of a row.
"""

from __future__ import annotations

import numpy as np

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.cost.compute import device_speeds, logits_times, own_block_times, token_times
from megatron_hexi.cost.memory import GIB, token_bytes
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.errors import PlanError
from megatron_hexi.models.job import Job
from megatron_hexi.plan import Plan
from megatron_hexi.plan.terms import UnitRates
from megatron_hexi.plan.units import domain_rows, rank_gpus

#: Length of the short document of the fit, as a part of the sequence; the long one is the whole sequence.
_SHORT = 1 / 64
#: The least seconds of a pair, as a part of the most.
_LEAST = 1e-6


def unit_rates(plan: Plan, job: Job, cluster: Cluster) -> UnitRates:
    """Return speed and memory of each unit of a plan without pipeline stages, in rank order.

    Raises:
        PlanError: the plan gives stages their layers, the job has several pipeline stages, or layers have a
            state, whose heads cannot move between batches.
    """
    if any(job.model.has_state):
        raise PlanError(
            f"--batch-shares: {job.model.name} has Mamba layers or delta nets, whose heads cannot move "
            "between batches; leave --batch-shares out"
        )
    if domain_rows(plan)[0].layers is not None or job.pipeline_parallel > 1:
        raise PlanError(
            "--batch-shares: the plan has pipeline stages, between which all batches have the same rows; "
            "give --pipeline-model-parallel-size 1, or leave --batch-shares out"
        )
    gpus = rank_gpus(plan, len(cluster.ranks))
    devices = [[cluster.ranks[gpus[rank]].device for rank in member.ranks] for member in plan.members]
    found = {id(device): _rates(device, plan, job) for unit in devices for device in unit}
    units = [[found[id(device)] for device in unit] for unit in devices]
    part = ModelPart.of_job(job, 0)
    alone, held, attended = token_bytes(job, part, plan.exchange.window, plan.units)
    free = [min(device.usable_gib * GIB for device in unit) - alone for unit in devices]
    return UnitRates(
        row_s=tuple(_spelt(max(row for row, _ in unit)) for unit in units),
        pair_s=tuple(_spelt(max(pair for _, pair in unit)) for unit in units),
        room=tuple(max(0, int(left / held)) for left in free),
        attended=_spelt(attended / held),
    )


def _rates(device: Device, plan: Plan, job: Job) -> tuple[float, float]:
    """Return the seconds of a row, and of a pair of query and key in all heads of a rank, on one device.

    Both are for all passes of one layer, in the mean over the layers; a row's part of the logits is added.
    """
    speeds = device_speeds(device, job)
    rows = np.array([max(1.0, job.micro_batch_size * job.seq_length / plan.units)])
    logits, again, passes = (
        logits_times(speeds, job, rows),
        1 + (job.mode == "full"),
        2 - (job.mode == "none"),
    )
    row = float(logits.forward[0] + logits.backward[0]) / rows[0] / job.model.layers
    long = float(job.seq_length)
    lengths, seconds = np.array([long, max(1.0, long * _SHORT)]), np.zeros(2)
    for kind, count in zip(job.kinds, job.model.layers_run, strict=True):
        share, layer = count / job.model.layers, token_times(speeds, kind, rows)
        row += share * float(again * layer.forward[0] + layer.backward[0]) / rows[0]
        block = own_block_times(speeds, kind, lengths, causal=True)
        heads = kind.model.mixer.attends * plan.workload.local_heads
        seconds += share * (passes * block.forward + block.backward) * heads
    # a L^2 / 2 + b L, with b not below 0
    per_token = seconds / lengths
    pair = max(0.0, 2 * float(per_token[0] - per_token[1]) / (lengths[0] - lengths[1])) if long > 1 else 0.0
    most = 2 * float(per_token[0]) / long
    # In a window a long document's tokens take no longer than a short one's; plans have rates above 0.
    pair = min(pair or (_LEAST * most if job.model.span.size < long else np.inf), most)
    return row + max(0.0, float(per_token[0]) - pair * long / 2), pair


def _spelt(value: float) -> float:
    """Return a number as a plan writes it, with six digits."""
    return float(f"{value:.6g}")
