"""Check stages that run in ministages, and stages that offload to host memory."""

from __future__ import annotations

from megatron_hexi.plan.check_domain import refuse
from megatron_hexi.plan.model import Plan, Replica, Stage
from megatron_hexi.plan.terms import Recompute
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
    if stage.ministages != replica.ministages:
        stated, first = (
            "missing" if count is None else count for count in (stage.ministages, replica.ministages)
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
    if stage.ministages > layers:
        refuse(
            where,
            (*place, "ministages"),
            f"is {stage.ministages}, the stage has {layers} layer{'s' if layers > 1 else ''}",
            "give every ministage a layer at least",
        )
    settings: tuple[tuple[Recompute | None, Place], ...] = (
        (stage.recompute, (*place, "recompute")),
        (plan.job.recompute, ("job", "recompute")),
    )
    for recompute, here in settings:
        if isinstance(recompute, int):
            refuse(
                where,
                here,
                f"is {recompute}, and all layers of a ministage are computed again",
                "give none, selective or full: what the second pass keeps",
            )


def check_offload(stage: Stage, place: Place, where: Where) -> None:
    """Refuse to offload data that is always in use, or parameters without the optimizer's state."""
    if stage.offload is None:
        return
    here = (*place, "offload")
    for number, kind in enumerate(stage.offload):
        if kind in stage.offload[:number]:
            refuse(where, (*here, number), f"is {kind}, which stands there already", "name each once")
    if stage.offloads("parameters"):
        number = stage.offload.index("parameters")
        if (stage.ministages or 1) == 1:
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
