"""Rows over random borders between real gloo groups: what arrives is what the plan says, whoever is slow."""

import time
from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.mesh import HeldRows, RowBlock, RowMessage, border_messages, held_rows
from megatron_hexi.runtime import row_channel
from megatron_hexi.runtime.row_channel import RowChannel
from tests.support.plans import examples
from tests.support.stage_plans import meshes
from tests.support.threads import ThreadRank, run_ranks

HIDDEN = 3
CPU = torch.device("cpu")


def with_border(mesh):
    return len(mesh.plan.replicas[0].stages) > 1


BORDERS = meshes(most_ranks=7, most_replicas=1).filter(with_border)
SEEDS = st.integers(0, 2**24 - 1)


def batch_of(mesh, number, dtype, seed):
    """[S, B, hidden] of a micro-batch, the same on all ranks."""
    shape = (mesh.plan.workload.seq_length, mesh.micro_batch_size, HIDDEN)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + number)).to(dtype)


def local_rows(held, batch, padding):
    """A rank's rows [L, b, hidden] of a batch, gathered by plain indexing."""
    positions = [position for span in held.positions for position in range(*span)]
    samples = slice(*held.samples)
    rows = torch.full((held.rows, held.samples[1] - held.samples[0], HIDDEN), padding, dtype=batch.dtype)
    rows[: len(positions)] = batch[positions][:, samples]
    return rows


def run_border(mesh, dtype, seed, micro_batches, forward_only=False, pauses=0.0):
    """Run the last border of the first replica as a 1F1B schedule does.

    Returns:
        For each rank of both stages: received rows of each micro-batch beside those expected, and its
        channels' bytes with those of the table.
    """
    stage = len(mesh.plan.replicas[0].stages) - 1
    before, behind = mesh.stage_ranks(0, stage - 1), mesh.stage_ranks(0, stage)
    ranks = sorted(before + behind)
    forward = border_messages(mesh, 0, stage - 1, stage)
    backward = border_messages(mesh, 0, stage, stage - 1)

    def work(thread):
        rank = ranks[thread.rank]
        random = Random(seed + rank)
        groups = ThreadRank(rank, thread.store)
        held = held_rows(mesh, rank)
        channels = [
            RowChannel(messages, held, groups.new_group(name, ranks), CPU)
            for name, messages in (("forward", forward), ("backward", backward))
        ]
        is_source = rank in before
        outgoing, incoming = channels if is_source else channels[::-1]
        shape = (held.rows, held.samples[1] - held.samples[0], HIDDEN)
        found = []

        def pause():
            time.sleep(random.random() * pauses)

        def send(number, kind):
            pause()
            outgoing.send(local_rows(held, batch_of(mesh, 2 * number + kind, dtype, seed), padding=99.0))

        def receive(number, kind):
            incoming.expect(shape, dtype)
            pause()
            rows = incoming.receive()
            if number + 1 < micro_batches:
                incoming.expect(shape, dtype)
            found.append(
                (rows, local_rows(held, batch_of(mesh, 2 * number + kind, dtype, seed), padding=0.0))
            )

        if forward_only:
            for number in range(micro_batches):
                (send if is_source else receive)(number, 0)
        elif is_source:
            send(0, 0)  # one micro-batch ahead of the stage behind
            for number in range(1, micro_batches):
                send(number, 0)
                receive(number - 1, 1)
            receive(micro_batches - 1, 1)
        else:
            for number in range(micro_batches):
                receive(number, 0)
                send(number, 1)
        for channel in channels:
            channel.finish()
        sent = [
            message.num_rows for message in (forward if is_source else backward) if message.source == rank
        ]
        planned = 0 if forward_only and not is_source else sum(sent) * HIDDEN * dtype.itemsize * micro_batches
        return found, (outgoing.sent_bytes, planned), incoming.sent_bytes

    return run_ranks(len(ranks), work)


