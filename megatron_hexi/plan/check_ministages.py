"""Check stages that run in ministages, offload to host memory, or run in chunks (interleaved)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hexi.plan.check_domain import PlanPlace
from megatron_hexi.plan.model import Plan, Replica, Stage
from megatron_hexi.plan.recompute import Again, Recompute
from megatron_hexi.plan.terms import Offload


def refuse_ministages(stage: Stage, place: PlanPlace) -> None:
    """Refuse ministages and offloading in a stage without `layers`, which every pipeline stage repeats."""
    offload = None if stage.offload is None else list(stage.offload)
    for name, value in (("ministages", stage.ministages), ("offload", offload)):
        if value is not None:
            place(name).refuse(
                f"is {value}, in a stage that the job's pipeline repeats",
                "give the stage its layers, or leave it out",
            )


def check_ministages(plan: Plan, replica: Replica, stage: Stage, place: PlanPlace) -> None:
    """Check that all stages of a replica have equally many ministages, each with at least one layer."""
    if stage.ministage_count != replica.ministages:
        stated, first = (
            "missing" if count is None else count for count in (stage.ministage_count, replica.ministages)
        )
        place("ministages").refuse(
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
            place("ministages").refuse(
                f"have {sum(stage.ministages)} layers together, {counted}",
                f"give each ministage's layers, {layers} together",
            )
    elif stage.ministages > layers:
        place("ministages").refuse(
            f"is {stage.ministages}, {counted}", "give every ministage a layer at least"
        )
    settings: tuple[tuple[Recompute | None, PlanPlace], ...] = (
        (stage.recompute, place("recompute")),
        (plan.job.recompute, place.root("job", "recompute")),
    )
    for recompute, here in settings:
        if Again.of(recompute).first:
            problem, kept = "all layers of a ministage are computed again", ": what the second pass keeps"
            if replica.is_interleaved:
                problem, kept = "layers are computed again in all ministages or in none", ""
            here.refuse(f"is {recompute}, and {problem}", f"give none, selective or full{kept}")


def check_order(replica: Replica, place: PlanPlace) -> None:
    """Check that a replica with an `order` has several stages, and several ministages in each."""
    if replica.order is None:
        return
    here = place("order")
    if replica.stages[0].layers is None:
        problem = "in a replica whose stage the job's pipeline repeats"
        here.refuse(f"is {replica.order}, {problem}", "give job.virtual_stages in its place")
    if len(replica.stages) == 1:
        here.refuse(
            f"is {replica.order}, in a replica of one stage, whose parts could only take turns",
            "leave it out, or give the replica another stage",
        )
    if (replica.ministages or 1) == 1:
        here.refuse(
            f"is {replica.order}, of stages that run whole",
            "give every stage two ministages or more, or leave it out",
        )


def check_offload(replica: Replica, stage: Stage, place: PlanPlace) -> None:
    """Refuse to offload data that is always in use, or parameters without the optimizer's state."""
    if stage.offload is None:
        return
    here = place("offload")
    for number, kind in enumerate(stage.offload):
        if kind in stage.offload[:number]:
            here(number).refuse(f"is {kind}, which stands there already", "name each once")
    in_use: tuple[Offload, ...] = ("parameters", "activations")
    for kind in in_use:
        if replica.is_interleaved and stage.offloads(kind):
            here(stage.offload.index(kind)).refuse(
                f"is {kind}, of a replica with order: interleaved, which always uses them",
                "offload the optimizer alone, or leave out the order",
            )
    if stage.offloads("parameters"):
        number = stage.offload.index("parameters")
        if (stage.ministage_count or 1) == 1:
            here(number).refuse(
                "is parameters, of a stage that runs whole: all of its weights are always in use",
                "give two ministages or more, or leave it out",
            )
        if not stage.offloads("optimizer"):
            here(number).refuse(
                "is parameters, and the optimizer's state of the same weights, which is larger, stays",
                "offload the optimizer too",
            )
    if stage.offloads("activations") and stage.ministages is None:
        here(stage.offload.index("activations")).refuse(
            "is activations, of a stage that runs whole: no rows wait between ministages",
            "give ministages, or leave it out",
        )


def check_interleaving(plan: Plan, root: PlanPlace) -> None:
    """Check `job.virtual_stages` against the stages, layers and micro-batches that the plan states."""
    chunks, stages = plan.job.virtual_stages, plan.job.pipeline_parallel
    if chunks is None or stages is None:
        return
    fault = interleaving_fault(chunks, stages, plan.workload.layers, _micro_batches(plan))
    if fault is not None:
        problem, _, remedy = fault.rpartition("; ")
        root("job", "virtual_stages").refuse(f"is {chunks}: {problem}", remedy)


def interleaving_fault(
    chunks: int, stages: int, layers: int | None, micro_batches: Sequence[int] = ()
) -> str | None:
    """Return why Megatron cannot run `chunks` chunks a stage, and the remedy behind a semicolon, or ``None``.

    Args:
        chunks: virtual stages of each pipeline stage; 1: its layers run in one go, as 1F1B does.
        layers: number of layers of the model; ``None``: not known.
        micro_batches: numbers of micro-batches of those replicas for which they are known. Megatron runs as
            many at a time as there are stages, and the last group must be complete.
    """
    if chunks == 1:
        return None
    if stages == 1:
        return "chunks of a stage's layers run in turn with those of other stages, and there is one; give 1"
    if layers is not None and layers % (stages * chunks):
        each = layers // stages
        return (
            f"{layers} layers cannot be cut into {stages} stages of {chunks} equal chunks; give a divisor of "
            f"{each}" + ("" if layers % stages == 0 else ", and another number of stages")
        )
    odd = next((count for count in micro_batches if count % stages), None)
    if odd is not None:
        return (
            f"a replica takes {odd} micro-batches, the interleaved schedule runs {stages} at a time; give "
            f"every replica a multiple of {stages}"
        )
    return None


def _micro_batches(plan: Plan) -> list[int]:
    """Return the number of micro-batches of each replica, without replicas for which it is not stated."""
    counts = [replica.micro_batches for replica in plan.replicas]
    size, batch = plan.job.micro_batch_size, plan.job.global_batch_size
    if None in counts and size is not None and batch is not None and set(counts) == {None}:
        return [batch // size // len(counts)]
    return [count for count in counts if count is not None]
