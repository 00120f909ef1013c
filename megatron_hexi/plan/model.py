"""The plan: what every rank of a job does, as plain data.

The levels are replicas > stages > domains > groups > members. Sizes are counts; ranges and segments are half
open. Everything here is frozen, so a plan can be shared, compared and digested.

Terms:
    * replica: the ranks that process whole sequences of their own (data parallelism).
    * stage: a pipeline stage of a replica: some of its layers.
    * domain: the units of a stage that share the sequences of some samples of each micro-batch.
    * group (A2A group): units of a domain that exchange by all-to-all. A group holds a set of tokens;
      together its members hold every attention head for those tokens.
    * member, unit: the tensor-parallel ranks that share every weight of a stage; one rank without tensor
      parallelism.
    * shard: the tokens that one member holds outside attention.
    * head range: the query heads that one member computes in attention, for all tokens of its group.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from megatron_hexi.plan.terms import (
    STRICT,
    Count,
    Estimate,
    Experts,
    Heads,
    JobTerms,
    Layers,
    MicroBatches,
    Offload,
    Positive,
    Provenance,
    Recompute,
    UnitRates,
)
from megatron_hexi.yaml_schema import Label

#: Half-open range ``(start, stop)``.
Range = tuple[Count, Count]

FORMAT_VERSION: Final = 2


def _ranges(value: Any) -> Any:
    """A list of ranges, of which a single one may stand alone."""
    is_alone = isinstance(value, (list, tuple)) and not any(isinstance(one, (list, tuple)) for one in value)
    return [value] if is_alone else value


@dataclass(frozen=True)
class Workload:
    """The model and the sequence that a plan was made for; a job that differs in a given field is refused.

    Args:
        seq_length: tokens of one sequence (S).
        heads: query heads of a layer, over all tensor-parallel ranks.
        kv_heads: KV heads of a layer; divides `heads`.
        head_dim: size of one head (D).
        causal: whether tokens see earlier tokens only, or all.
        layers: transformer layers of the model.
        hidden_size: width of the model.
        value_dim: size of one head's values, where it is not `head_dim` (multi-latent attention).
        padded_vocabulary: rows of the embedding, padding included.
        experts: --num-experts, where units say which of them they hold.
        tensor_parallel: not in the file: ranks of a member, 0 where members differ. Head ranges count the
            heads of one of them.
    """

    seq_length: Positive
    heads: Heads
    kv_heads: Heads
    head_dim: Positive
    causal: bool = True
    layers: Layers | None = None
    hidden_size: Positive | None = None
    value_dim: Positive | None = None
    padded_vocabulary: Positive | None = None
    experts: Experts | None = None
    tensor_parallel: Count = 1

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @property
    def value_size(self) -> int:
        """Size of one head's values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def local_heads(self) -> int:
        """Query heads of one tensor-parallel rank (H): what head ranges partition."""
        return self.heads // self.tensor_parallel

    @property
    def local_kv_heads(self) -> int:
        """KV heads of one tensor-parallel rank (K). Megatron gives every rank at least one."""
        return max(1, self.kv_heads // self.tensor_parallel)

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head, on one tensor-parallel rank."""
        return self.local_heads // self.local_kv_heads


@dataclass(frozen=True)
class Member:
    """One unit's part.

    Args:
        ranks: its tensor-parallel ranks in the job, ascending; in a stage without `layers`, those of the
            first pipeline stage. Of two units of a domain, the one that begins lower has the lower rank in
            every place.
        tokens: size of its shard (T); may be 0.
        heads: its query heads in attention, of one of its ranks; may be empty.
        state: its share of the optimizer's state, relative to the others that hold the same weights.
        experts: its experts of each layer that has some: one range, whose experts its ranks cut between them,
            or a range for each rank, of whole experts. Left out: all of them, cut.
    """

    ranks: Annotated[tuple[Count, ...], Field(min_length=1)]
    tokens: Count
    heads: Range
    state: Positive = 1
    experts: Annotated[tuple[Range, ...], BeforeValidator(_ranges)] | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @property
    def lead(self) -> int:
        """Its first rank: what members are told apart and ordered by."""
        return self.ranks[0]

    @property
    def number(self) -> int:
        """Its number among the units of a stage that the job repeats: Megatron's data-and-context rank."""
        return self.ranks[0] // len(self.ranks)


def unit_ranks(workload: Workload, number: int) -> tuple[int, ...]:
    """The ranks of a unit by its number, in a stage that the job repeats: as Megatron numbers them."""
    width = workload.tensor_parallel
    return tuple(range(number * width, (number + 1) * width))


@dataclass(frozen=True)
class Group:
    """An A2A group: its tokens, ascending, are cut into consecutive shards in member order.

    Args:
        segments: positions that it holds, ascending; the groups of a domain partition the sequence.
        members: its units; their shards add up to its tokens, and their head ranges partition the heads.
        name: for people.
    """

    name: Label = field(default="", kw_only=True)
    segments: tuple[Range, ...]
    members: tuple[Member, ...]

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @property
    def tokens(self) -> int:
        """Tokens of the group (G)."""
        return sum(stop - start for start, stop in self.segments)


@dataclass(frozen=True)
class Domain:
    """The units that share the sequences of some samples.

    A domain of one unit is written by its ranks in the file: ``ranks: [4, 5]``.

    Args:
        groups: its A2A groups; keys and values travel round in this order.
        samples: how many of each micro-batch it takes; else all.
        micro_batches: in place of `samples`: how many whole micro-batches of an iteration it takes.
    """

    groups: tuple[Group, ...]
    samples: Positive | None = None
    micro_batches: MicroBatches | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @property
    def members(self) -> tuple[Member, ...]:
        """All members, in the order of their ranks: the order of a context-parallel group (P of them)."""
        return tuple(sorted((m for g in self.groups for m in g.members), key=lambda m: m.lead))


@dataclass(frozen=True)
class Exchange:
    """How keys and values travel between groups.

    Args:
        window: KV blocks in flight ahead of the one in use.
        parts: in how many parts, by KV heads, the blocks of the first step travel at most. With more than
            one, the all-to-alls of queries and outputs travel in two.
    """

    window: Positive = 1
    parts: Positive = 1

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Stage:
    """A pipeline stage.

    Args:
        domains: its units, by the samples that they take.
        layers: its transformer layers. Left out for the only stage of a replica: each pipeline stage of the
            job repeats it, on the ranks that follow.
        recompute: what its backward pass computes again; else as the job says.
        exchange: how keys and values travel in it; else as the plan says.
        ministages: in how many parts it runs; `layers` then only says how many layers it has in all. Else it
            runs whole, in 1F1B.
        offload: what waits in host memory while it is not used. `parameters`: weights and gradients of
            ministages that do not run. `optimizer`: its fp32 weights and state; its step is computed on
            the host. `activations`: rows that entered a ministage, until its backward pass.
    """

    domains: tuple[Domain, ...]
    layers: Range | None = None
    recompute: Recompute | None = None
    exchange: Exchange | None = None
    ministages: Layers | None = None
    offload: Annotated[tuple[Offload, ...], Field(min_length=1)] | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @property
    def is_dealt(self) -> bool:
        """Whether its domains take whole micro-batches."""
        return any(domain.micro_batches is not None for domain in self.domains)

    @property
    def domain(self) -> Domain:
        """The only domain."""
        (domain,) = self.domains
        return domain

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of all domains, in the order of their ranks."""
        return tuple(sorted((m for d in self.domains for m in d.members), key=lambda m: m.lead))

    def offloads(self, what: Offload) -> bool:
        """Whether something of it waits in host memory while it is not used."""
        return self.offload is not None and what in self.offload

    @property
    def ministage_sizes(self) -> tuple[int, ...]:
        """Layers of each ministage, as even as they divide, the larger ones first."""
        assert self.layers is not None, "a stage that the job repeats runs whole"
        layers, count = self.layers[1] - self.layers[0], self.ministages or 1
        return tuple((layers + count - 1 - number) // count for number in range(count))


@dataclass(frozen=True)
class Replica:
    """A data-parallel replica and its share of the global batch.

    Args:
        stages: its pipeline stages.
        micro_batches: micro-batches of one global batch that it takes; else an equal share.
    """

    stages: tuple[Stage, ...]
    micro_batches: MicroBatches | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @property
    def ministages(self) -> int | None:
        """In how many parts each of its stages runs; ``None``: whole."""
        return self.stages[0].ministages

    def ministage_layers(self, stage: int) -> tuple[Range, ...]:
        """The model's layers of each ministage of a stage; of a stage that runs whole, all it has."""
        turns = zip(*(one.ministage_sizes for one in self.stages), strict=True)
        sizes = itertools.chain.from_iterable(turns)
        ranges = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        return tuple(itertools.islice(ranges, stage, None, len(self.stages)))

    @property
    def domain(self) -> Domain:
        """The only domain of the only stage."""
        (stage,) = self.stages
        return stage.domain


@dataclass(frozen=True)
class Plan:
    """What the planner writes and the runtime reads.

    Args:
        workload: what it was made for.
        replicas: who does what.
        exchange: how keys and values travel, in stages that do not say it.
        job: how the job must run.
        gpus: the GPU on which each rank must be started, numbered in the order of the cluster file; else
            all, in that order. The runtime cannot check it.
        rates: of its units, for ``--hexi-batch-shares``.
        estimate: what the planner expects.
        provenance: where the plan comes from.
        version: of the file format.
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

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @property
    def members(self) -> tuple[Member, ...]:
        """All members, in the order of their ranks."""
        stages = (stage for replica in self.replicas for stage in replica.stages)
        return tuple(sorted((m for stage in stages for m in stage.members), key=lambda m: m.lead))

    @property
    def units(self) -> int:
        """Members over all replicas and stages."""
        stages = (stage for replica in self.replicas for stage in replica.stages)
        return sum(len(group.members) for stage in stages for one in stage.domains for group in one.groups)

    @property
    def ranks(self) -> int:
        """Ranks that it numbers: those of the job, or of one pipeline stage where the job repeats it."""
        return sum(len(member.ranks) for member in self.members)

    @property
    def has_ministages(self) -> bool:
        """Whether some stages run in ministages."""
        return any(stage.ministages is not None for replica in self.replicas for stage in replica.stages)

    @property
    def has_deal(self) -> bool:
        """Whether domains of some stages take whole micro-batches."""
        return any(stage.is_dealt for replica in self.replicas for stage in replica.stages)

    @property
    def has_offload(self) -> bool:
        """Whether something of some stages waits in host memory."""
        return any(stage.offload is not None for replica in self.replicas for stage in replica.stages)

    @property
    def is_repeated(self) -> bool:
        """Whether the job's pipeline stages repeat the one stage of each replica."""
        return all(stage.layers is None for replica in self.replicas for stage in replica.stages)

    def workload_of(self, domain: Domain) -> Workload:
        """The workload with the tensor-parallel size of a domain's units."""
        return replace(self.workload, tensor_parallel=len(domain.members[0].ranks))
