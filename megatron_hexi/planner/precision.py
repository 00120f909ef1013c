"""fp8 on the GPUs that have it: what a plan states, and what Megatron's flags can do with such GPUs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Final

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.cost.fp8 import fp8_fault, has_fp8, units_in_bf16
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Job
from megatron_hexi.plan import Member, Plan
from megatron_hexi.planner.layouts.trial import Candidate
from megatron_hexi.planner.moves.edit import with_members, written_out
from megatron_hexi.planner.request import Request

#: Factor on the seconds of a GPU's work in fp8 up to which plans with that GPU in bf16 are searched, too.
_ABOUT: Final = 1.05


def refuse_without_fp8(request: Request, cluster: Cluster) -> None:
    """Refuse fp8 where no GPU has it, and with --fp8-everywhere where any GPU lacks it.

    Raises:
        HexiError: there are such GPUs, or --fp8-everywhere is given and the job is not in fp8.
    """
    job = request.job
    if job.precision != "fp8":
        if request.fp8_everywhere:
            raise HexiError(f"--fp8-everywhere: the job is in {job.precision}; give --precision fp8 too")
        return
    lacking = _lacking(job, cluster)
    if len(lacking) == len(cluster.nodes) or (lacking and request.fp8_everywhere):
        asked = "--fp8-everywhere" if request.fp8_everywhere else "--precision fp8"
        remedy = "leave these nodes or the option out" if request.fp8_everywhere else "use --precision bf16"
        device = cluster.nodes[lacking[0]].device
        raise HexiError(f"{asked}: {fp8_fault(device, job.fp8_recipe)}; {remedy}")


def as_quick_in_bf16(request: Request, cluster: Cluster, best: Candidate | None) -> tuple[str, ...]:
    """Return the models of GPUs with fp8 that take about as long in bf16 for their work in a plan, or less.

    Args:
        best: the plan, in which all of them compute in fp8; ``None``: none fits, so any may be better.
    """
    job = request.job
    if job.precision != "fp8" or request.fp8_everywhere:
        return ()
    in_fp8 = [node.device.name for node in cluster.nodes if has_fp8(node.device, job.fp8_recipe)]
    if best is None:
        return tuple(dict.fromkeys(in_fp8))
    low, plain = (_work(best.plan, job, cluster) for job in (best.job, best.job.in_bf16))
    return tuple(name for name in dict.fromkeys(in_fp8) if name in low and plain[name] < _ABOUT * low[name])


def _work(plan: Plan, job: Job, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of an iteration in which each model of GPU computes, added up over GPUs."""
    found: dict[str, float] = defaultdict(float)
    for rank in CostModel(job, cluster).estimate(plan).ranks:
        found[cluster.ranks[rank.gpu].device.name] += rank.compute_s
    return found


def without_fp8(cluster: Cluster, models: Collection[str]) -> Cluster:
    """Return a cluster in which these models of GPUs compute in bf16."""
    return cluster.with_devices(lambda one: one.without_fp8 if one.name in models else one)


def precision_notes(job: Job, cluster: Cluster, chosen: Cluster, longer: float) -> Iterator[str]:
    """Yield notes on GPUs that compute in bf16 in a job in fp8, with the reason.

    Args:
        chosen: the cluster with rates in fp8 of those GPUs that use it.
        longer: part by which an iteration is longer with fp8 on all GPUs of `cluster` that have it.
    """
    if job.precision != "fp8":
        return
    lacking, plain = (
        dict.fromkeys(one.nodes[number].device.name for number in _lacking(job, one))
        for one in (cluster, chosen)
    )
    if lacking:
        yield f"{', '.join(lacking)}: in bf16, as no rate in fp8 by {job.fp8_recipe} scales is known"
    if len(plain) > len(lacking):
        found = "no plan fits" if longer == math.inf else f"a plan takes {longer:.1%} longer"
        names = ", ".join(name for name in plain if name not in lacking)
        yield f"{names}: in bf16, as with fp8 by {job.fp8_recipe} scales {found}"


def with_precision(plan: Plan, job: Job, cluster: Cluster) -> tuple[Plan, Job]:
    """Return a plan whose units say bf16 where their GPUs lack the job's fp8, and the job of that plan.

    Where the units of a repeated stage differ by the stage, each stage gets its layers.
    """
    plain = units_in_bf16(plan, job, cluster)
    if not plain:
        return plan, job
    places = Counter(lead % plan.ranks for lead in plain)
    differ = set(places.values()) != {job.pipeline_parallel}
    if plan.is_repeated and job.virtual_stages == 1 and differ:
        plan, job = written_out(plan, job)
    leads = {lead if not plan.is_repeated else lead % plan.ranks for lead in plain}

    def in_bf16(member: Member) -> Member:
        return replace(member, precision="bf16") if member.lead in leads else member

    return with_members(plan, in_bf16), job


def one_precision(request: Request, cluster: Cluster) -> Iterator[tuple[Request, frozenset[int]]]:
    """Yield requests in which all GPUs compute in one precision, each with the nodes that it leaves out.

    Megatron's flags know no other: bf16 on all GPUs, or fp8 on those that have it.
    """
    lacking = frozenset(_lacking(request.job, cluster)) if request.job.precision == "fp8" else frozenset()
    if len(lacking) < len(cluster.nodes):
        yield request, lacking
    if request.job.precision == "fp8" and not request.fp8_everywhere:
        yield replace(request, job=request.job.in_bf16), frozenset()


def _lacking(job: Job, cluster: Cluster) -> list[int]:
    """Return the numbers of the nodes whose GPUs lack the job's fp8."""
    nodes = enumerate(cluster.nodes)
    return [number for number, node in nodes if not has_fp8(node.device, job.fp8_recipe)]
