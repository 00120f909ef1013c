"""The session of this process: the plan, and everything derived from it.

It is one object, which a swap of plans between two iterations replaces (`replan.training`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_hexi.mesh import Mesh
from megatron_hexi.plan import Domain, Plan, Schedule, Share
from megatron_hexi.plan.terms import Fp8Recipe
from megatron_hexi.runtime import DomainAttention

if TYPE_CHECKING:
    from megatron_hexi.megatron.stages.stages_session import StagesSession


@dataclass(frozen=True)
class TrainingTerms:
    """Terms of the job that patches of Megatron-Core ask for beside its plan; the training loop fills them.

    Args:
        layers: layers of the whole model, those that predict further tokens included.
        further_layers: layers that predict further tokens.
        experts: experts of a layer; ``None``: the model has none.
        has_documents: whether sequences tell where their documents end.
        has_axes: whether tokens have positions in time, height and width.
        reads_ahead: whether a micro-batch may be read before the one ahead of it has run.
        scales_losses: whether losses are scaled, as for fp16.
        bucket_size: elements after which a bucket of gradients is closed; ``None``: the default.
        buckets: buckets of the whole model's gradients, in place of a size; ``None``: the size decides.
        overlaps_values: whether new weights may be sent behind the next forward pass; asked after each step.
    """

    layers: int = 0
    further_layers: int = 0
    experts: int | None = None
    has_documents: bool = False
    has_axes: bool = False
    reads_ahead: bool = False
    scales_losses: bool = False
    bucket_size: int | None = None
    buckets: int | None = None
    overlaps_values: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class GivenPlan:
    """The plan of the job, checked against its terms.

    Args:
        plan: the plan, with `rates` only if documents are assigned by them in each batch.
        kernel: name of the attention kernel, or ``auto``.
        row_multiple: number that divides the rows of every local tensor: the tensor-parallel size under
            sequence parallelism, else 1; times the rows of which products in fp8 take multiples.
        shares: micro-batches of each replica; ``None`` where replicas are equal, and Megatron assigns
            micro-batches.
        mesh: the units of all ranks, of a plan whose stages have layers of their own; else ``None``.
        fp8_format: the job's --fp8-format, on ranks in bf16 too; ``None``: the job is not in fp8.
        fp8_recipe: the job's --fp8-recipe; likewise.
        scales_mean: whether the loss scale is meant for the mean over a batch, as it is unless the user gives
            ``--calculate-per-token-loss``; the plan has losses summed over tokens all the same.
    """

    plan: Plan
    path: str
    digest: str
    kernel: str
    row_multiple: int
    shares: tuple[Share, ...] | None = None
    mesh: Mesh | None = None
    fp8_format: str | None = None
    fp8_recipe: Fp8Recipe | None = None
    scales_mean: bool = False
    terms: TrainingTerms = TrainingTerms()


@dataclass(frozen=True)
class LocalShard:
    """The rows that this rank holds of every [sequence, ...] tensor outside attention.

    Megatron cannot reshape tensors without rows, and sequence parallelism divides them by the
    tensor-parallel size. So a shard is padded to at least one row and to a multiple: padding rows hold
    position 0 with a loss mask of 0, and never enter attention. They change no result.

    Args:
        positions: position of each row in the sequence, [L], padding last.
        tokens: number of rows that are tokens (T).
    """

    positions: Tensor
    tokens: int

    @property
    def rows(self) -> int:
        """Number of rows with padding (L)."""
        return self.positions.numel()


@dataclass(frozen=True)
class Session:
    """Everything that this rank derived from the plan.

    Args:
        shard: this rank's rows outside attention; with documents, see `packing.packed_shard`.
        share: micro-batches of its replica in each global batch; ``None``: Megatron assigns them.
        stages: this rank's part in stages that differ; ``None`` where Megatron's own groups suffice.
        since: the first iteration of this plan after a swap; 0: there was no swap.
    """

    given: GivenPlan
    attention: DomainAttention
    shard: LocalShard
    share: Share | None = None
    stages: StagesSession | None = None
    replica: int = 0
    since: int = 0

    @property
    def domain(self) -> Domain:
        """This rank's domain."""
        if self.stages is not None:
            return self.stages.view.place.domain
        return self.given.plan.replicas[self.replica].domain

    @property
    def samples(self) -> slice:
        """The samples of each micro-batch that this rank takes."""
        return slice(None) if self.stages is None else slice(*self.stages.view.place.samples)

    @property
    def seq_length(self) -> int:
        """Tokens of the whole sequence (S)."""
        return self.given.plan.workload.seq_length


def local_shard(schedule: Schedule, row_multiple: int, device: torch.device) -> LocalShard:
    """Return the rows of a rank with these split tables."""
    pieces = [torch.arange(start, stop) for start, stop in schedule.segments]
    padding = max(1, -(-schedule.tokens // row_multiple)) * row_multiple - schedule.tokens
    positions = torch.cat([*pieces, torch.zeros(padding, dtype=torch.int64)])
    return LocalShard(positions.to(device), schedule.tokens)


# Megatron keeps its arguments and groups in module globals; these live as long.
_given: GivenPlan | None = None
_session: Session | None = None


def given_plan() -> GivenPlan | None:
    """Return the plan of the job; ``None`` without a plan."""
    return _given


def set_given_plan(plan: GivenPlan | None) -> None:
    """Set the plan of the job, for the making of process groups."""
    global _given
    _given = plan


def active_session() -> Session | None:
    """Return this rank's session; ``None`` where Megatron runs without a plan."""
    return _session


@contextmanager
def without_session() -> Iterator[None]:
    """Let what is built within the context be as without a plan, as encoders of images are."""
    session = _session
    set_active_session(None)
    try:
        yield
    finally:
        set_active_session(session)


def set_active_session(session: Session | None) -> None:
    """Set the session by which this rank trains from now on; ``None``: without a plan."""
    global _session
    _session = session
