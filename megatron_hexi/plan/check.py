"""Check that a plan obeys all rules; an error names the place in the plan and the remedy."""

from __future__ import annotations

import itertools

from megatron_hexi.errors import PlanError
from megatron_hexi.plan.check_domain import (
    PlanPlace,
    check_domain,
    check_expert_nodes,
    check_experts,
    check_images,
    check_shares,
)
from megatron_hexi.plan.check_ministages import (
    check_interleaving,
    check_ministages,
    check_offload,
    check_order,
    refuse_ministages,
)
from megatron_hexi.plan.model import Domain, Group, Member, Plan, Replica, Stage
from megatron_hexi.plan.recompute import Again
from megatron_hexi.plan.terms import UnitRates
from megatron_hexi.plan.units import covers_gpus, spell_ranks
from megatron_hexi.plan.workload import Workload
from megatron_hexi.yaml_schema import Where


def check_plan(plan: Plan, where: Where) -> None:
    """Check that a plan obeys all rules."""
    root = PlanPlace(where)
    _check_workload(plan.workload, root)
    if not plan.replicas:
        root("replicas").refuse("is empty", "give at least one replica")
    places: dict[int, PlanPlace] = {}
    for r, replica in enumerate(plan.replicas):
        place = root("replicas", r)
        _check_layers(plan, replica, place("stages"))
        check_order(replica, place)
        for s, stage in enumerate(replica.stages):
            _check_stage(plan, replica, stage, place("stages", s), places)
    ranks = sorted(places)
    if ranks != list(range(len(ranks))):
        missing = next(rank for rank in range(len(ranks)) if rank not in places)
        root("replicas").refuse(
            f"have {len(ranks)} ranks numbered up to {ranks[-1]}, and rank {missing} is missing",
            f"number them 0 to {len(ranks) - 1}",
        )
    _check_precision(plan, places)
    _check_batch(plan, root)
    check_interleaving(plan, root)
    if plan.rates is not None:
        _check_rates(plan, plan.rates, root)
    if plan.gpus is not None:
        _check_gpus(plan, plan.gpus, root)


def require_repeated(plan: Plan, action: str) -> None:
    """Refuse a plan with several stages or domains, or with uneven shares of the optimizer's state.

    Args:
        action: verb for the error message, such as ``train by``: the operation that needs one repeated stage.

    Raises:
        PlanError: the plan has one of these properties; the message names the first.
    """
    feature = ""
    if not plan.is_repeated:
        feature = "stages with layers of their own"
    elif any(len(stage.domains) > 1 for stage in plan.stages):
        feature = "domains that share samples"
    elif any(member.state != 1 for member in plan.members):
        feature = "uneven shares of the optimizer's state"
    elif any(s.recompute is not None or s.exchange is not None for s in plan.stages):
        feature = "recomputation or an exchange of a stage of its own"
    if feature:
        raise PlanError(
            f"the plan has {feature}, and this version cannot {action} such plans yet; give every replica "
            "one stage with one domain, and leave its layers: out"
        )


