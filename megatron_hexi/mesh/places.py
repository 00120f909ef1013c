"""Where each rank of a job stands in a plan whose stages have layers of their own."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hexi.mesh.deal import stage_deal
from megatron_hexi.plan import Domain, Member, Plan, Replica, Stage, Workload
from megatron_hexi.plan.model import Range


@dataclass(frozen=True)
class Place:
    """Where one rank stands.

    Args:
        rank: its number in the job.
        replica: number of its replica.
        stage: number of its stage in the replica.
        domain: number of its domain in the stage.
        member: number of its unit among the members of the domain.
        tp_rank: its number in the unit.
        samples: of each micro-batch, those that its domain takes.
        micro_batches: of an iteration, those that its domain takes, ascending; ``None``: all.
    """

    rank: int
    replica: int
    stage: int
    domain: int
    member: int
    tp_rank: int
    samples: Range
    micro_batches: tuple[int, ...] | None = None


class Mesh:
    """The places of all ranks, and what follows from them. All ranks derive the same.

    Args:
        plan: a plan that passed its checks, with layers in every stage.
        micro_batch_size: samples of a micro-batch (B).
        sequence_parallel: whether units of several ranks hold a part of the rows each, outside the
            tensor-parallel layers.
    """

    def __init__(self, plan: Plan, micro_batch_size: int, sequence_parallel: bool) -> None:
        self.plan = plan
        self.micro_batch_size = micro_batch_size
        self.sequence_parallel = sequence_parallel
        found: dict[int, Place] = {}
        self._members: dict[int, Member] = {}
        for r, replica in enumerate(plan.replicas):
            for s, stage in enumerate(replica.stages):
                first = 0
                for d, (domain, own) in enumerate(zip(stage.domains, stage_deal(stage), strict=True)):
                    samples = (first, first + (domain.samples or micro_batch_size))
                    first = samples[1] if own is None else 0
                    for m, member in enumerate(domain.members):
                        for t, rank in enumerate(member.ranks):
                            found[rank] = Place(rank, r, s, d, m, t, samples, own)
                            self._members[rank] = member
        #: By rank.
        self.places = tuple(found[rank] for rank in range(len(found)))

    def replica(self, place: Place) -> Replica:
        """The replica of a rank."""
        return self.plan.replicas[place.replica]

    def stage(self, place: Place) -> Stage:
        """The stage of a rank."""
        return self.replica(place).stages[place.stage]

    def domain(self, place: Place) -> Domain:
        """The domain of a rank."""
        return self.stage(place).domains[place.domain]

    def member(self, place: Place) -> Member:
        """The unit of a rank."""
        return self._members[place.rank]

    def workload(self, place: Place) -> Workload:
        """The workload with the tensor-parallel size of a rank's unit."""
        return self.plan.workload_of(self.domain(place))

    def depth(self, place: Place) -> int:
        """Stages of a rank's replica."""
        return len(self.replica(place).stages)

    def goes_round(self, replica: int) -> bool:
        """Whether the last stage of a replica sends to the first, for the next ministage."""
        stages = self.plan.replicas[replica].stages
        return len(stages) > 1 and (stages[0].ministages or 1) > 1

    def is_last_stage(self, place: Place) -> bool:
        """Whether a rank computes the loss."""
        return place.stage == self.depth(place) - 1

    def stage_ranks(self, replica: int, stage: int) -> tuple[int, ...]:
        """All ranks of a stage, ascending."""
        members = self.plan.replicas[replica].stages[stage].members
        return tuple(sorted(rank for member in members for rank in member.ranks))

    def taking(self, replica: int, stage: int, micro_batch: int) -> int | None:
        """The number of the domain that takes a micro-batch; ``None``: all take some samples of it."""
        domains = enumerate(stage_deal(self.plan.replicas[replica].stages[stage]))
        return next((number for number, own in domains if own is not None and micro_batch in own), None)

    def lane(self, place: Place) -> tuple[int, ...]:
        """The ranks that exchange keys with a rank: its counterpart in each unit of its domain."""
        return tuple(member.ranks[place.tp_rank] for member in self.domain(place).members)

    def chain(self, place: Place) -> tuple[int, ...]:
        """A rank of each stage of a rank's replica, itself at its own: the pipeline as it sees it."""
        chain = [self.stage_ranks(place.replica, stage)[0] for stage in range(self.depth(place))]
        chain[place.stage] = place.rank
        return tuple(chain)

    def loss_ranks(self) -> tuple[int, ...]:
        """One rank of each unit that computes the loss: together they hold each token of the batch once."""
        last = (self.member(place) for place in self.places if self.is_last_stage(place))
        return tuple(sorted({max(member.ranks) for member in last}))

    def copy(self, place: Place) -> int:
        """Which copy of its weights a rank has, from 0: one a unit, counted over all replicas."""
        before = sum(
            max(len(stage.members) for stage in replica.stages)
            for replica in self.plan.replicas[: place.replica]
        )
        domains = self.stage(place).domains[: place.domain]
        return before + sum(len(domain.members) for domain in domains) + place.member
