"""Messages and work between the two all-to-alls of a layer, by the kind of its mixer.

Shape letters: U units, T tokens, h query and k KV heads of a unit, D size of a query and key, V of a value, B
micro-batch, e bytes an element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.compute import expansion_times, own_block_times
from megatron_hexi.cost.documents import packed_in
from megatron_hexi.cost.exchange import Chunk, exchange_chunks
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.scan import scan_times, state_shares
from megatron_hexi.cost.windows import document_window, own_pairs
from megatron_hexi.kinds import ShortConv, State
from megatron_hexi.kinds.attention import SoftmaxAttention
from megatron_hexi.kinds.part import LayerPart
from megatron_hexi.models.job import Job

if TYPE_CHECKING:
    from megatron_hexi.cost.layer import UnitGpus


class AllToAll(NamedTuple):
    """One of the all-to-alls of a layer, in the order in which the runtime starts them.

    Args:
        way: the pass, ``forward`` or ``backward``.
        inward: whether it turns tokens of all heads into heads of all tokens (before attention), or back.
        half: 0, or 1 for the second half of the heads.
        size: bytes of the message of each pair of `Mixing.pairs` (i holds tokens, j computes heads), [pairs];
            inward it goes from i to j, else from j to i.
    """

    way: Literal["forward", "backward"]
    inward: bool
    half: int
    size: Floats


class Mixing:
    """The messages and work between a layer's all-to-alls; for a layer of an MLP alone, which has none.

    Args:
        plan: the units' tokens, heads and groups.
        job: the job, with layers of one kind.
    """

    #: Whether it is core attention, which selective recomputation computes again.
    is_attention = False

    def __init__(self, plan: PlanArrays, job: Job) -> None:
        self._plan, self._job = plan, job

    @property
    def pairs(self) -> tuple[Ints, Ints]:
        """Units i and j of all messages of `all_to_alls`, of which i holds tokens, [pairs] each."""
        return self._plan.all_to_all_pairs

    @property
    def first_share(self) -> Floats:
        """Part of each unit's heads that come first, [U]."""
        return np.ones(len(self._plan.tokens))

    @property
    def in_halves(self) -> bool:
        """Whether all-to-alls travel in halves of the heads."""
        return False

    def all_to_alls(self) -> list[AllToAll]:
        """Return the all-to-alls with the bytes of their messages; backward both ways carry gradients."""
        inward, outward = self.columns()
        return [
            AllToAll("forward", True, 0, inward),
            AllToAll("forward", False, 0, outward),
            AllToAll("backward", True, 0, outward),
            AllToAll("backward", False, 0, inward),
        ]

    def columns(self) -> tuple[Floats, Floats]:
        """Return the bytes that go inward and the bytes that go outward, for each of `pairs`."""
        nothing = np.zeros(len(self.pairs[0]))
        return nothing, nothing

    def chunks(self) -> Iterable[Chunk]:
        """Return the steps of the exchange between groups."""
        return ()

    def own_times(self, stage: UnitGpus) -> Floats:
        """Return the seconds of a unit's work on its own group's tokens, forward and backward, [2, U]."""
        return np.zeros((2, len(self._plan.tokens)))


class _Convolution(Mixing):
    """A short convolution, whose taps are token work: a rank receives the rows before its own."""

    @property
    def pairs(self) -> tuple[Ints, Ints]:
        """Senders and receivers of halo rows: units with tokens, and the next one of each in its domain.

        The last unit's next one is the first: in the nested layout nearly all units read rows of another.
        """
        plan = self._plan
        units = plan.slots[plan.tokens[plan.slots] > 0]
        domain = plan.unit_replica[units]
        is_last = np.append(domain[:-1] != domain[1:], True)
        following = np.where(is_last, units[np.searchsorted(domain, domain)], np.roll(units, -1))
        return units[units != following], following[units != following]

    def columns(self) -> tuple[Floats, Floats]:
        """Return the bytes of halo rows, which go inward, for each of `pairs`; nothing goes outward."""
        job, (nothing, _) = self._job, super().columns()
        rows = job.model.mixer.halo_elements(job.model, job.tensor_parallel) * job.micro_batch_size
        return nothing + rows * job.element_bytes, nothing


