"""Split tables: the sizes, peers, rows and heads of every message and block that a rank needs for attention.

Split tables are derived from the plan alone and kept with the object that uses them. Every rank derives its
tables from the same plan, so sender and receiver agree on the size of each message without asking.

The exchange goes round the groups: in step s the ranks of group g use the keys of group g - s and send keys
to the ranks of group g + s. Within a step the owner of a key sends it directly to each user; all heads that
one rank sends to another are one message. The keys of the first step are hidden only by the own group's
block. They may therefore be sent in several parts, by heads: each part is computed while the next parts are
in flight.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

from megatron_hexi.plan.batch_balance import batch_domain
from megatron_hexi.plan.blocks import Block, Call, Mask, Visible, exchange_blocks, own_blocks, together
from megatron_hexi.plan.halo import Halo, halo
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
from megatron_hexi.plan.layout import held_positions, shard_segments
from megatron_hexi.plan.model import Domain, Group, Range
from megatron_hexi.plan.program import Batch, FarBlocks, Operation, OwnBlock, attention_program
from megatron_hexi.plan.terms import UnitRates
from megatron_hexi.plan.workload import Workload


@dataclass(frozen=True)
class Transfer:
    """A message of keys and values between two ranks.

    Args:
        kv: range of KV heads in the message, counted over the layer.
        rows: tokens in the message, as ranges of indices into the tokens of the owner's group, ascending.
    """

    peer: int
    kv: Range
    rows: tuple[Range, ...]

    @property
    def keys(self) -> int:
        """Number of tokens in the message."""
        return sum(stop - start for start, stop in self.rows)


@dataclass(frozen=True)
class Part:
    """A part of an exchange step: query heads that receive their keys and compute their blocks together.

    Args:
        number: number of the part among the parts of all steps; the same on every rank.
        heads: the part's range of query heads, counted from the rank's first query head.
        pieces: the part's query heads with the KV heads that they read, counted from the part's first heads;
            two pieces if the half of the heads whose output is sent first ends within the part.
        receives: messages that the rank receives: the KV heads that the part's query heads read, in order.
    """

    number: int
    heads: Range
    pieces: tuple[tuple[HeadSpan, ...], ...]
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]

    @property
    def kv(self) -> Range:
        """Range of KV heads that the rank receives in this part, counted over the layer."""
        return (self.receives[0].kv[0], self.receives[-1].kv[1]) if self.receives else (0, 0)

    @property
    def keys(self) -> int:
        """Number of tokens that the rank receives in this part for each KV head."""
        return self.receives[0].keys if self.receives else 0


@dataclass(frozen=True)
class ExchangeStep:
    """One step of the exchange of keys and values between groups, on one rank.

    Args:
        parts: parts in which the keys are sent; a single part in all steps but the first.
    """

    parts: tuple[Part, ...]
    blocks: tuple[Block, ...]

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """The step's blocks, combined into kernel calls."""
        return together(self.blocks)

    @property
    def receives(self) -> tuple[Transfer, ...]:
        """Messages that the rank receives in all parts of the step."""
        return tuple(transfer for part in self.parts for transfer in part.receives)

    @property
    def sends(self) -> tuple[Transfer, ...]:
        """Messages that the rank sends in all parts of the step."""
        return tuple(transfer for part in self.parts for transfer in part.sends)


@dataclass(frozen=True)
class Schedule:
    """Split tables of one rank for one attention layer.

    Args:
        index: the rank, as an index into the domain's ranks (the context-parallel rank).
        members: ranks of the rank's group, as indices into the domain's ranks, ascending.
        position: index of the rank in `members`.
        segments: positions of the sequence that the rank holds outside attention.
        halves: for each all-to-all in one direction, one or two, the query heads of each member that it
            carries.
        spans: the rank's query heads with the KV heads that they read, for the kernels.
        spans_in_two: the spans of each half of the rank's query heads; the backward pass computes the own
            group's block in these halves.
        own: blocks of the own group's keys that contain every query exactly once.
        own_beside: further blocks of the own group's keys, which a sliding window needs.
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
    steps: tuple[ExchangeStep, ...]

    @cached_property
    def own_calls(self) -> tuple[Call, ...]:
        """The blocks of `own`, combined into kernel calls."""
        return together(self.own)

    @cached_property
    def own_beside_calls(self) -> tuple[Call, ...]:
        """The blocks of `own_beside`, combined into kernel calls."""
        return together(self.own_beside)

    @property
    def tokens(self) -> int:
        """Number of tokens of the rank's shard (T)."""
        return self.shards[self.position]

    @property
    def group_tokens(self) -> int:
        """Number of tokens of the rank's group (G)."""
        return sum(self.shards)

    @property
    def own_heads(self) -> int:
        """Number of query heads that the rank computes (h)."""
        start, stop = self.heads[self.position]
        return stop - start

    @property
    def own_kv(self) -> Range:
        """Range of KV heads that the rank holds in attention."""
        return self.kv[self.position]

    def program(self, backward: bool, window: int) -> tuple[Operation, ...]:
        """Return the rank's operations in the forward or backward pass of attention, in order.

        Args:
            window: number of exchange steps in flight ahead of the step in use.
        """
        parts, turn = tuple(len(step.parts) for step in self.steps), 0
        if self.steps:
            middle = self.halves[0][self.position][1] - self.heads[self.position][0]
            turn = next(n for n, part in enumerate(self.steps[-1].parts) if part.heads[1] >= middle)
        return attention_program(backward, parts, window, len(self.halves), turn)

    def part(self, of: Batch | FarBlocks) -> Part:
        """Return the part of the exchange to which a batch of messages or a computation belongs."""
        return self.steps[of.step].parts[of.part]

    def own_spans(self, block: OwnBlock) -> tuple[HeadSpan, ...]:
        """Return the spans of the heads for which an operation computes the own group's block."""
        return self.spans if block == OwnBlock(0, 2) else self.spans_in_two[block.first]


