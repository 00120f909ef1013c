"""Whether Megatron's interleaved schedule can run chunks of a stage's layers, in plans and in jobs."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hexi.plan.check_domain import refuse
from megatron_hexi.plan.model import Plan
from megatron_hexi.yaml_schema import Where


def check_interleaving(plan: Plan, where: Where) -> None:
    """Check `job.virtual_stages` of a plan, as far as the plan states what it depends on.

    Args:
        plan: the plan; its other rules hold.

    Raises:
        PlanError: Megatron could not run the chunks.
    """
    chunks, stages = plan.job.virtual_stages, plan.job.pipeline_parallel
    place = ("job", "virtual_stages")
    if chunks is None or chunks == 1:
        return
    if stages is None:
        return
    fault = interleaving_fault(chunks, stages, plan.workload.layers, _micro_batches(plan))
    if fault is not None:
        problem, _, remedy = fault.rpartition("; ")
        refuse(where, place, f"is {chunks}: {problem}", remedy)


def interleaving_fault(
    chunks: int, stages: int, layers: int | None, micro_batches: Sequence[int] = ()
) -> str | None:
    """Return why Megatron cannot run so many chunks a stage, with the remedy behind a semicolon.

    Args:
        chunks: virtual stages of each pipeline stage; 1: its layers run in one go, as 1F1B does.
        layers: number of layers of the model; ``None``: not known.
        micro_batches: micro-batches of each replica, as far as they are known. Megatron runs as many at a
            time as there are stages, and the last group must be complete.
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
    """Return the micro-batches of the replicas, as far as the plan states them."""
    counts = [replica.micro_batches for replica in plan.replicas]
    size, batch = plan.job.micro_batch_size, plan.job.global_batch_size
    if None in counts and size is not None and batch is not None and set(counts) == {None}:
        return [batch // size // len(counts)]
    return [count for count in counts if count is not None]
