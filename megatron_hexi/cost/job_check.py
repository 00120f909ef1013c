"""Checks that a plan belongs to a job, and that the cost model can time it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_hexi.cost.arrays import Ints
from megatron_hexi.errors import PlanError
from megatron_hexi.models.job import Job
from megatron_hexi.plan import Plan, assign_micro_batches, require_repeated
from megatron_hexi.plan.check_ministages import interleaving_fault
from megatron_hexi.plan.flags import spell_flag
from megatron_hexi.plan.units import domain_rows


def check_job(plan: Plan, job: Job) -> Ints:
    """Check a plan against a job, and return the number of micro-batches of each replica, [replicas].

    Raises:
        PlanError: plan and job differ; with both values.
    """
    _check_experts(plan, job)
    _check_images(plan, job)
    wanted = job.workload()
    fields = ["seq_length", "heads", "kv_heads", "head_dim", "layers", "hidden_size"]
    if domain_rows(plan)[0].layers is None:
        _check_repeated(plan, job)
        fields.append("tensor_parallel")
    else:
        _check_stages(plan, job)
    pairs = [(field, getattr(plan.workload, field), getattr(wanted, field)) for field in fields]
    for field, planned, asked in (*pairs, ("value_dim", plan.workload.value_size, wanted.value_size)):
        if planned is not None and planned != asked:
            raise PlanError(
                f"workload.{field}: the plan is for {planned}, but the job has {asked} (model "
                f"{job.model.name}); give the job that the plan was made for, or make a plan for this one"
            )
    if plan.workload.latent_exchange is not None:
        columns = replace(job, latent_exchange=True).workload().latent_exchange
        if plan.workload.latent_exchange != columns:
            raise PlanError(
                f"workload.latent_exchange: the plan is for {plan.workload.latent_exchange}, but the job has "
                f"{columns} (model {job.model.name}); give the job that the plan was made for, or make a "
                "plan for this one"
            )
    replicas = len(plan.replicas)
    if replicas != job.data_parallel:
        raise PlanError(
            f"replicas: the plan has {replicas}, the job {spell_flag('data_parallel', job.data_parallel)}; "
            f"give {spell_flag('data_parallel', replicas)}"
        )
    shares = assign_micro_batches(plan, job.global_batch_size, job.micro_batch_size)
    counts = [share.count for share in shares]
    fault = interleaving_fault(job.virtual_stages, job.pipeline_parallel, job.model.layers, counts)
    if fault is not None:
        raise PlanError(f"{spell_flag('virtual_stages', job.virtual_stages)}: {fault}")
    return np.array(counts)


def _check_experts(plan: Plan, job: Job) -> None:
    planned, there = plan.workload.experts, sum(experts.count for experts in job.model.routed)
    if planned is not None and planned != there:
        raise PlanError(
            f"workload.experts: the plan is for {planned}, but the job has {there} (model {job.model.name}); "
            "give the job that the plan was made for, or make a plan for this one"
        )


def _check_images(plan: Plan, job: Job) -> None:
    for number, replica in enumerate(plan.replicas):
        if replica.stages[0].layers is None:
            continue
        what = "layers" if replica.ministages is None else "ministages[0]"
        layers = replica.ministage_layers(0)[0]
        if layers[1] < job.first_layers:
            raise PlanError(
                f"replicas[{number}].stages[0].{what}: the plan has {list(layers)}, but the job needs "
                f"{job.first_layers} there; give it more, or say which images sequences have"
            )


def _check_repeated(plan: Plan, job: Job) -> None:
    for experts in job.model.routed:
        if plan.workload.experts is None:
            raise PlanError(
                f"workload.experts is missing: the plan does not say where the {experts.count} experts of "
                f"{job.model.name} lie; give its stages layers:, and its units experts:"
            )
    if not job.has_equal_stages:
        raise PlanError(
            f"pipeline_parallel = {job.pipeline_parallel}: the plan leaves stages to the job, whose "
            f"{job.model.layers} layers they cannot share equally; give a number that divides these"
        )
    require_repeated(plan, "time")


def _check_stages(plan: Plan, job: Job) -> None:
    if job.pipeline_parallel != 1:
        raise PlanError(
            f"{spell_flag('pipeline_parallel', job.pipeline_parallel)}: the plan's stages have layers of "
            "their own; leave the option out"
        )
    shared = any(len(stage.domains) > 1 and not stage.takes_micro_batches for stage in plan.stages)
    if shared and job.micro_batch_size != plan.job.micro_batch_size:
        raise PlanError(
            f"{spell_flag('micro_batch_size', job.micro_batch_size)}: domains of the plan share "
            f"{plan.job.micro_batch_size} samples; give {plan.job.micro_batch_size}"
        )