class _Scan(Mixing):
    """The scan of heads with a state, behind which no all-to-all hides."""

    def columns(self) -> tuple[Floats, Floats]:
        """Return the bytes for each of `pairs`: inward columns of heads and their groups, outward outputs."""
        job, (state,), (holder, taker) = self._job, self._job.model.scans, self.pairs
        heads, groups = state_shares(self._plan, job)
        unit = self._plan.tokens[holder].astype(float) * (job.micro_batch_size * job.element_bytes)
        inward = heads * state.head_columns + groups * state.group_columns
        return unit * inward[taker], unit * (heads * state.head_dim)[taker]

    def own_times(self, stage: UnitGpus) -> Floats:
        """Return the seconds of the scans of a unit's heads."""
        found, tokens = super().own_times(stage), self._plan.group_tokens[self._plan.group].astype(float)
        shares = state_shares(self._plan, self._job)
        for speeds, units in stage.by_kind:
            heads, groups = (held[units].astype(float) for held in shares)
            head, group = scan_times(speeds, self._job, tokens[units])
            found[:, units] = heads * np.array(head) + groups * np.array(group)
        return found


class _Attention(Mixing):
    """Core attention: the block of the own group, and the exchange of keys and values with other groups."""

    is_attention = True

    @property
    def first_share(self) -> Floats:
        """Part of each unit's heads that come first, [U]."""
        return self._plan.heads_first / np.maximum(self._plan.heads, 1)

    @property
    def in_halves(self) -> bool:
        """Whether all-to-alls travel in halves of the heads."""
        return self._plan.in_halves

    def all_to_alls(self) -> list[AllToAll]:
        """Return the all-to-alls of tokens and heads.

        forward in:    T_i (h_j D + k_j (D + V)) B e    query, key and value
        forward out:   T_i h_j V B e                    output
        backward in:   T_i h_j V B e                    its gradient
        backward out:  T_i (h_j D + k_j (D + V)) B e    three gradients

        Where latent columns travel, they are one KV head of C + R in place of D + V. Where all-to-alls are
        cut into halves, each carries half of the query heads. Keys and values travel with the first half,
        their gradients with the last.
        """
        plan, job, (holder, taker) = self._plan, self._job, self.pairs
        tokens = plan.tokens[holder].astype(float) * (job.micro_batch_size * job.element_bytes)
        keys = tokens * job.exchanged_columns * plan.kv[taker]
        halves = [plan.heads_first, plan.heads - plan.heads_first] if plan.in_halves else [plan.heads]
        queries = [tokens * job.model.head_dim * half[taker] for half in halves]
        outputs = [tokens * job.model.value_dim * half[taker] for half in halves]
        ways: list[tuple[Literal["forward", "backward"], bool, int | None]]
        ways = [("forward", True, 0), ("forward", False, None), ("backward", True, None)]
        ways.append(("backward", False, len(halves) - 1))
        return [
            AllToAll(way, inward, half, size + keys if half == with_keys else size)
            for way, inward, with_keys in ways
            for half, size in enumerate(outputs if with_keys is None else queries)
        ]

    def chunks(self) -> Iterable[Chunk]:
        """Return the steps of the exchange of keys and values."""
        job, size = self._job, self._job.model.span.size
        if size >= job.seq_length:
            return exchange_chunks(self._plan)
        return exchange_chunks(self._plan, size, tuple(packed_in(job, self._plan.group_tokens)))

    def own_times(self, stage: UnitGpus) -> Floats:
        """Return the seconds of the own group's block."""
        plan, job, found = self._plan, self._job, super().own_times(stage)
        tokens, size = plan.group_tokens[plan.group].astype(float), job.model.span.size
        pairs = None
        if size < job.seq_length:
            windows = [document_window(size, one.part) for one in packed_in(job, tokens)]
            pairs = np.stack([own_pairs(plan, window)[plan.group] for window in windows])
        for speeds, units in stage.by_kind:
            own = None if pairs is None else pairs[:, units]
            found[:, units] = own_block_times(speeds, job, tokens[units], plan.causal, own)
            if job.latent_exchange:
                found[:, units] += expansion_times(speeds, job, tokens[units])
        return found * plan.heads


_MIXINGS: Mapping[type[LayerPart], type[Mixing]] = {
    SoftmaxAttention: _Attention,
    State: _Scan,
    ShortConv: _Convolution,
    LayerPart: Mixing,
}


def mixing_of(plan: PlanArrays, job: Job) -> Mixing:
    """Return what stands between the all-to-alls of a job's layers, which are of one kind."""
    known = (_MIXINGS.get(kind) for kind in type(job.model.mixer).__mro__)
    return next(kind for kind in known if kind is not None)(plan, job)