def build_schedule(
    workload: Workload,
    domain: Domain,
    index: int,
    parts: int,
    mask: Mask | None = None,
    rates: UnitRates | None = None,
) -> Schedule:
    """Return the split tables of one rank, for a plan that passed its checks.

    Args:
        parts: largest number of parts in which the keys of the first exchange step are sent; more than one
            also splits the all-to-alls in two.
        mask: the attention mask; ``None``: the workload's mask. With documents, see `batch_domain`.
        rates: rates of the domain's units, if each batch is balanced by them.
    """
    mask = Mask(causal=workload.causal) if mask is None else mask
    domain = batch_domain(domain, mask.documents, rates)
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
        steps.append(ExchangeStep(tuple(step), visible.blocks if heads[0] < heads[1] else ()))
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


#: Number of cached split tables: enough for the micro-batches in flight, with a few windows each.
_KEPT = 32


class Schedules:
    """Cache of one rank's split tables, which are derived for each attention mask on demand."""

    def __init__(
        self, workload: Workload, domain: Domain, index: int, parts: int, rates: UnitRates | None = None
    ) -> None:
        self._windows: set[int | None] = set()
        # Layers have few windows, but every sequence may have documents of its own.
        self._for = lru_cache(maxsize=_KEPT)(
            partial(build_schedule, workload, domain, index, parts, rates=rates)
        )
        self._halo = lru_cache(maxsize=_KEPT)(partial(_halo, workload.seq_length, domain, index, rates))

    def __call__(self, mask: Mask | None = None) -> Schedule:
        """Return the split tables for a mask; ``None``: the workload's mask, without window and documents."""
        if mask is not None and mask.documents is not None:
            self._windows.add(mask.window)
        return self._for(mask)

    def halo(self, reach: int, documents: tuple[int, ...] | None = None) -> Halo:
        """Return the exchange of a causal convolution's halo, by which a row reads `reach` rows before it."""
        return self._halo(Mask(documents=documents), reach)

    def prepare(self, documents: tuple[int, ...]) -> None:
        """Derive and cache the split tables of documents, for all windows used so far; thread-safe."""
        for window in tuple(self._windows) or (None,):
            schedule = self._for(Mask(window=window, documents=documents))
            for step in schedule.steps:
                _ = step.calls
            _ = schedule.own_calls, schedule.own_beside_calls


def _halo(
    seq_length: int, domain: Domain, index: int, rates: UnitRates | None, mask: Mask, reach: int
) -> Halo:
    domain = batch_domain(domain, mask.documents, rates)
    return halo(held_positions(domain), index, mask.ranges(seq_length), reach)


def _halves(group: Group, ratio: int, parts: int) -> tuple[tuple[Range, ...], ...]:
    """Return, for each all-to-all, the range of query heads of each member that it carries."""
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
    """Return the members of a group that send KV heads to a user, a rank of another group.

    Cached, because the ranks of a domain ask the same of every group.

    Returns:
        Pairs of a member's position in its group and the range of KV heads that this member sends, in the
        order of the heads.
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
    """Return the messages that bring a rank the keys of `source` for the given query heads."""
    if not visible.blocks:
        return ()
    return tuple(
        Transfer(indices[source.members[position].lead], kv, visible.rows)
        for position, kv in kv_owners(heads, tuple(member.heads for member in source.members), ratio)
    )
