"""Options of commands that evaluate a plan: the job that the plan was made for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from megatron_hexi.cli.options import MODEL_OF_PLAN, OF_PLANNED_JOB, Training, job_option, unfused_terms
from megatron_hexi.cli.output import say
from megatron_hexi.cluster import Cluster, cluster_digest
from megatron_hexi.cost import IterationCost, estimate
from megatron_hexi.cost.fp8 import fp8_fault, units_in_bf16
from megatron_hexi.errors import ClusterError, HexiError, PlanError
from megatron_hexi.models import Job, check_options, job_of_plan, model_file, read_model, refuse_imbalance
from megatron_hexi.plan import JobTerms, Plan
from megatron_hexi.plan.flags import spell_flag
from megatron_hexi.plan.terms import join_kernels, kernel_on


@contextlib.contextmanager
def naming_files(plan: Path, cluster: Path) -> Iterator[None]:
    """Add the names of both files to errors where a plan does not fit its cluster."""
    try:
        yield
    except (ClusterError, PlanError) as problem:
        raise type(problem)(f"{plan} on {cluster}: {problem}") from None


def estimate_on(plan: Plan, path: Path, job: Job, machines: Cluster, cluster: Path) -> IterationCost:
    """Return the predicted iteration of a plan, with a note where it was made for a different cluster."""
    for lead, device in units_in_bf16(plan, job, machines).items():
        raise PlanError(
            f"{path} on {cluster}: rank {lead} trains in fp8; {fp8_fault(device, job.fp8_recipe)}; or write "
            "precision: bf16 beside its ranks"
        )
    with naming_files(path, cluster):
        cost = estimate(plan, job, machines)
    made = plan.provenance
    if made and made.cluster_digest not in (None, cluster_digest(machines)):
        known = "" if made.cluster is None else f" ({made.cluster})"
        say(
            f"note: {path} was made for a different cluster{known} than {cluster}; to train there make a "
            f"plan for it: hexi plan {cluster}"
        )
    return cost


@dataclass(frozen=True, kw_only=True)
class PlannedJob(Training):
    """Options of the job that a plan was made for; values not given come from the plan, or are defaults."""

    otherwise = OF_PLANNED_JOB

    model: Annotated[str | None, job_option("model", MODEL_OF_PLAN, metavar="NAME|PATH")] = None

    def _name(self, plan: Plan) -> str | None:
        if self.model is not None:
            return self.model
        return plan.provenance.model if plan.provenance else None

    def model_file(self, plan: Plan) -> Path | None:
        """Return the file that the model is read from; ``None`` where it is a preset's name."""
        name = self._name(plan)
        return None if name is None else model_file(name)

    def job(self, plan: Plan, path: Path) -> Job:
        """Return the job that a plan is evaluated for."""
        model = self._name(plan)
        if model is None:
            raise HexiError(
                f"{path}: does not say which model it is for (provenance.model); add --model NAME|PATH"
            )
        # A plan says which terms it was made for; one written by hand may leave that to the file.
        stated = self._stated(model if plan.job == JobTerms() else None)
        self._check_terms(plan, path, stated)
        check_options(model, plan)
        shapes = read_model(model)
        refuse_imbalance(self.expert_imbalance, shapes)
        job = job_of_plan(plan, shapes, **stated, **unfused_terms(model))
        return self.with_contents(job, dealt=plan.rates is not None)

    def _check_terms(self, plan: Plan, path: Path, stated: Mapping[str, Any]) -> None:
        """Refuse options that contradict the plan, with both values."""
        for name, value in stated.items():
            planned = getattr(plan.job, name, None)
            differs = planned is not None and str(value) != str(planned)
            if name == "kernel":
                differs = any(
                    kernel_on(value, gpu) not in (None, kernel) for gpu, kernel in (planned or {}).items()
                )
                planned = join_kernels(planned or {})
            if differs:
                raise PlanError(
                    f"{path}: job.{name} is {planned}, the command line has {spell_flag(name, value)}; leave "
                    "the option out, or make a plan with it by hexi plan"
                )
