"""The plan as data classes: what each rank of a job holds and computes.

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

#: A half-open range ``(start, stop)``.
Range = tuple[Count, Count]

FORMAT_VERSION: Final = 2


def _ranges(value: Any) -> Any:
    """Return a list of ranges; a single range becomes a list of one."""
    is_alone = isinstance(value, (list, tuple)) and not any(isinstance(item, (list, tuple)) for item in value)
    return [value] if is_alone else value


@dataclass(frozen=True)
class LatentColumns:
    """The columns of a token that multi-latent attention makes keys and values of.

    Args:
        kv_rank: columns that each head's key and value are made of (--kv-lora-rank).
        rotary_dim: columns of a key with rotary positions, equal in all heads (--qk-pos-emb-head-dim).
    """

    kv_rank: Positive
    rotary_dim: Positive

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Workload:
    """The model and the sequence of a plan; a job that differs in a given field is refused.

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
        latent_exchange: latent columns, where these travel in place of keys and values, and each rank makes
            its own heads' keys and values of those that it receives.
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
    latent_exchange: LatentColumns | None = None
    tensor_parallel: Count = 1

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @property
    def value_size(self) -> int:
        """Size of a value head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def local_heads(self) -> int:
        """Query heads of a tensor-parallel rank (H): head ranges partition these."""
        return self.heads // self.tensor_parallel

    @property
    def local_kv_heads(self) -> int:
        """KV heads of a tensor-parallel rank (K). Megatron gives every rank at least one.

        Latent columns that travel are one KV head, of which all query heads read.
        """
        return 1 if self.latent_exchange else max(1, self.kv_heads // self.tensor_parallel)

    @property
    def exchanged_sizes(self) -> tuple[int, int]:
        """Columns of a KV head that travel: key and value, or latent columns without and with positions."""
        latent = self.latent_exchange
        return (latent.kv_rank, latent.rotary_dim) if latent else (self.head_dim, self.value_size)

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share a KV head, on a tensor-parallel rank."""
        return self.local_heads // self.local_kv_heads


@dataclass(frozen=True)
class Member:
    """A unit in a group, with its share of tokens and heads.

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
        """Its first rank, which identifies members and orders them."""
        return self.ranks[0]

    @property
    def number(self) -> int:
        """Its number among the units of a stage that the job repeats: Megatron's data-and-context rank."""
        return self.ranks[0] // len(self.ranks)


def unit_ranks(workload: Workload, number: int) -> tuple[int, ...]:
    """Return the ranks of a unit by its number, as Megatron numbers them, in a stage that the job repeats."""
    width = workload.tensor_parallel
    return tuple(range(number * width, (number + 1) * width))


@dataclass(frozen=True)
class Group:
    """An A2A group: its tokens, ascending, are cut into consecutive shards in the order of members.

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
        """All members in the order of their ranks, which is that of a context-parallel group (P members)."""
        return tuple(sorted((m for g in self.groups for m in g.members), key=lambda m: m.lead))


@dataclass(frozen=True)
class Exchange:
    """Settings of the exchange of keys and values between groups.

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
    def takes_micro_batches(self) -> bool:
        """Whether its domains take whole micro-batches, not samples of each."""
        return any(domain.micro_batches is not None for domain in self.domains)

    @property
    def domain(self) -> Domain:
        """The only domain of the stage."""
        (domain,) = self.domains
        return domain

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of all domains, in the order of their ranks."""
        return tuple(sorted((m for d in self.domains for m in d.members), key=lambda m: m.lead))

    def offloads(self, kind: Offload) -> bool:
        """Whether parameters, optimizer or activations of the stage wait in host memory while not used."""
        return self.offload is not None and kind in self.offload

    @property
    def ministage_sizes(self) -> tuple[int, ...]:
        """Number of layers of each ministage, as even as possible, the larger ones first."""
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
        """Number of ministages of each of its stages; ``None``: stages run whole."""
        return self.stages[0].ministages

    def ministage_layers(self, stage: int) -> tuple[Range, ...]:
        """Return the layers of each ministage of a stage; of a stage that runs whole, all its layers."""
        turns = zip(*(turn.ministage_sizes for turn in self.stages), strict=True)
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
    """A plan, as the planner writes it and the runtime reads it.

    Args:
        workload: the model and the sequence that it was made for.
        replicas: the ranks' tasks.
        exchange: how keys and values travel, in stages without an exchange of their own.
        job: settings that the job must have.
        gpus: the GPU on which each rank must be started, numbered in the order of the cluster file; else
            all, in that order. The runtime cannot check it.
        rates: rates of its units, for ``--hexi-batch-shares``.
        estimate: the planner's prediction.
        provenance: where the plan comes from.
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

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @property
    def members(self) -> tuple[Member, ...]:
        """All members in the order of their ranks."""
        stages = (stage for replica in self.replicas for stage in replica.stages)
        return tuple(sorted((m for stage in stages for m in stage.members), key=lambda m: m.lead))

    @property
    def units(self) -> int:
        """Number of members over all replicas and stages."""
        stages = (stage for replica in self.replicas for stage in replica.stages)
        return sum(len(group.members) for stage in stages for d in stage.domains for group in d.groups)

    @property
    def ranks(self) -> int:
        """Number of ranks of the job, or of one pipeline stage where the job repeats it."""
        return sum(len(member.ranks) for member in self.members)

    @property
    def has_ministages(self) -> bool:
        """Whether any stage runs in ministages."""
        return any(stage.ministages is not None for replica in self.replicas for stage in replica.stages)

    @property
    def takes_micro_batches(self) -> bool:
        """Whether domains of any stage take whole micro-batches."""
        return any(stage.takes_micro_batches for replica in self.replicas for stage in replica.stages)

    @property
    def has_offload(self) -> bool:
        """Whether any stage offloads to host memory."""
        return any(stage.offload is not None for replica in self.replicas for stage in replica.stages)

    @property
    def is_repeated(self) -> bool:
        """Whether the job's pipeline repeats the only stage of each replica."""
        return all(stage.layers is None for replica in self.replicas for stage in replica.stages)

    def workload_of(self, domain: Domain) -> Workload:
        """Return the workload with the tensor-parallel size of a domain's units."""
        return replace(self.workload, tensor_parallel=len(domain.members[0].ranks))