def _check_layers(plan: Plan, replica: Replica, place: PlanPlace) -> None:
    """Check that a replica's stages partition the layers in order, or that its only stage has no `layers`."""
    stages = replica.stages
    if not stages:
        place.refuse("is empty", "give at least one stage")
    if len(stages) == 1 and stages[0].layers is None:
        if not plan.is_repeated:
            place(0, "layers").refuse("is missing, other replicas state layers", "add layers: [0, L]")
        refuse_ministages(stages[0], place(0))
        return
    total, reached, root = plan.workload.layers, 0, place.root
    if total is None:
        root("workload", "layers").refuse("is missing, stages state layers", "add layers: N, the model's")
    for term, stated in (
        ("pipeline_parallel", plan.job.pipeline_parallel is not None),
        ("virtual_stages", plan.job.virtual_stages not in (None, 1)),
    ):
        if stated:
            value = getattr(plan.job, term)
            root("job", term).refuse(f"is {value}, but stages state layers", f"leave {term} out")
    for s, stage in enumerate(stages):
        here = place(s, "layers")
        if stage.layers is None:
            here.refuse("is missing", "give the layers of each stage, as [start, stop]")
        start, stop = stage.layers
        if start != reached:
            here.refuse(f"begins at layer {start}", f"begin at {reached}, where the stage before ends")
        has_layers = s > 0 or len(stages) == 1  # a first stage of several may encode images alone
        if not start + has_layers <= stop <= total:
            here.refuse(f"ends at layer {stop}", f"end it after {start}, and at {total} at most")
        if Again.of(stage.recompute).first > stop - start:
            place(s, "recompute").refuse(
                f"is {stage.recompute}, the stage has {stop - start} layers", "give full, or fewer layers"
            )
        reached = stop
        check_ministages(plan, replica, stage, place(s))
        check_offload(replica, stage, place(s))
    if reached != total:
        place(len(stages) - 1, "layers").refuse(f"ends at layer {reached}", f"end it at {total}")


def _check_stage(
    plan: Plan, replica: Replica, stage: Stage, place: PlanPlace, places: dict[int, PlanPlace]
) -> None:
    """Check the units of a stage, the samples of its domains, and each domain."""
    if not stage.domains:
        place("domains").refuse("is empty", "give at least one domain")
    for d, domain in enumerate(stage.domains):
        here = place("domains", d, "groups")
        if not domain.groups:
            here.refuse("is empty", "give at least one group")
        for g, group in enumerate(domain.groups):
            if not group.members:
                here(g, "members").refuse("is empty", "give at least one member, or drop the group")
        width = len((plan if plan.is_repeated else domain).members[0].ranks)
        for g, group in enumerate(domain.groups):
            _check_units(plan, group, width, here(g), places)
        _check_rank_order(domain, here)
        check_domain(plan.workload, domain, here)
    check_shares(plan, replica, stage, place("domains"))
    check_experts(plan.workload, stage, place("domains"))
    check_expert_nodes(plan.workload, stage, place("expert_nodes"))
    check_images(replica, stage, place("domains"))


