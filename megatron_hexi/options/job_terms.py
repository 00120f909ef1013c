"""What a plan says of its job sets Megatron's arguments; what the command line says must agree."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_hexi.errors import PlanError
from megatron_hexi.options.replaced import RECOMPUTE_FLAGS
from megatron_hexi.plan import Plan
from megatron_hexi.plan.flags import FLAGS

#: Terms that are one of Megatron's arguments.
_SINGLE = (
    "micro_batch_size",
    "global_batch_size",
    "pipeline_parallel",
    "optimizer",
    "distributed_optimizer",
    "overlap_gradients",
    "sequence_parallel",
)


@dataclass(frozen=True)
class _Setting:
    """One of Megatron's arguments, as the plan wants it.

    Args:
        place: in the plan.
        stated: what stands there.
        flag: of the argument; what the user writes.
        value: of the argument.
    """

    place: str
    stated: Any
    flag: str
    value: Any

    @property
    def argument(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def spelt(self) -> str:
        """As on the command line."""
        return self.flag if self.value is True else f"{self.flag} {self.value}"


def set_job_terms(args: Namespace, given: set[str], plan: Plan) -> list[str]:
    """Set the arguments that the plan states, and refuse those that contradict it.

    Args:
        args: Megatron's arguments, not yet checked; changed in place.
        given: the flags that the user wrote.
        plan: the plan.

    Returns:
        The flags that were set, as on the command line.

    Raises:
        PlanError: the command line says something else; with both values.
    """
    changed = []
    for setting in _settings(plan):
        found = getattr(args, setting.argument)
        if setting.flag in given:
            if found != setting.value:
                said = setting.flag if found is True else f"{setting.flag} {found}"
                raise PlanError(
                    f"{args.hexi_plan}: {setting.place} is {setting.stated}, the command line has {said}; "
                    f"leave {setting.flag} out, or make a plan for it"
                )
        elif found != setting.value:
            setattr(args, setting.argument, setting.value)
            if setting.value not in (False, None):
                changed.append(setting.spelt)
    if any(stage.recompute is not None for replica in plan.replicas for stage in replica.stages):
        for flag in RECOMPUTE_FLAGS:
            if flag in given:
                raise PlanError(
                    f"{args.hexi_plan}: its stages say what they recompute, the command line has {flag}; "
                    "leave it out"
                )
    return changed


def recompute_settings(recompute: str | int) -> dict[str, Any]:
    """Megatron's arguments for recomputing nothing, core attention, every layer, or so many first layers."""
    granularity, method, layers = {
        "none": (None, None, None),
        "selective": ("selective", None, None),
        "full": ("full", "uniform", 1),
    }.get(str(recompute), ("full", "block", recompute))
    return dict(zip(RECOMPUTE_FLAGS, (granularity, method, layers), strict=True))


def _settings(plan: Plan) -> Iterator[_Setting]:
    job = plan.job
    if plan.is_repeated:
        width = plan.workload.tensor_parallel
        yield _Setting("tensor-parallel size", width, FLAGS["tensor_parallel"], width)
    for name in _SINGLE:
        stated = getattr(job, name)
        if stated is not None:
            yield _Setting(f"job.{name}", stated, FLAGS[name], stated)
    if job.precision is not None:
        for precision in ("bf16", "fp16"):
            yield _Setting("job.precision", job.precision, f"--{precision}", job.precision == precision)
    if job.overlap_gradients and job.distributed_optimizer:
        yield _Setting("job.overlap_gradients", True, "--overlap-param-gather", True)
    if job.recompute is not None:
        for flag, value in recompute_settings(job.recompute).items():
            yield _Setting("job.recompute", job.recompute, flag, value)
