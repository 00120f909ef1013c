"""The plan as data classes: the tokens, heads, layers and micro-batches of each rank of a job.

The levels are replicas > stages > domains > groups > members. Sizes are counts; ranges and segments are half
open. All classes are frozen, so a plan can be shared, compared and digested.

Terms:
    * replica: the ranks that process one share of the global batch (data parallelism).
    * stage: a pipeline stage of a replica, with a range of the layers.
    * domain: the units of a stage that together process the sequences of some samples of each micro-batch.
    * group (A2A group): units of a domain that exchange tokens for heads by all-to-all. A group holds a set
      of tokens; together its members compute every attention head for those tokens.
    * member, unit: the tensor-parallel ranks that share every weight of a stage; one rank without tensor
      parallelism.
    * shard: the tokens that one member holds outside attention.
    * head range: the query heads that one member computes in attention, for all tokens of its group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from megatron_hexi.plan.recompute import Layers, Recompute
from megatron_hexi.plan.terms import (
    Count,
    Estimate,
    JobTerms,
    MicroBatches,
    Offload,
    Order,
    Positive,
    Provenance,
    UnitRates,
)
from megatron_hexi.plan.workload import Workload
from megatron_hexi.yaml_schema import Label, Strict

#: A half-open range ``(start, stop)``.
Range = tuple[Count, Count]

FORMAT_VERSION: Final = 2


def _ranges(value: Any) -> Any:
    """Return a list of ranges; a single range becomes a list of one range."""
    is_alone = isinstance(value, (list, tuple)) and not any(isinstance(item, (list, tuple)) for item in value)
    return [value] if is_alone else value


@dataclass(frozen=True)
class Member(Strict):
    """A unit as a member of a group: the unit's ranks, tokens, heads and experts.

    Args:
        ranks: tensor-parallel ranks of the unit, ascending; in a stage without `layers`, the ranks in the
            first pipeline stage. Units of a domain are in the same order by each of their ranks: the unit
            with the lower first rank also has the lower second rank, and so on, as [0, 1] and [2, 3], or
            [0, 2] and [1, 3], but not [0, 3] and [1, 2].
        tokens: tokens of the unit's shard (T); may be 0.
        heads: range of query heads that each rank of the unit computes in attention; may be empty.
        state: weight of the unit in the division of the optimizer's state among units with the same weights.
        experts: experts that the unit holds in each layer with experts. One range: each of these experts is
            cut into slices, one per rank. A range for each rank: that rank holds these experts whole.
            Left out: all experts, cut into slices.
        precision: `bf16`: in a job in fp8 the unit computes all products in bf16, as GPUs without fp8 must.
            Left out: as the job says.
        patches: weight of the unit in the division of a micro-batch's images, by patches; 0: it encodes none.
            Left out: every unit of the domain encodes all images. Units of a replica's first stage, which has
            the encoder, state it alone.
    """

    ranks: Annotated[tuple[Count, ...], Field(min_length=1)]
    tokens: Count
    heads: Range
    state: Positive = 1
    experts: Annotated[tuple[Range, ...], BeforeValidator(_ranges)] | None = None
    precision: Literal["bf16"] | None = None
    patches: Count | None = None

    @property
    def lead(self) -> int:
        """First rank of the member, by which members are identified and ordered."""
        return self.ranks[0]

    @property
    def number(self) -> int:
        """Number of the unit in a repeated stage, from 0: Megatron's data-and-context-parallel rank."""
        return self.ranks[0] // len(self.ranks)


