"""The mesh: the unit of every rank of a job whose stages differ, and the sets of ranks that cooperate."""

from __future__ import annotations

from megatron_hexi.plan import Plan
from megatron_hexi.plan.shares import domain_micro_batches
from megatron_hexi.plan.terms import Fp8Recipe, fp8_row_multiple
from megatron_hexi.plan.units import Unit, unit_rows


class Mesh:
    """The units of all ranks of a job, and the sets of ranks that cooperate; equal on all ranks.

    Args:
        micro_batch_size: samples of a micro-batch (B).
        fp8_recipe: recipe of units that do not state their precision; ``None``: the job is not in fp8.
    """

    def __init__(
        self,
        plan: Plan,
        micro_batch_size: int,
        sequence_parallel: bool,
        fp8_recipe: Fp8Recipe | None = None,
    ) -> None:
        self.plan = plan
        self.micro_batch_size = micro_batch_size
        self.sequence_parallel = sequence_parallel
        self.fp8_recipe = fp8_recipe
        unit_of = {rank: unit for unit in unit_rows(plan, micro_batch_size) for rank in unit.ranks}
        #: The unit of each rank, by rank.
        self.units: tuple[Unit, ...] = tuple(unit_of[rank] for rank in range(len(unit_of)))

    @classmethod
    def of(
        cls,
        plan: Plan,
        micro_batch_size: int,
        sequence_parallel: bool,
        fp8_recipe: Fp8Recipe | None = None,
    ) -> Mesh | None:
        """Return the mesh of a plan; ``None``: its stage is repeated, so Megatron's own groups suffice."""
        return None if plan.is_repeated else cls(plan, micro_batch_size, sequence_parallel, fp8_recipe)

    def row_parts(self, unit: Unit) -> int:
        """Return the number of a unit's ranks that share its rows outside attention."""
        return unit.width if self.sequence_parallel else 1

    def row_multiple(self, unit: Unit) -> int:
        """Return the number that divides the rows of a unit outside attention, padding included."""
        return fp8_row_multiple(None if unit.precision else self.fp8_recipe, self.row_parts(unit))

    def wraps_around(self, replica: int) -> bool:
        """Whether a replica's last stage sends its output to the first stage, for the next ministage."""
        found = self.plan.replicas[replica]
        return len(found.stages) > 1 and (found.ministages or 1) > 1

    def stage_ranks(self, replica: int, stage: int) -> tuple[int, ...]:
        """Return all ranks of a stage of a replica, ascending."""
        members = self.plan.replicas[replica].stages[stage].members
        return tuple(sorted(rank for member in members for rank in member.ranks))

    def taking_domain(self, replica: int, stage: int, micro_batch: int) -> int | None:
        """Return the number of the domain that processes a micro-batch; ``None``: all domains share it."""
        domains = enumerate(domain_micro_batches(self.plan.replicas[replica].stages[stage]))
        return next((number for number, taken in domains if taken is not None and micro_batch in taken), None)

    def context_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that exchange keys with a rank: the rank with the same place in each unit.

        The units are those of the rank's domain.
        """
        unit = self.units[rank]
        index = unit.ranks.index(rank)
        return tuple(member.ranks[index] for member in unit.domain.members)

    def micro_batch_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's stage that together hold the tokens of one micro-batch, ascending."""
        unit = self.units[rank]
        if self.plan.replicas[unit.replica].stages[unit.stage].takes_micro_batches:
            return tuple(sorted(rank for member in unit.domain.members for rank in member.ranks))
        return self.stage_ranks(unit.replica, unit.stage)

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """Return one rank for each stage of a rank's replica; for the rank's stage, the rank itself."""
        unit = self.units[rank]
        ranks = [self.stage_ranks(unit.replica, stage)[0] for stage in range(unit.depth)]
        ranks[unit.stage] = rank
        return tuple(ranks)

    def loss_ranks(self) -> tuple[int, ...]:
        """Return one rank of each unit that computes the loss; together these ranks hold each token once."""
        return tuple(sorted({unit.ranks[-1] for unit in self.units if unit.is_last}))

    def copy(self, unit: Unit) -> int:
        """Return the number, from 0, of the copy of the weights that a unit holds, over all replicas."""
        before = sum(
            max(len(stage.members) for stage in replica.stages)
            for replica in self.plan.replicas[: unit.replica]
        )
        domains = self.plan.replicas[unit.replica].stages[unit.stage].domains[: unit.number]
        return before + sum(len(domain.members) for domain in domains) + unit.member