def check_border(results):
    for found, (sent, planned), idle in results:
        for rows, expected in found:
            assert torch.equal(rows, expected)
        assert sent == planned
        assert idle == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_and_gradients_arrive_where_the_plan_has_them(dtype):
    @examples(40)
    @given(mesh=BORDERS, seed=SEEDS, micro_batches=st.integers(1, 5))
    def arrive(mesh, seed, micro_batches):
        results = run_border(mesh, dtype, seed, micro_batches)
        assert sum(len(found) for found, *_ in results) == micro_batches * len(results)
        check_border(results)

    arrive()


@examples(10)
@given(mesh=BORDERS, seed=SEEDS)
def test_ranks_of_unequal_speed_do_not_mix_micro_batches_up(mesh, seed):
    check_border(run_border(mesh, torch.float32, seed, 4, pauses=0.01))


@examples(15)
@given(mesh=BORDERS, seed=SEEDS)
def test_a_forward_only_pass_ends_when_all_has_left(mesh, seed):
    """Evaluation: nothing comes back, and training goes on over the same groups."""
    check_border(run_border(mesh, torch.float32, seed, 3, forward_only=True, pauses=0.003))
    check_border(run_border(mesh, torch.float32, seed, 2))


def test_finish_waits_for_all_that_is_under_way(monkeypatch):
    waited: Counter[int] = Counter()
    nobody: Any = None

    class Slow:
        def __init__(self, number):
            self.number = number

        def is_done(self):
            return False

        def wait(self):
            waited[self.number] += 1

    numbers = iter(range(10))
    monkeypatch.setattr(row_channel, "post", lambda *_: Slow(next(numbers)))
    channel = RowChannel((), HeldRows(0, ((0, 4),), (0, 1), 4), nobody, CPU)
    for _ in range(3):
        channel.send(torch.ones(4, 1, HIDDEN))
    assert waited == Counter()
    channel.finish()
    assert waited == Counter(range(3))


def test_a_run_of_rows_is_sent_from_where_it_lies_and_arrives_where_it_is_used(monkeypatch):
    """A rank whose rows all go to one rank copies none of them."""
    posted: list[torch.Tensor] = []

    class Done:
        def wait(self):
            pass

    def post(receives, sends, *_):
        posted.extend(message.tensor for message in (*receives, *sends))
        return Done()

    monkeypatch.setattr(row_channel, "post", post)
    monkeypatch.setattr(RowChannel, "_peer", lambda self, rank: rank)
    nobody: Any = None
    blocks = (RowBlock(((0, 2), (5, 6)), (0, 2)), RowBlock(((6, 8),), (0, 2)))
    message = RowMessage(0, 1, blocks)
    held = [HeldRows(rank, ((0, 2), (5, 8)), (0, 2), 6) for rank in (0, 1)]
    source, target = (RowChannel((message,), one, nobody, CPU) for one in held)
    rows = torch.randn(6, 2, HIDDEN)
    source.send(rows)
    target.expect(rows.shape, rows.dtype)
    received = target.receive()
    sent, arrived = posted
    assert sent.data_ptr() == rows.data_ptr()
    assert arrived.data_ptr() == received.data_ptr()
    assert sent.numel() == arrived.numel() == 5 * 2 * HIDDEN


def shifted(original):
    """Rows are written one row further down."""

    def receive(self):
        return original(self).roll(1, 0)

    return receive


def spoiled(original):
    """What stands in the last row, padding or not, is lost."""

    def receive(self):
        rows = original(self)
        rows[-1] = 1.0
        return rows

    return receive


@pytest.mark.parametrize("fault", [shifted, spoiled])
def test_the_check_finds_rows_in_the_wrong_place(fault, monkeypatch):
    monkeypatch.setattr(RowChannel, "receive", fault(RowChannel.receive))
    caught = 0

    @examples(12)
    @given(mesh=BORDERS, seed=SEEDS)
    def search(mesh, seed):
        nonlocal caught
        try:
            check_border(run_border(mesh, torch.float32, seed, 1))
        except AssertionError:
            caught += 1

    search()
    assert caught >= 6