@dataclass(frozen=True)
class Group(Strict):
    """An A2A group: units that exchange tokens for heads by all-to-all.

    The group's tokens, in ascending order, are cut into consecutive shards in the order of the members.

    Args:
        segments: positions that the group holds, ascending; the groups of a domain partition the sequence.
        members: units of the group; their shards add up to the group's tokens, and their head ranges
            partition the heads.
        name: name of the group for human readers.
    """

    name: Label = field(default="", kw_only=True)
    segments: tuple[Range, ...]
    members: tuple[Member, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of the group (G)."""
        return sum(stop - start for start, stop in self.segments)


@dataclass(frozen=True)
class Domain(Strict):
    """The units that together process the sequences of some samples; their groups partition each sequence.

    In a plan file, a domain of one unit is written by the unit's ranks: ``ranks: [4, 5]``.

    Args:
        groups: A2A groups of the domain; keys and values are exchanged round the groups in this order.
        samples: number of samples of each micro-batch that the domain processes; left out: all.
        micro_batches: number of whole micro-batches of an iteration that the domain processes, in place of
            `samples`; left out: every micro-batch.
    """

    groups: tuple[Group, ...]
    samples: Positive | None = None
    micro_batches: MicroBatches | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        """All P members of the domain in rank order, the order of Megatron's context-parallel group."""
        return tuple(sorted((m for g in self.groups for m in g.members), key=lambda m: m.lead))

    def with_members(self, change: Callable[[Member], Member]) -> Domain:
        """Return the domain with every member changed."""
        groups = (replace(group, members=tuple(map(change, group.members))) for group in self.groups)
        return replace(self, groups=tuple(groups))


@dataclass(frozen=True)
class Exchange(Strict):
    """Settings of the exchange of keys and values between groups.

    Args:
        window: number of exchange steps whose keys and values are in flight ahead of the step in use.
        parts: largest number of messages, by KV heads, that carry the keys and values of the first step. With
            more than one, the all-to-alls of queries and of outputs are each split in two.
    """

    window: Positive = 1
    parts: Positive = 1


@dataclass(frozen=True)
class Stage(Strict):
    """A pipeline stage.

    Args:
        domains: domains of the stage, which divide the samples or the micro-batches.
        layers: range of transformer layers of the stage; the first of several may have none, ``[0, 0]``, and
            encode images alone. Left out for a repeated stage: the only one of its replica in the plan, which
            each pipeline stage of the job repeats on the next ranks.
        recompute: activations that the backward pass recomputes; left out: the job's setting.
        exchange: settings of the exchange of keys and values; left out: the plan's settings.
        ministages: number of ministages in which the stage runs, or number of layers of each; `layers` then
            says how many layers the stage has, not which. Left out: the stage runs whole, in 1F1B.
        offload: data that waits in host memory while it is not used. `parameters`: weights and gradients of
            ministages that do not run. `optimizer`: the optimizer's fp32 weights and state, whose step is
            computed on the host. `activations`: inputs of a ministage, until the ministage's backward pass.
        expert_nodes: the stage's ranks by node: a token travels once to each node that holds some of its
            experts, and inside the node to each of them. Left out: to each of its experts by itself.
    """

    domains: tuple[Domain, ...]
    _: KW_ONLY  # so a new field changes no call
    layers: Range | None = None
    recompute: Recompute | None = None
    exchange: Exchange | None = None
    ministages: Layers | Annotated[tuple[Layers, ...], Field(min_length=1)] | None = None
    offload: Annotated[tuple[Offload, ...], Field(min_length=1)] | None = None
    expert_nodes: tuple[Annotated[tuple[Count, ...], Field(min_length=1)], ...] | None = None

    @property
    def takes_micro_batches(self) -> bool:
        """Whether the stage assigns whole micro-batches to its domains, not samples of each."""
        return any(domain.micro_batches is not None for domain in self.domains)

    @property
    def domain(self) -> Domain:
        """The only domain of the stage."""
        (domain,) = self.domains
        return domain

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of all domains of the stage, in rank order."""
        return tuple(sorted((m for d in self.domains for m in d.members), key=lambda m: m.lead))

    def offloads(self, kind: Offload) -> bool:
        """Whether the stage's data of this kind waits in host memory while it is not used."""
        return self.offload is not None and kind in self.offload

    @property
    def ministage_count(self) -> int | None:
        """Number of ministages; ``None``: the stage runs whole."""
        return len(self.ministages) if isinstance(self.ministages, tuple) else self.ministages

    @property
    def ministage_sizes(self) -> tuple[int, ...]:
        """Number of layers of each ministage: as given, or as even as possible, the larger numbers first."""
        assert self.layers is not None, "a stage that the job repeats runs whole"
        if isinstance(self.ministages, tuple):
            return self.ministages
        layers, count = self.layers[1] - self.layers[0], self.ministages or 1
        return tuple((layers + count - 1 - number) // count for number in range(count))


@dataclass(frozen=True)
class Replica(Strict):
    """A data-parallel replica and its share of the global batch.

    Args:
        stages: pipeline stages of the replica.
        micro_batches: micro-batches of a global batch that the replica processes; left out: an equal share.
        order: order in which the stages run their ministages. `interleaved`: in interleaved 1F1B, as
            Megatron runs virtual stages. Left out: all micro-batches pass one ministage before the next.
    """

    stages: tuple[Stage, ...]
    micro_batches: MicroBatches | None = None
    order: Order | None = None

    @property
    def ministages(self) -> int | None:
        """Number of ministages of each stage of the replica; ``None``: the stages run whole."""
        return self.stages[0].ministage_count

    @property
    def is_interleaved(self) -> bool:
        """Whether the stages run their ministages in interleaved 1F1B."""
        return self.order == "interleaved"

    def ministage_layers(self, stage: int) -> tuple[Range, ...]:
        """Return the layers of each ministage of a stage; one range of all layers if the stage runs whole."""
        turns = zip(*(turn.ministage_sizes for turn in self.stages), strict=True)
        sizes = itertools.chain.from_iterable(turns)
        ranges = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        return tuple(itertools.islice(ranges, stage, None, len(self.stages)))

    @property
    def domain(self) -> Domain:
        """The only domain of the replica's only stage."""
        (stage,) = self.stages
        return stage.domain


@dataclass(frozen=True)
class Plan(Strict):
    """A plan: the assignment of positions, heads, layers and micro-batches to the ranks of a job.

    Args:
        workload: shapes of the model and of the sequence for which the plan was made.
        replicas: replicas, with the stages, domains, groups and members that each consists of.
        exchange: settings of the exchange of keys and values, for stages that state none.
        job: settings that the job must have.
        gpus: number, in the order of the cluster file, of the GPU on which each rank must be started.
            Left out: all GPUs, in that order. The runtime cannot check these numbers.
        rates: speed and memory of the units, for ``--hexi-batch-shares``.
        estimate: iteration time, throughput and memory that the planner predicts.
        provenance: origin of the plan.
        version: version of the file format.
    """

    workload: Workload
    replicas: tuple[Replica, ...]
    exchange: Exchange = field(default_factory=Exchange)
    job: JobTerms = field(default_factory=JobTerms)
    gpus: tuple[Count, ...] | None = None
    rates: UnitRates | None = None
    estimate: Estimate | None = None
    provenance: Provenance | None = None
    version: Literal[2] = FORMAT_VERSION

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of all replicas, in order."""
        return tuple(stage for replica in self.replicas for stage in replica.stages)

    @property
    def members(self) -> tuple[Member, ...]:
        """All members in the order of their ranks."""
        return tuple(sorted((m for stage in self.stages for m in stage.members), key=lambda m: m.lead))

    @property
    def units(self) -> int:
        """Number of units over all replicas and stages."""
        return sum(len(group.members) for stage in self.stages for d in stage.domains for group in d.groups)

    @property
    def ranks(self) -> int:
        """Number of ranks of the job, or of one pipeline stage if the plan has a repeated stage."""
        return sum(len(member.ranks) for member in self.members)

    @property
    def has_ministages(self) -> bool:
        """Whether any stage runs in ministages."""
        return any(stage.ministages is not None for stage in self.stages)

    @property
    def takes_micro_batches(self) -> bool:
        """Whether any stage assigns whole micro-batches to its domains, not samples of each."""
        return any(stage.takes_micro_batches for stage in self.stages)

    @property
    def has_offload(self) -> bool:
        """Whether any stage offloads to host memory."""
        return any(stage.offload is not None for stage in self.stages)

    @property
    def is_repeated(self) -> bool:
        """Whether each replica has a single stage without `layers`, repeated by every pipeline stage."""
        return all(stage.layers is None for stage in self.stages)

    def workload_of(self, domain: Domain) -> Workload:
        """Return the workload with `tensor_parallel` set to the tensor-parallel size of a domain's units."""
        return replace(self.workload, tensor_parallel=len(domain.members[0].ranks))
