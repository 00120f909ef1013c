"""Check stages that run in ministages, and stages that offload to host memory."""

from __future__ import annotations

from megatron_hexi.plan.check_domain import refuse
from megatron_hexi.plan.model import Plan, Replica, Stage
from megatron_hexi.plan.terms import Offload, Recompute
from megatron_hexi.yaml_file import Place
from megatron_hexi.yaml_schema import Where


def refuse_ministages(stage: Stage, place: Place, where: Where) -> None:
    """Refuse ministages and offloading in a stage without `layers`, which every pipeline stage repeats."""
    offload = None if stage.offload is None else list(stage.offload)
    for name, value in (("ministages", stage.ministages), ("offload", offload)):
        if value is not None:
            refuse(
                where,
                (*place, name),
                f"is {value}, in a stage that the job's pipeline repeats",
                "give the stage its layers, or leave it out",
            )


def check_ministages(plan: Plan, replica: Replica, stage: Stage, place: Place, where: Where) -> None:
    """Check that all stages of a replica have equally many ministages, each with at least one layer."""
    if stage.ministage_count != replica.ministages:
        stated, first = (
            "missing" if count is None else count for count in (stage.ministage_count, replica.ministages)
        )
        refuse(
            where,
            (*place, "ministages"),
            f"is {stated}, in the replica's first stage {first}",
            "give all stages of a replica as many: they take turns",
        )
    if stage.ministages is None:
        return
    assert stage.layers is not None
    layers = stage.layers[1] - stage.layers[0]
    counted = f"the stage has {layers} layer{'s' if layers > 1 else ''}"
    if isinstance(stage.ministages, tuple):
        if sum(stage.ministages) != layers:
            refuse(
                where,
                (*place, "ministages"),
                f"have {sum(stage.ministages)} layers together, {counted}",
                f"give each ministage's layers, {layers} together",
            )
    elif stage.ministages > layers:
        refuse(
            where,
            (*place, "ministages"),
            f"is {stage.ministages}, {counted}",
            "give every ministage a layer at least",
        )
    settings: tuple[tuple[Recompute | None, Place], ...] = (
        (stage.recompute, (*place, "recompute")),
        (plan.job.recompute, ("job", "recompute")),
    )
    for recompute, here in settings:
        if isinstance(recompute, int):
            problem, kept = "all layers of a ministage are computed again", ": what the second pass keeps"
            if replica.is_interleaved:
                problem, kept = "layers are computed again in all ministages or in none", ""
            refuse(where, here, f"is {recompute}, and {problem}", f"give none, selective or full{kept}")


def check_order(replica: Replica, place: Place, where: Where) -> None:
    """Check that a replica with an `order` has several stages, and several ministages in each."""
    if replica.order is None:
        return
    here = (*place, "order")
    if replica.stages[0].layers is None:
        problem = "in a replica whose stage the job's pipeline repeats"
        refuse(where, here, f"is {replica.order}, {problem}", "give job.virtual_stages in its place")
    if len(replica.stages) == 1:
        refuse(
            where,
            here,
            f"is {replica.order}, in a replica of one stage, whose parts could only take turns",
            "leave it out, or give the replica another stage",
        )
    if (replica.ministages or 1) == 1:
        refuse(
            where,
            here,
            f"is {replica.order}, of stages that run whole",
            "give every stage two ministages or more, or leave it out",
        )


def check_offload(replica: Replica, stage: Stage, place: Place, where: Where) -> None:
    """Refuse to offload data that is always in use, or parameters without the optimizer's state."""
    if stage.offload is None:
        return
    here = (*place, "offload")
    for number, kind in enumerate(stage.offload):
        if kind in stage.offload[:number]:
            refuse(where, (*here, number), f"is {kind}, which stands there already", "name each once")
    in_use: tuple[Offload, ...] = ("parameters", "activations")
    for kind in in_use:
        if replica.is_interleaved and stage.offloads(kind):
            refuse(
                where,
                (*here, stage.offload.index(kind)),
                f"is {kind}, of a replica with order: interleaved, which always uses them",
                "offload the optimizer alone, or leave out the order",
            )
    if stage.offloads("parameters"):
        number = stage.offload.index("parameters")
        if (stage.ministage_count or 1) == 1:
            refuse(
                where,
                (*here, number),
                "is parameters, of a stage that runs whole: all of its weights are always in use",
                "give two ministages or more, or leave it out",
            )
        if not stage.offloads("optimizer"):
            refuse(
                where,
                (*here, number),
                "is parameters, and the optimizer's state of the same weights, which is larger, stays",
                "offload the optimizer too",
            )
    if stage.offloads("activations") and stage.ministages is None:
        refuse(
            where,
            (*here, stage.offload.index("activations")),
            "is activations, of a stage that runs whole: no rows wait between ministages",
            "give ministages, or leave it out",
        )