def _check_batch(plan: Plan, root: PlanPlace) -> None:
    """Check that the replicas' micro-batches add up to the global batch, where both are given."""
    size, batch = plan.job.micro_batch_size, plan.job.global_batch_size
    counts = [replica.micro_batches for replica in plan.replicas]
    if size is None or batch is None:
        return
    here = root("job", "global_batch_size")
    if batch % size:
        here.refuse(f"is {batch}", f"give a multiple of job.micro_batch_size = {size}")
    together = sum(count for count in counts if count is not None)
    if None not in counts and together * size != batch:
        here.refuse(
            f"is {batch}, the replicas take {together} micro-batches of {size}", f"give {together * size}"
        )
    if None in counts and (batch // size) % len(counts) and set(counts) == {None}:
        here.refuse(
            f"is {batch // size} micro-batches of {size}, which {len(counts)} replicas cannot share equally",
            "give every replica its micro_batches, or another batch",
        )


def _check_precision(plan: Plan, places: dict[int, PlanPlace]) -> None:
    """Check that a recipe of fp8, and units in bf16, belong to a job in fp8.

    Args:
        places: the place of each rank in the plan.
    """
    job = plan.job
    if job.precision == "fp8":
        return
    if job.fp8_recipe is not None:
        places[0].root("job", "fp8_recipe").refuse(
            f"is {job.fp8_recipe}, of a job that does not say precision: fp8",
            "add it, or leave the recipe out",
        )
    for member in plan.members:
        if member.precision is not None and job.precision is not None:
            places[member.lead].refuse(
                f"have precision: {member.precision}, which units state in a job in fp8; this one trains in "
                f"{job.precision}",
                "leave it out",
            )


def _check_rates(plan: Plan, rates: UnitRates, root: PlanPlace) -> None:
    """Check that every list of unit rates has one value for each unit."""
    for name in ("row_s", "pair_s", "room"):
        count = len(getattr(rates, name))
        if count != plan.units:
            root("rates", name).refuse(f"has {count} figures, the plan {plan.units} members", "give one each")


def _check_gpus(plan: Plan, gpus: tuple[int, ...], root: PlanPlace) -> None:
    """Check that `gpus` has one GPU per rank, or for a repeated stage a multiple of the stage's ranks."""
    if not covers_gpus(plan, len(gpus)):
        root("gpus").refuse(
            f"names {len(gpus)} GPUs, but the plan has {spell_ranks(plan)}",
            "name one for each rank of the job, or leave it out to use all of the cluster in order",
        )
    first: dict[int, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu in first:
            root("gpus", rank).refuse(
                f"is {gpu}, which rank {first[gpu]} has already", "give every rank a GPU of its own"
            )
        first[gpu] = rank


def _check_workload(workload: Workload, root: PlanPlace) -> None:
    heads, kv_heads = workload.heads, workload.kv_heads
    if heads % kv_heads:
        root("workload", "kv_heads").refuse(
            f"is {kv_heads}, which does not divide the {heads} heads", "give a number that divides them"
        )
    latent, place = workload.latent_exchange, root("workload", "latent_exchange")
    if latent is None:
        return
    if kv_heads != heads:
        place.refuse(
            f"is given, and {heads} heads share {kv_heads} KV heads",
            "leave it out: only multi-latent attention has such columns, and there each head has its own key",
        )
    if latent.rotary_dim >= workload.head_dim:
        place("rotary_dim").refuse(
            f"is {latent.rotary_dim}, a key has {workload.head_dim} columns", "give fewer"
        )


def _check_units(
    plan: Plan, group: Group, width: int, place: PlanPlace, places: dict[int, PlanPlace]
) -> None:
    """Check that a group's members are in rank order and equally large, and that no rank appears twice."""
    previous = -1
    for m, member in enumerate(group.members):
        here = place("members", m, "ranks")
        for rank in member.ranks:
            if rank in places:
                here.refuse(
                    f"has {rank}, which is given already at {places[rank]}", "give every rank one place"
                )
            places[rank] = here
        if member.lead < previous:
            here.refuse(
                f"begins with {member.lead}, after {previous}",
                "list a group's members in ascending rank order",
            )
        previous = member.lead
        if list(member.ranks) != sorted(member.ranks):
            here.refuse(f"is {list(member.ranks)}", f"write {sorted(member.ranks)}, ascending")
        _check_width(plan, member, width, here)


def _check_rank_order(domain: Domain, place: PlanPlace) -> None:
    """Check that of any two units the i-th ranks are in the same order for every i.

    Megatron's process groups require this order.
    """
    for before, after in itertools.pairwise(domain.members):
        if any(second < first for first, second in zip(before.ranks, after.ranks, strict=True)):
            place.refuse(
                f"have the units {list(before.ranks)} and {list(after.ranks)}, whose ranks are not all in "
                "one order",
                f"begin with {before.lead}, and make each rank of the second higher than its counterpart",
            )


def _check_width(plan: Plan, member: Member, first: int, place: PlanPlace) -> None:
    """Check that a unit's tensor-parallel size divides the heads and equals the size of the other units."""
    width, workload = len(member.ranks), plan.workload
    if workload.heads % width or (workload.kv_heads % width and width % workload.kv_heads):
        place.refuse(
            f"has {width} ranks, which cannot share {workload.heads} heads and {workload.kv_heads} KV heads",
            "give as many as divide the heads, and divide the KV heads or are a multiple of them",
        )
    if width != first:
        place.refuse(
            f"has {width} ranks, the first member {first}",
            "give all units of a domain as many, and of a plan whose stages the job repeats",
        )
    if plan.is_repeated:
        start = member.number * width
        if list(member.ranks) != list(range(start, start + width)):
            place.refuse(
                f"is {list(member.ranks)}, in a stage that the job's pipeline repeats",
                f"give {width} consecutive ranks from a multiple of {width}, or give the stage its layers",
            )
