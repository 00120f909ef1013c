"""What this process trains by: the plan that was given, and all that was derived from it.

One object, replaced whole: so a plan is swapped between two iterations (`replan.training`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_hexi.mesh import Mesh
from megatron_hexi.plan import Plan, Schedule, Share, UnitRates
from megatron_hexi.runtime import DomainAttention

if TYPE_CHECKING:
    from megatron_hexi.megatron.stages.session import StagesSession


@dataclass(frozen=True)
class GivenPlan:
    """A plan as the command line gave it, checked against the job.

    Args:
        plan: the plan.
        path: where it was read.
        digest: of what it makes ranks do.
        kernel: name of the attention kernel, or ``auto``.
        row_multiple: what the number of rows of every local tensor must be a multiple of: the
            tensor-parallel size under sequence parallelism, else 1.
        shares: which micro-batches each replica takes; ``None`` where replicas are equal, and Megatron
            deals them.
        mesh: where all ranks stand, of a plan whose stages have layers of their own; else ``None``.
        rates: of its units, if documents are dealt by them, batch by batch; else ``None``.
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
    rates: UnitRates | None = None
    scales_mean: bool = False


@dataclass(frozen=True)
class LocalShard:
    """The rows that this rank holds of every [sequence, ...] tensor outside attention.

    Megatron cannot reshape tensors without rows, and sequence parallelism divides them by the
    tensor-parallel size. So a shard is padded to at least one row and to a multiple: padding rows hold
    position 0 with a loss mask of 0, and never enter attention. They change no result.

    Args:
        positions: position of each row in the sequence, [L], padding last.
        tokens: rows that are real tokens (T).
    """

    positions: Tensor
    tokens: int

    @property
    def rows(self) -> int:
        """Rows with padding (L)."""
        return self.positions.numel()


@dataclass(frozen=True)
class Session:
    """Everything that this rank derived from the plan.

    Args:
        given: the plan.
        attention: its part in every attention layer.
        shard: its rows outside attention; of a batch of documents, `packing.packed_shard` says them.
        share: the micro-batches that its replica takes of each global batch; ``None``: Megatron deals them.
        stages: its part in stages that differ; ``None`` where Megatron's own groups can hold the plan.
        replica: number of its replica in a plan whose stages the job repeats.
        since: the iteration before which this plan took another's place; 0: never.
    """

    given: GivenPlan
    attention: DomainAttention
    shard: LocalShard
    share: Share | None = None
    stages: StagesSession | None = None
    replica: int = 0
    since: int = 0

    @property
    def samples(self) -> slice:
        """The samples of each micro-batch that this rank takes."""
        return slice(None) if self.stages is None else slice(*self.stages.view.place.samples)

    @property
    def seq_length(self) -> int:
        """Tokens of the whole sequence (S)."""
        return self.given.plan.workload.seq_length


def local_shard(schedule: Schedule, row_multiple: int, device: torch.device) -> LocalShard:
    """The rows of a rank with these split tables."""
    pieces = [torch.arange(start, stop) for start, stop in schedule.segments]
    padding = max(1, -(-schedule.tokens // row_multiple)) * row_multiple - schedule.tokens
    positions = torch.cat([*pieces, torch.zeros(padding, dtype=torch.int64)])
    return LocalShard(positions.to(device), schedule.tokens)


# Megatron keeps its arguments and groups in module globals; these stand beside them and live as long.
_given: GivenPlan | None = None
_session: Session | None = None


def given_plan() -> GivenPlan | None:
    """The plan of the command line; ``None`` without one."""
    return _given


def set_given_plan(given: GivenPlan | None) -> None:
    """Keep the plan of the command line until the process groups are made."""
    global _given
    _given = given


def active_session() -> Session | None:
    """What this rank trains by; ``None`` where Megatron runs as it is."""
    return _session


def set_active_session(session: Session | None) -> None:
    """Train by another session from now on, or as Megatron does."""
    global _session
    _session = session
