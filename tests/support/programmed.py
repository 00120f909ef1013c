"""What ranks post in one layer of attention by the program and the split tables, without the runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_hexi.plan import Mask, Plan, Schedule, Schedules, Transfer, Workload
from megatron_hexi.plan.model import Range
from megatron_hexi.plan.program import Batch, Post
from megatron_hexi.plan.traffic import exchanges_heads
from tests.support.nccl_rules import Call, Posted


def programmed(plan: Plan, mask: Mask, dtype: str) -> list[list[Call]]:
    """One layer forward and backward, of each rank: batches of messages and all-to-alls."""
    calls: dict[int, list[Call]] = {}
    for replica in plan.replicas:
        members = replica.domain.members
        for index, member in enumerate(members):
            schedule = Schedules(plan.workload, replica.domain, index, plan.exchange.parts)(mask)
            for lane, rank in enumerate(member.ranks):
                domain = [other.ranks[lane] for other in members]
                one = _Rank(plan.workload, schedule, domain, dtype)
                calls[rank] = list(one.calls(plan.exchange.window))
    return [calls[rank] for rank in range(plan.ranks)]


class _Rank:
    def __init__(self, workload: Workload, schedule: Schedule, domain: Sequence[int], dtype: str) -> None:
        self._key, self._value = workload.head_dim, workload.value_size
        self._schedule, self._domain, self._dtype = schedule, domain, dtype
        self._group = [domain[member] for member in schedule.members]

    def calls(self, window: int) -> Iterator[Call]:
        if not self._schedule.group_tokens:
            return
        for backward in (False, True):
            for operation in self._schedule.program(backward, window):
                if isinstance(operation, Post):
                    yield from self._posted(operation.batch, backward)

    def _posted(self, batch: Batch, backward: bool) -> Iterator[Call]:
        schedule = self._schedule
        if batch.cargo in ("in", "out"):
            if exchanges_heads(schedule):
                yield self._all_to_all(batch, backward)
            return
        part, is_home = schedule.part(batch), batch.cargo == "gradients"
        ways = (part.sends, part.receives) if is_home else (part.receives, part.sends)
        messages = tuple(
            Posted(kind, self._domain[one.peer], self._elements(one), self._dtype, 2 * part.number + is_home)
            for kind, transfers in zip(("receive", "send"), ways, strict=True)
            for one in transfers
        )
        if messages:
            yield Call(f"domain of rank {min(self._domain)}", tuple(self._domain), messages)

    def _elements(self, transfer: Transfer) -> int:
        return _size(transfer.kv) * transfer.keys * (self._key + self._value)

    def _all_to_all(self, batch: Batch, backward: bool) -> Call:
        schedule, half, inward = self._schedule, batch.step, batch.cargo == "in"
        # Forward queries come in and outputs leave, backward outputs' gradients come in and queries' leave.
        width = self._key if inward != backward else self._value
        has_keys = inward != backward and half == (len(schedule.halves) - 1 if backward else 0)
        kv_width = (self._key + self._value) * has_keys
        columns = [
            _size(heads) * width + _size(kv) * kv_width
            for heads, kv in zip(schedule.halves[half], schedule.kv, strict=True)
        ]
        own = columns[schedule.position]
        by_heads = tuple(schedule.tokens * column for column in columns)
        by_tokens = tuple(tokens * own for tokens in schedule.shards)
        sizes = (by_heads, by_tokens) if inward else (by_tokens, by_heads)
        name = f"a2a of rank {min(self._group)}"
        return Call(name, tuple(self._group), (), "alltoall_base_", self._dtype, *sizes)


def _size(heads: Range) -> int:
    return heads[1] - heads[0]
