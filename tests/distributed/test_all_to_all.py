"""What travels: every element to its place, as many bytes as planned, no further ahead than the window."""

import contextlib
import threading
from collections.abc import Sequence
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_hexi.plan import (
    Traffic,
    Workload,
    attention_traffic,
    build_schedule,
    proportional_plan,
)
from megatron_hexi.plan.program import Batch, OwnBlock, Post, Wait
from megatron_hexi.runtime import exchange
from megatron_hexi.runtime import wire as wire_room
from megatron_hexi.runtime.all_to_all import Arriving, Leaving, arrive
from megatron_hexi.runtime.call_rows import Rows
from megatron_hexi.runtime.compiled import Recorder, Value
from megatron_hexi.runtime.exchange import KVExchange
from megatron_hexi.runtime.sums import RowSum
from megatron_hexi.runtime.wire import Transfers
from tests.support.compiled import carried_out
from tests.support.plans import SPARSE, TORN, examples, plans, workloads
from tests.support.reference import positions_of
from tests.support.threads import run_ranks


def ids(positions, batch, heads, width):
    """[tokens, B, heads, D] where every element of a sequence has a number of its own, from 1."""
    shape = torch.tensor([batch, len(heads), width])
    numbers = torch.arange(int(shape.prod())).view(1, batch, len(heads), width)
    total = 1000 * batch * width
    places = torch.tensor(positions, dtype=torch.int64).view(-1, 1, 1, 1) * total
    offset = torch.tensor(list(heads), dtype=torch.int64).view(1, 1, -1, 1) * batch * width
    within = torch.arange(batch).view(1, -1, 1, 1) * width + torch.arange(width)
    assert numbers.shape[2] < 1000
    return (1 + places + offset + within).double()


def schedules_of(plan):
    domain = plan.replicas[0].domain
    return [
        build_schedule(plan.workload, domain, index, plan.exchange.parts)
        for index in range(len(domain.members))
    ]


def to_heads(parts, tables, schedule, group):
    """Own heads [G, B, h, D] of all the group's tokens."""

    def build(recorder, *values):
        return Arriving(recorder, values, tables, schedule, group).wait()

    return [part.permute(2, 0, 1, 3) for part in carried_out(build, *parts)]


def sent_home(halves, schedule, group, padding=0):
    """Halves of tensors [G, B, h, D] and their tables, back to the tokens' layout."""
    counts = [len(parts) for parts, _ in halves]

    def build(recorder, *values):
        left, leaving = iter(values), []
        home: Sequence[Value] = ()
        for count, (_, tables) in zip(counts, halves, strict=True):
            sums = []
            for value in (next(left) for _ in range(count)):
                sums.append(RowSum(recorder, value.shape))
                sums[-1].add((0, value.shape[1]), Rows((0, value.shape[2])), value)
            leaving.append(Leaving(recorder, sums, tables, schedule, group))
        for half in range(len(halves)):
            home = arrive(recorder, leaving, half, padding, home)
        return home

    return carried_out(build, *(part.permute(1, 2, 0, 3) for parts, _ in halves for part in parts))


def positions_of_group(schedules, index):
    return sorted(
        position
        for member in schedules[index].members
        for position in positions_of(schedules[member].segments)
    )


