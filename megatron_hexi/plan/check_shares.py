"""Check how the domains of a stage divide the batch: samples of each micro-batch, or whole micro-batches."""

from __future__ import annotations

from megatron_hexi.plan.check_domain import refuse
from megatron_hexi.plan.model import Plan, Replica, Stage
from megatron_hexi.yaml_file import Place
from megatron_hexi.yaml_schema import Where


def check_shares(plan: Plan, replica: Replica, stage: Stage, place: Place, where: Where) -> None:
    """Check how the domains of a stage divide micro-batches.

    Raises:
        PlanError: a rule is broken.
    """
    if stage.takes_micro_batches:
        _check_deal(replica, stage, place, where)
    else:
        _check_samples(plan, stage, place, where)


def _check_deal(replica: Replica, stage: Stage, place: Place, where: Where) -> None:
    for d, domain in enumerate(stage.domains):
        here = (*place, d)
        if domain.samples is not None:
            refuse(
                where,
                (*here, "samples"),
                f"is {domain.samples}, in a stage whose domains take whole micro-batches",
                "give every domain samples, or every one micro_batches",
            )
        if domain.micro_batches is None:
            refuse(
                where,
                (*here, "micro_batches"),
                "is missing",
                "say how many each domain takes",
            )
    if stage.ministages is None:
        refuse(
            where,
            (*place, 0, "micro_batches"),
            f"is {stage.domains[0].micro_batches}, in a stage that runs 1F1B, where all take part in each",
            "give the stages of the replica ministages: 1 or more",
        )
    if replica.is_interleaved:
        refuse(
            where,
            (*place, 0, "micro_batches"),
            f"is {stage.domains[0].micro_batches}, in a replica with order: interleaved, where all take part "
            "in each",
            "give samples, or leave out the order",
        )
    total = sum(domain.micro_batches or 0 for domain in stage.domains)
    if replica.micro_batches != total:
        stated = "does not say" if replica.micro_batches is None else f"takes {replica.micro_batches}"
        refuse(
            where,
            place,
            f"take {total} micro-batches of an iteration, the replica {stated}",
            f"give the replica micro_batches: {total}, or the domains other numbers",
        )


def _check_samples(plan: Plan, stage: Stage, place: Place, where: Where) -> None:
    stated = [domain.samples for domain in stage.domains]
    if stated == [None]:
        return
    for d, samples in enumerate(stated):
        if samples is None:
            refuse(
                where, (*place, d, "samples"), "is missing", "say how many of a micro-batch each domain takes"
            )
    size, total = plan.job.micro_batch_size, sum(samples or 0 for samples in stated)
    if size is None:
        refuse(where, ("job", "micro_batch_size"), "is missing, domains share its samples", f"give {total}")
    if total != size:
        refuse(
            where, place, f"take {total} samples of each micro-batch", f"it has {size} (job.micro_batch_size)"
        )
