"""Rows over borders: each row that a target holds arrives once, from a rank that holds it, and no other."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.mesh import Mesh, RowMessage, border_messages, held_rows
from megatron_hexi.mesh import border as border_room
from megatron_hexi.plan.batch_balance import balanced_domain, packed_domain
from tests.support.plans import RANDOMS, examples, with_rates
from tests.support.stage_plans import meshes


def held_by(mesh, rank, documents):
    """Positions of a rank's rows in order, from the plan alone; padding is ``None``."""
    domain, rates = mesh.units[rank].domain, mesh.plan.rates
    if documents is not None and rates is None:
        domain = packed_domain(domain, documents)
    elif documents is not None and rates is not None:
        units = sorted({unit.ranks for unit in mesh.units})
        numbers = [units.index(member.ranks) for member in domain.members]
        domain = balanced_domain(domain, documents, rates.of(numbers))
    for group in domain.groups:
        free = iter(position for span in group.segments for position in range(*span))
        for member in group.members:
            own: list[int | None] = list(itertools.islice(free, member.tokens))
            if rank not in member.ranks:
                continue
            if not mesh.sequence_parallel:
                return own or [None]
            width = len(member.ranks)
            own += [None] * ((max(len(own), 1) + width - 1) // width * width - len(own))
            return own[member.ranks.index(rank) * len(own) // width :][: len(own) // width]
    raise AssertionError


def borders(mesh):
    """Every border in both directions: replica, source, target."""
    for number, replica in enumerate(mesh.plan.replicas):
        for stage in range(1, len(replica.stages)):
            yield number, stage - 1, stage
            yield number, stage, stage - 1


def check_messages(mesh, messages, targets, documents):
    """Each target gets each (position, sample) that it holds once, from a rank that holds it."""
    arrived: Counter[tuple[int, int, int]] = Counter()
    for message in messages:
        holds = set(held_by(mesh, message.source, documents))
        samples = range(*mesh.units[message.source].samples)
        for block in message.blocks:
            for span in block.positions:
                for position, sample in itertools.product(range(*span), range(*block.samples)):
                    assert position in holds
                    assert sample in samples
                    arrived[message.target, position, sample] += 1
    wanted = Counter(
        (rank, position, sample)
        for rank in targets
        for position in held_by(mesh, rank, documents)
        for sample in range(*mesh.units[rank].samples)
        if position is not None
    )
    assert arrived == wanted


@st.composite
def cases(draw):
    """A mesh, and the documents of its sequence or none; they may be assigned by rates of the units."""
    mesh = draw(meshes())
    mesh = Mesh(draw(with_rates(mesh.plan)), mesh.micro_batch_size, mesh.sequence_parallel)
    random = draw(RANDOMS)
    length = mesh.plan.workload.seq_length
    if random.random() < 0.4:
        return mesh, None
    cuts = sorted(random.sample(range(1, length), random.randint(0, min(5, length - 1))))
    return mesh, tuple(stop - start for start, stop in itertools.pairwise([0, *cuts, length]))


@examples(150)
@given(case=cases())
def test_local_rows_are_the_positions_in_order_with_padding_last(case):
    mesh, documents = case
    for rank, unit in enumerate(mesh.units):
        held, expected = held_rows(mesh, rank, documents), held_by(mesh, rank, documents)
        positions = [position for span in held.positions for position in range(*span)]
        assert held.rows == len(expected)
        assert positions + [None] * (held.rows - len(positions)) == expected
        assert held.samples == unit.samples
        for position in positions:
            assert held.local([(position, position + 1)]) == (
                (expected.index(position), expected.index(position) + 1),
            )


@examples(250)
@given(case=cases())
def test_each_row_arrives_once_from_a_rank_that_holds_it(case):
    mesh, documents = case
    for replica, source, target in borders(mesh):
        messages = border_messages(mesh, replica, source, target, documents)
        pairs = [(message.source, message.target) for message in messages]
        assert pairs == sorted(set(pairs))
        assert {rank for rank, _ in pairs} <= set(mesh.stage_ranks(replica, source))
        assert all(message.num_rows > 0 for message in messages)
        check_messages(mesh, messages, mesh.stage_ranks(replica, target), documents)


@examples(250)
@given(case=cases())
def test_ranks_that_hold_the_same_rows_share_the_load_within_one_row_a_run(case):
    mesh, documents = case
    for replica, source, target in borders(mesh):
        ranks = mesh.stage_ranks(replica, source)
        held = {rank: set(held_by(mesh, rank, documents)) for rank in ranks}
        sent: dict[tuple, Counter[int]] = {}
        for message in border_messages(mesh, replica, source, target, documents):
            for block in message.blocks:
                for position in itertools.chain.from_iterable(range(*span) for span in block.positions):
                    holders = tuple(
                        rank
                        for rank in ranks
                        if position in held[rank]
                        and mesh.units[rank].samples[0] <= block.samples[0]
                        and block.samples[1] <= mesh.units[rank].samples[1]
                    )
                    run = sent.setdefault((message.target, block.samples, holders), Counter())
                    run[message.source] += 1
        for (_, _, holders), counts in sent.items():
            loads = [counts[rank] for rank in holders]
            assert max(loads) - min(loads) <= 1


def sent_twice(messages):
    first, *rest = messages
    return (RowMessage(first.source, first.target, (*first.blocks, first.blocks[0])), *rest)


def left_out(messages):
    return messages[1:]


def of_another(messages):
    """The rows of one sample too far."""
    first, *rest = messages
    block = replace(first.blocks[0], samples=tuple(end + 1 for end in first.blocks[0].samples))
    return (replace(first, blocks=(block, *first.blocks[1:])), *rest)


@pytest.mark.parametrize("fault", [sent_twice, left_out, of_another])
def test_the_check_finds_rows_that_are_sent_wrongly(fault, monkeypatch):
    original = border_room.row_messages
    monkeypatch.setattr(border_room, "row_messages", lambda *sides: fault(original(*sides)))
    mesh = meshes().filter(lambda mesh: any(borders(mesh)))
    found = 0

    @examples(20)
    @given(mesh=mesh)
    def search(mesh: Mesh):
        nonlocal found
        for replica, source, target in borders(mesh):
            with pytest.raises(AssertionError):
                check_messages(
                    mesh,
                    border_messages(mesh, replica, source, target),
                    mesh.stage_ranks(replica, target),
                    None,
                )
            found += 1

    search()
    assert found > 10
