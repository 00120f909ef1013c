"""fp8 on the GPUs that have it: what a plan states, and what Megatron's flags can do with such GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.fp8 import fp8_fault, has_fp8, units_in_bf16
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Job
from megatron_hexi.plan import Member, Plan
from megatron_hexi.planner.moves.edit import with_members, written_out
from megatron_hexi.planner.request import Request


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


def precision_note(job: Job, cluster: Cluster) -> tuple[str, ...]:
    """Return a note on GPUs that compute in bf16 in a job in fp8; empty if all have fp8."""
    names = {cluster.nodes[number].device.name: None for number in _lacking(job, cluster)}
    if job.precision != "fp8" or not names:
        return ()
    return (f"{', '.join(names)}: in bf16, as no rate in fp8 by {job.fp8_recipe} scales is known",)


def with_precision(plan: Plan, job: Job, cluster: Cluster) -> tuple[Plan, Job]:
    """Return a plan whose units say bf16 where their GPUs lack the job's fp8, and the job of that plan.

    Where the units of a repeated stage differ by the stage, each stage gets its layers.
    """
    plain = units_in_bf16(plan, job, cluster)
    if not plain:
        return plan, job
    if plan.is_repeated and job.pipeline_parallel > 1 and job.virtual_stages == 1:
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
    if lacking:
        yield replace(request, job=request.job.in_bf16), frozenset()


def _lacking(job: Job, cluster: Cluster) -> list[int]:
    """Return the numbers of the nodes whose GPUs lack the job's fp8."""
    nodes = enumerate(cluster.nodes)
    return [number for number, node in nodes if not has_fp8(node.device, job.fp8_recipe)]
