"""Split tables: everything that a rank must know of a domain to compute its attention.

They are derived once, from the plan alone, and kept with the object that uses them. Because every rank
derives its own from the same plan, both ends of each transfer agree on its size without asking.

The exchange goes round the groups: in step s a rank of group g uses the keys of group g - s and serves
the ranks of group g + s. Inside a step a key travels straight from one owner to each user; the heads
that the same two ranks share are one message (the part of a sub-ring between them). Only the own group's
block can hide the keys of the first step, so these may travel in several parts, by heads: each part is
computed while the next ones are still under way.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

from megatron_hexi.plan.batch_balance import balanced_domain
from megatron_hexi.plan.blocks import Block, Call, Visible, exchange_blocks, own_blocks, together
from megatron_hexi.plan.heads import (
    HeadSpan,
    head_parts,
    head_spans,
    heads_first,
    kv_pieces,
    kv_range,
    overlap,
    spans_in_two,
)
from megatron_hexi.plan.layout import shard_segments
from megatron_hexi.plan.mask import Mask
from megatron_hexi.plan.model import Domain, Group, Range, Workload
from megatron_hexi.plan.packing import packed_domain
from megatron_hexi.plan.program import Batch, FarBlocks, Operation, OwnBlock, attention_program
from megatron_hexi.plan.terms import UnitRates


@dataclass(frozen=True)
class Transfer:
    """A message of keys and values.

    Args:
        peer: the other rank, as an index into the domain's ranks.
        kv: KV heads that travel, counted over the layer.
        rows: tokens that travel, of the owner's group tokens, ascending.
    """

    peer: int
    kv: Range
    rows: tuple[Range, ...]

    @property
    def keys(self) -> int:
        """Number of tokens that travel."""
        return sum(stop - start for start, stop in self.rows)


@dataclass(frozen=True)
class Part:
    """Heads of a step of the exchange whose keys travel and are computed together.

    Args:
        number: its place among the parts of all steps; the same on every rank.
        heads: the rank's query heads in this part, counted from its first.
        pieces: these heads beside the KV heads they read, both counted from the part's first; in two pieces
            where the half whose outputs leave first ends within the part.
        receives: messages that the rank receives: the KV heads that these heads use, in order.
        sends: messages that it sends.
    """

    number: int
    heads: Range
    pieces: tuple[tuple[HeadSpan, ...], ...]
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]

    @property
    def kv(self) -> Range:
        """KV heads received, counted over the layer."""
        return (self.receives[0].kv[0], self.receives[-1].kv[1]) if self.receives else (0, 0)

    @property
    def keys(self) -> int:
        """Tokens received of each KV head."""
        return self.receives[0].keys if self.receives else 0


@dataclass(frozen=True)
class Step:
    """A step of the exchange on one rank.

    Args:
        parts: the parts in which keys travel; one in all steps but the first.
        blocks: the blocks that the heads of each part compute with the keys received.
    """

    parts: tuple[Part, ...]
    blocks: tuple[Block, ...]

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """The blocks, grouped into kernel calls."""
        return together(self.blocks)

    @property
    def receives(self) -> tuple[Transfer, ...]:
        """Messages that the rank receives, over all parts."""
        return tuple(transfer for part in self.parts for transfer in part.receives)

    @property
    def sends(self) -> tuple[Transfer, ...]:
        """Messages that it sends, over all parts."""
        return tuple(transfer for part in self.parts for transfer in part.sends)


@dataclass(frozen=True)
class Schedule:
    """Split tables of one rank for a layer.

    Args:
        index: the rank, as an index into the domain's ranks (its context-parallel rank).
        members: the ranks of its group, likewise, ascending.
        position: the rank's own position among them.
        segments: positions of the sequence that it holds outside attention.
        shards: tokens of each member of its group.
        heads: query heads of each member of its group.
        kv: KV heads of each member of its group.
        halves: query heads of each member that travel together in the all-to-alls: all of them, or in two.
        spans: its own query heads beside the KV heads they read, for the kernels.
        spans_in_two: the same heads in two parts, as the backward pass takes the block of its own group.
        own: blocks of its own group's keys that cover every query exactly once.
        own_beside: further blocks of its own group's keys that a window needs.
        steps: the exchange with the other groups.
    """

    index: int
    members: tuple[int, ...]
    position: int
    segments: tuple[Range, ...]
    shards: tuple[int, ...]
    heads: tuple[Range, ...]
    kv: tuple[Range, ...]
    halves: tuple[tuple[Range, ...], ...]
    spans: tuple[HeadSpan, ...]
    spans_in_two: tuple[tuple[HeadSpan, ...], tuple[HeadSpan, ...]]
    own: tuple[Block, ...]
    own_beside: tuple[Block, ...]
    steps: tuple[Step, ...]

    @cached_property
    def own_calls(self) -> tuple[Call, ...]:
        """The blocks of `own`, grouped into kernel calls."""
        return together(self.own)

    @cached_property
    def own_beside_calls(self) -> tuple[Call, ...]:
        """The blocks of `own_beside`, grouped into kernel calls."""
        return together(self.own_beside)

    @property
    def tokens(self) -> int:
        """Tokens of its shard (T)."""
        return self.shards[self.position]

    @property
    def group_tokens(self) -> int:
        """Tokens of its group (G)."""
        return sum(self.shards)

    @property
    def own_heads(self) -> int:
        """Number of query heads that it computes (h)."""
        start, stop = self.heads[self.position]
        return stop - start

    @property
    def own_kv(self) -> Range:
        """KV heads that it holds in attention."""
        return self.kv[self.position]

    def program(self, backward: bool, window: int) -> tuple[Operation, ...]:
        """Return the rank's operations in a pass.

        Args:
            backward: whether it is the backward pass.
            window: exchange steps under way ahead of the one in use.
        """
        parts, turn = tuple(len(step.parts) for step in self.steps), 0
        if self.steps:
            middle = self.halves[0][self.position][1] - self.heads[self.position][0]
            turn = next(n for n, part in enumerate(self.steps[-1].parts) if part.heads[1] >= middle)
        return attention_program(backward, parts, window, len(self.halves), turn)

    def part(self, of: Batch | FarBlocks) -> Part:
        """Return the part of the exchange that a batch carries or a computation uses."""
        return self.steps[of.step].parts[of.part]

    def own_spans(self, block: OwnBlock) -> tuple[HeadSpan, ...]:
        """Return the heads for which a block of the own group is computed."""
        return self.spans if block == OwnBlock(0, 2) else self.spans_in_two[block.first]


def build_schedule(
    workload: Workload,
    domain: Domain,
    index: int,
    parts: int,
    mask: Mask | None = None,
    rates: UnitRates | None = None,
) -> Schedule:
    """Return the split tables of a rank, for a plan that passed its checks.

    Args:
        workload: the plan's workload.
        domain: a domain of the plan.
        index: the rank, as an index into the domain's ranks.
        parts: in how many parts the first step of the exchange travels at most; more than one also cuts the
            all-to-alls in two.
        mask: the keys that a query sees; ``None``: as the workload says. With documents the domain's groups
            hold other segments (`packed_domain`) of as many tokens.
        rates: rates of the plan's units, if documents are assigned by them: tokens and heads are then those
            of this batch (`balanced_domain`).
    """
    mask = Mask(causal=workload.causal) if mask is None else mask
    if mask.documents is not None:
        domain = (
            packed_domain(domain, mask.documents)
            if rates is None
            else balanced_domain(domain, mask.documents, rates)
        )
    seq_length = workload.seq_length
    ratio = workload.queries_per_kv
    members = domain.members
    rank = members[index].lead
    number = next(n for n, group in enumerate(domain.groups) if any(m.lead == rank for m in group.members))
    group = domain.groups[number]
    indices = {member.lead: i for i, member in enumerate(members)}
    position = next(i for i, member in enumerate(group.members) if member.lead == rank)
    heads = group.members[position].heads
    groups = len(domain.groups)
    halves = _halves(group, ratio, parts)
    middle = halves[0][position][1]
    steps = []
    for distance in range(1, groups):
        source = domain.groups[(number - distance) % groups]
        target = domain.groups[(number + distance) % groups]
        visible = exchange_blocks(group, source, mask, seq_length)
        visible_to_target = exchange_blocks(target, group, mask, seq_length)
        most = parts if distance == 1 else 1
        own_parts = head_parts(heads, ratio, most)
        user_parts = [(user, head_parts(user.heads, ratio, most)) for user in target.members]
        step = []
        for place in range(max(len(own_parts), *(len(ranges) for _, ranges in user_parts))):
            sends = [
                Transfer(indices[user.lead], transfer.kv, transfer.rows)
                for user, ranges in user_parts
                if place < len(ranges)
                for transfer in _incoming(ranges[place], visible_to_target, group, indices, ratio)
                if transfer.peer == index
            ]
            mine = own_parts[place] if place < len(own_parts) else (heads[1], heads[1])
            cuts = [mine[0], middle, mine[1]] if mine[0] < middle < mine[1] else mine
            step.append(
                Part(
                    number=place if distance == 1 else parts + distance - 2,
                    heads=(mine[0] - heads[0], mine[1] - heads[0]),
                    pieces=tuple(
                        head_spans(piece, ratio, origin=mine[0]) for piece in itertools.pairwise(cuts)
                    ),
                    receives=_incoming(mine, visible, source, indices, ratio),
                    sends=tuple(sends),
                )
            )
        steps.append(Step(tuple(step), visible.blocks if heads[0] < heads[1] else ()))
    own_first, own_beside = own_blocks(group, mask, seq_length) if group.tokens else ((), ())
    return Schedule(
        index=index,
        members=tuple(indices[member.lead] for member in group.members),
        position=position,
        segments=shard_segments(group, position),
        shards=tuple(member.tokens for member in group.members),
        heads=tuple(member.heads for member in group.members),
        kv=tuple(kv_range(member.heads, ratio) for member in group.members),
        halves=halves,
        spans=head_spans(heads, ratio),
        spans_in_two=spans_in_two(heads, ratio),
        own=own_first,
        own_beside=own_beside,
        steps=tuple(steps),
    )


#: Number of cached split tables: a pipeline's micro-batches under way, with a few windows each.
_KEPT = 32


class Schedules:
    """Split tables of one rank for every mask: derived on demand, the latest cached.

    Args:
        workload: the plan's workload.
        domain: a domain of the plan.
        index: the rank, as an index into the domain's ranks.
        parts: in how many parts the first step of the exchange travels at most.
        rates: rates of the plan's units, if documents are assigned by them.
    """

    def __init__(
        self, workload: Workload, domain: Domain, index: int, parts: int, rates: UnitRates | None = None
    ) -> None:
        self._windows: set[int | None] = set()
        # Layers have few windows, but every sequence may have documents of its own.
        self._for = lru_cache(maxsize=_KEPT)(
            partial(build_schedule, workload, domain, index, parts, rates=rates)
        )

    def __call__(self, mask: Mask | None = None) -> Schedule:
        """Return the split tables for a mask; ``None``: without window and documents."""
        if mask is not None and mask.documents is not None:
            self._windows.add(mask.window)
        return self._for(mask)

    def prepare(self, documents: tuple[int, ...]) -> None:
        """Derive, in any thread, the split tables of these documents, for the windows used so far."""
        for window in tuple(self._windows) or (None,):
            schedule = self._for(Mask(window=window, documents=documents))
            for step in schedule.steps:
                _ = step.calls
            _ = schedule.own_calls, schedule.own_beside_calls


def _halves(group: Group, ratio: int, parts: int) -> tuple[tuple[Range, ...], ...]:
    """Return the query heads of each member in each all-to-all."""
    whole = tuple(member.heads for member in group.members)
    if parts == 1 or len(whole) == 1 or not group.tokens:
        return (whole,)
    middles = [start + heads_first((start, stop), ratio) for start, stop in whole]
    return (
        tuple((heads[0], middle) for heads, middle in zip(whole, middles, strict=True)),
        tuple((middle, heads[1]) for heads, middle in zip(whole, middles, strict=True)),
    )


@lru_cache(maxsize=2**14)
def kv_owners(heads: Range, owners: tuple[Range, ...], ratio: int) -> tuple[tuple[int, Range], ...]:
    """Return the members of a group that serve the KV heads of a user.

    Cached: every rank of a domain asks the same of every group.

    Args:
        heads: the user's query heads.
        owners: query heads of each member that may serve.
        ratio: query heads that share one KV head.

    Returns:
        The position of an owner and the KV heads that it serves, in the order of the heads.
    """
    served: list[tuple[int, Range]] = []
    for queries in kv_pieces(heads, ratio):
        # A KV head held by several members comes from the one that shares the most of the user's query
        # heads of it: where both sides are cut alike, each owner then serves its own counterpart.
        owner = max(range(len(owners)), key=lambda position: overlap(owners[position], queries))
        kv = queries[0] // ratio
        start = served.pop()[1][0] if served and served[-1][0] == owner else kv
        served.append((owner, (start, kv + 1)))
    return tuple(served)


def _incoming(
    heads: Range, visible: Visible, source: Group, indices: dict[int, int], ratio: int
) -> tuple[Transfer, ...]:
    """Return the messages that a rank receives from the members of `source` for some query heads."""
    if not visible.blocks:
        return ()
    return tuple(
        Transfer(indices[source.members[position].lead], kv, visible.rows)
        for position, kv in kv_owners(heads, tuple(member.heads for member in source.members), ratio)
    )
