"""What a plan is asked for: a job, and which of its terms the user fixed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from megatron_hexi.cost import RECOMPUTES, Job
from megatron_hexi.errors import HexiError

#: Terms of a job that the planner chooses where they are not fixed.
CHOSEN: Final = ("tensor_parallel", "pipeline_parallel", "data_parallel", "micro_batch_size", "recompute")
#: Sizes of tensor-parallel units that are tried.
_WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Request:
    """A job to plan.

    Args:
        job: the job; what is not fixed is as `Job` has it by default.
        fixed: those of `CHOSEN` that must stay as the job says.

    Raises:
        HexiError: a name that is none of `CHOSEN`.
    """

    job: Job
    fixed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = sorted(self.fixed.difference(CHOSEN))
        if unknown:
            raise HexiError(f"fixed: {unknown[0]} is not the planner's to choose; give some of {CHOSEN}")

    def widths(self, most: int) -> list[int]:
        """Tensor-parallel sizes that the model can be cut into, up to so many GPUs of a node."""
        return [job.tensor_parallel for job in self._jobs("tensor_parallel", _WIDTHS) if job.tensor_parallel <= most]

    def with_width(self, size: int) -> Job:
        """The job with units of another size."""
        return replace(self.job, tensor_parallel=size)

    def _jobs(self, field: str, values: tuple[int, ...]) -> Iterator[Job]:
        if field in self.fixed:
            yield self.job
            return
        for value in values:
            try:
                yield replace(self.job, **{field: value})
            except HexiError:
                continue