@given(plan=plans(), batch=st.integers(1, 3))
@example(plan=TORN, batch=2)
@example(plan=SPARSE, batch=1)
@examples(50)
def test_every_element_gets_to_its_place_and_back(plan, batch):
    workload, schedules = plan.workload, schedules_of(plan)
    query_heads, kv_heads = range(workload.local_heads), range(workload.local_kv_heads)
    widths = (3, 1, 2)

    def work(rank):
        own = schedules[rank.rank]
        way = own, rank.attention(plan).a2a_group
        mine = positions_of(own.segments)
        parts = [
            ids(mine, batch, heads, width)
            for heads, width in zip((query_heads, kv_heads, kv_heads), widths, strict=True)
        ]
        tables = [own.heads, own.kv, own.kv]
        inside = to_heads(parts, tables, *way)
        back = sent_home([(inside, tables)], *way)
        padded = sent_home([(inside, tables)], *way, padding=3)
        for part, long in zip(back, padded, strict=True):
            assert torch.equal(torch.cat([part, part.new_zeros(3, *part.shape[1:])]), long)
        # Halves of the queries are the same, in two all-to-alls.
        arrived = [to_heads(parts[:1], [half], *way) for half in own.halves]
        assert torch.equal(torch.cat([some[0] for some in arrived], dim=2), inside[0])
        halves = [(some, [half]) for some, half in zip(arrived, own.halves, strict=True)]
        assert torch.equal(sent_home(halves, *way)[0], back[0])
        return parts, inside, back

    for schedule, (parts, inside, back) in zip(schedules, run_ranks(len(schedules), work), strict=True):
        group = positions_of_group(schedules, schedule.index)
        if not group:
            continue
        own_heads = [range(*schedule.heads[schedule.position]), *[range(*schedule.own_kv)] * 2]
        for part, heads, width in zip(inside, own_heads, widths, strict=True):
            assert torch.equal(part, ids(group, batch, heads, width))
        holders = torch.tensor([sum(kv[0] <= head < kv[1] for kv in schedule.kv) for head in kv_heads])
        assert torch.equal(back[0], parts[0])
        for came_back, sent in zip(back[1:], parts[1:], strict=True):
            assert torch.equal(came_back, sent * holders.view(1, 1, -1, 1)), "each holder's part is added up"


def test_parts_of_a_shared_kv_head_are_added_up_in_fp32():
    """256 and seven times 1 are 256 if each step is rounded to bf16, and 264 if the sum is."""
    plan = proportional_plan(Workload(8, 8, 1, 2), [[[1] * 8]])

    def work(rank):
        attention = rank.attention(plan)
        query = torch.zeros(8, 1, 1, 2, dtype=torch.bfloat16)
        part = torch.full_like(query, 256 if rank.rank == 0 else 1)
        own = attention.schedules()
        tables = own.heads, own.kv, own.kv
        return sent_home([([query, part, part], tables)], own, attention.a2a_group)[1]

    for summed in run_ranks(8, work):
        assert torch.equal(summed, torch.full_like(summed, 264))


class Wire:
    """Counts what each thread hands to torch.distributed."""

    def __init__(self):
        self._counts = threading.local()
        self._real = (dist.all_to_all_single, dist.batch_isend_irecv)

    def start(self, position):
        self._counts.position = position
        self._counts.all_to_alls = self._counts.all_to_all_bytes = 0
        self._counts.messages = self._counts.message_bytes = 0

    def traffic(self):
        counts = self._counts
        return Traffic(counts.all_to_alls, counts.all_to_all_bytes, counts.messages, counts.message_bytes)

    def all_to_all_single(self, output, sent, output_sizes, sizes, group, async_op):
        others = sum(size for i, size in enumerate(sizes) if i != self._counts.position)
        self._counts.all_to_alls += 1
        self._counts.all_to_all_bytes += others * sent.element_size()
        return self._real[0](output, sent, output_sizes, sizes, group=group, async_op=async_op)

    def batch_isend_irecv(self, operations):
        sends = [operation.tensor for operation in operations if operation.op is dist.isend]
        self._counts.messages += len(sends)
        self._counts.message_bytes += sum(tensor.numel() * tensor.element_size() for tensor in sends)
        return self._real[1](operations)

    @contextlib.contextmanager
    def counted(self):
        with (
            mock.patch.object(dist, "all_to_all_single", self.all_to_all_single),
            mock.patch.object(dist, "batch_isend_irecv", self.batch_isend_irecv),
        ):
            yield


@given(
    plan=plans(workloads(value_dims=(None, 2, 9))),
    batch=st.integers(1, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float64]),
)
@example(plan=TORN, batch=2, dtype=torch.float32)
@example(plan=SPARSE, batch=1, dtype=torch.float32)
@examples(25)
def test_collectives_messages_and_bytes_are_those_that_the_plan_says(plan, batch, dtype):
    workload = plan.workload

    def work(rank):
        attention = rank.attention(plan)
        schedule = attention.schedules()
        sizes = (
            (workload.local_heads, workload.head_dim),
            (workload.local_kv_heads, workload.head_dim),
            (workload.local_kv_heads, workload.value_size),
        )
        tensors = [
            torch.ones(schedule.tokens, batch, *size, dtype=dtype, requires_grad=True) for size in sizes
        ]
        wire.start(schedule.position)
        output = attention(*tensors)
        forward = wire.traffic()
        wire.start(schedule.position)
        output.backward(torch.ones_like(output))
        return forward, wire.traffic()

    wire = Wire()
    with wire.counted():
        counted = run_ranks(plan.units, work)
    size = (workload.head_dim, batch, dtype.itemsize, workload.value_dim)
    for schedule, (forward, backward) in zip(schedules_of(plan), counted, strict=True):
        assert forward == attention_traffic(schedule, *size).forward
        assert backward == attention_traffic(schedule, *size).backward


@given(plan=plans(), window=st.integers(1, 4))
@example(plan=SPARSE, window=2)
@examples(60)
def test_the_exchange_brings_the_keys_of_each_step_and_runs_ahead_by_the_window(plan, window):
    schedules = schedules_of(plan)
    count = threading.local()

    def post(*arguments, **options):
        count.under_way += 1
        return real_post(*arguments, **options)

    def wait(transfers):
        count.under_way -= 1
        real_wait(transfers)

    def keys_of(index, kv, tokens):
        """As in the exchange: [k, B, tokens, D]."""
        group = positions_of_group(schedules, index)[:tokens]
        return ids(group, 2, range(*kv), 3).permute(2, 1, 0, 3).contiguous()

    def parts_of(steps):
        return sum(len(step.parts) for step in steps)

    def check(part, received):
        for sent in part.receives:
            piece = received[sent.kv[0] - part.kv[0] : sent.kv[1] - part.kv[0]]
            assert torch.equal(piece, keys_of(sent.peer, sent.kv, sent.keys))

    def assert_under_way(expected):
        assert count.under_way == expected

    def work(rank):
        own = schedules[rank.rank]
        everyone = rank.new_group("domain", range(len(schedules)))
        count.under_way = 0
        keys = keys_of(rank.rank, own.own_kv, own.group_tokens)
        recorder = Recorder(keys.dtype, keys.device)
        key, value = keys.transpose(0, 1).split([2, 1], dim=3)
        inputs = recorder.inputs(key.shape, value.shape)
        keys_in, values_in = inputs
        steps = KVExchange(recorder, keys_in, values_in, own, everyone)
        for operation in own.program(backward=False, window=window):
            recorder.begin(operation)
            match operation:
                case Post(Batch("keys")):
                    steps.post(own.part(operation.batch))
                case Wait(Batch("keys", number)):
                    part = own.part(operation.batch)
                    received = steps.wait(part)
                    rest = len(own.steps[number].parts) - 1 - operation.batch.part
                    ahead = own.steps[number + 1 : number + 1 + window]
                    recorder.do(partial(assert_under_way, rest + parts_of(ahead)))
                    assert (received is None) == (not part.receives)
                    recorder.do(partial(check, part), received)
                case OwnBlock(0):
                    recorder.do(partial(assert_under_way, parts_of(own.steps[:window])))
        recorder.compile()(key, value)
        assert count.under_way == 0
        assert torch.equal(keys, keys_of(rank.rank, own.own_kv, own.group_tokens))
        return len(own.steps)

    real_post, real_wait = wire_room.post, Transfers.wait
    with mock.patch.object(exchange, "post", post), mock.patch.object(Transfers, "wait", wait):
        seen = run_ranks(len(schedules), work)
    assert seen == [len(schedule.steps) for schedule in schedules]
